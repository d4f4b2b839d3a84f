"""Converts weights between files of bmtrain.save, safetensors (Hugging Face models included) and checkpoint folders."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from .._base.arguments import require_callable, require_integer, require_path
from .._files.archive_writer import write_archive
from .._files.safetensors import write_folder, write_safetensors
from .._files.torch_table import METADATA
from ..distributed.checkpoint.layout import step_folder
from ..distributed.checkpoint.snapshot import Run
from ..distributed.checkpoint.spread import Spread
from ..distributed.checkpoint.writer import write_single
from .layouts import LAYOUTS
from .relaid import Relaid
from .sources import TIES, Source, open_source

__all__ = ["add_arguments", "convert", "run"]

KINDS = ("pt", "safetensors", "checkpoint", "dcp")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str | None = None,
    *,
    layout: str | None = None,
    max_shard_size: int | None = None,
    overwrite: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes the weights of ``source`` to ``target``, bit for bit, holding one tensor at a time.

    Names and shapes stay unless a ``layout`` is given. A tensor with several names is stored once.

    Args:
        source: a file of :func:`bmtrain.save` or ``torch.save``; a safetensors file, index, or folder of these; a
            checkpoint or a folder of checkpoints; a checkpoint of ``torch.distributed.checkpoint``, as of FSDP2.
        target: a file; for ``"checkpoint"`` the folder in which ``step-0000000`` is made; for ``"safetensors"`` a
            file or a folder that gets ``model.safetensors`` and, if that is too large, numbered files with an index.
        to: ``"pt"``, ``"safetensors"``, ``"checkpoint"``, or ``"dcp"`` for a folder that
            ``torch.distributed.checkpoint.load`` reads; by default according to the name of ``target``.
        layout: shapes and names of the target: ``"gpt2"`` (``example/models/gpt.py``), ``"hf-gpt2"``,
            ``"hf-llama"``, or ``"hf-llama-fused"`` (Phi-3: queries, keys and values in one matrix, gate and up in
            another). The layout of the source is detected from its names; a GPT-2 cannot become a LLaMA. Masks and
            rotary frequencies in older files, which a model computes itself, are omitted.
        max_shard_size: bytes of the largest safetensors file in a folder; None for one file.
        overwrite: replace existing weights at ``target``.
        report: called with bytes done and to do.

    Raises:
        ValueError: the name of ``target`` has no known kind, the layout is unknown, or both are one folder.
        UnreadableFileError: the source is damaged, not of a known kind, or has no place in the layout.
        FileExistsError: there are weights at ``target`` already.
        OSError: something cannot be read or written; nothing appears at ``target`` then.

    Example:
        >>> convert("run/step-0000100", "Llama-mine", "safetensors", layout="hf-llama")     # doctest: +SKIP
    """
    require_path("source", source)
    require_path("target", target)
    require_callable("report", report)
    if max_shard_size is not None:
        require_integer("max_shard_size", max_shard_size, 1)
    path = Path(target)
    kind = to or _kind_of(path)
    if kind not in KINDS:
        raise ValueError(f"to: expected one of {', '.join(KINDS)}, got {kind!r}")
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    there = None if overwrite else _find_existing(path, kind)
    if there is not None:
        raise FileExistsError(
            f"target: expected no weights there, found {there}; name another target, or replace them "
            "(overwrite=True, --overwrite)"
        )
    opened = open_source(Path(source))
    if path.exists() and any(kind == own and path.samefile(folder) for own, folder in opened.replaceable):
        raise ValueError(
            f"target: expected another folder than the source, which is read meanwhile, got {target}"
        )
    if layout is not None:
        opened = Relaid(opened, layout)
    read = _reporting(opened, report)
    if kind == "pt":
        write_archive(path, opened.table, read, opened.ties, opened.order)
    elif kind == "safetensors":
        _to_safetensors(opened, path, read, max_shard_size)
    elif kind == "checkpoint":
        _to_checkpoint(opened, path, read)
    else:
        _to_torch_folder(opened, path, read)


def _find_existing(path: Path, kind: str) -> Path | None:
    """The files that a conversion to ``path`` would replace."""
    if kind == "checkpoint":
        places = [step_folder(path, 0)]
    elif kind == "dcp":
        places = [path / METADATA]
    elif kind == "safetensors" and path.suffix != ".safetensors":
        places = [path / "model.safetensors", path / "model.safetensors.index.json"]
    else:
        places = [path]
    return next((place for place in places if place.exists()), None)


def _kind_of(path: Path) -> str:
    if path.suffix in (".pt", ".pth", ".bin"):
        return "pt"
    if path.suffix == ".safetensors":
        return "safetensors"
    raise ValueError(
        f"{path}: its name does not determine the kind of file: give to= (--to) one of {', '.join(KINDS)}"
    )


def _reporting(source: Source, report: Callable[[int, int], None]) -> Callable[[str], torch.Tensor]:
    sizes = {name: dtype.itemsize * Spread(shape).numel for name, (dtype, shape) in source.table.items()}
    total = sum(sizes.values())
    done = 0

    def read(name: str) -> torch.Tensor:
        nonlocal done
        value = source.read(name)
        done += sizes[name]
        report(done, total)
        return value

    return read


def _to_safetensors(
    source: Source, path: Path, read: Callable[[str], torch.Tensor], max_shard_size: int | None
) -> None:
    metadata = {"format": "pt"}
    if source.ties:
        metadata[TIES] = json.dumps({"ties": source.ties, "order": source.order})
    if path.suffix == ".safetensors":
        write_safetensors(path, source.table, map(read, source.table), metadata)
        return
    write_folder(path, source.table, read, metadata, max_shard_size)


def _to_checkpoint(source: Source, folder: Path, read: Callable[[str], torch.Tensor]) -> None:
    def runs() -> Iterator[Run]:
        for name, (_, shape) in source.table.items():
            yield Run(f"model/{name}", Spread(shape), 0, 0, read(name).reshape(-1))

    keys = [[name, {"tensor": f"model/{source.ties.get(name, name)}"}] for name in source.order]
    write_single(step_folder(folder, 0), runs(), keys)


def _to_torch_folder(source: Source, folder: Path, read: Callable[[str], torch.Tensor]) -> None:
    from .._files.torch_folder_writer import Part, write_part, write_table

    folder.mkdir(parents=True, exist_ok=True)
    (folder / METADATA).unlink(missing_ok=True)
    parts = []
    for name in source.order:
        first = source.ties.get(name, name)
        dtype, shape = source.table[first]
        reading = partial(read if name == first else source.read, first)
        parts.append(Part(("model", name), dtype, shape, (0,) * len(shape), shape, reading))
    try:
        write_table(folder, [write_part(folder, 0, 1, parts, {})])
    except Exception:
        for file in folder.glob("__0_*.distcp"):
            file.unlink()
        raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``bmtrain convert``."""
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "source", help="file of torch.save, safetensors file, index or folder, checkpoint, or folder of these"
    )
    parser.add_argument("target", help="NAME.pt, NAME.safetensors, or with --to a folder")
    parser.add_argument("--to", choices=KINDS, help="kind of the target, if its name does not determine it")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        metavar="LAYOUT",
        help="layout of the target, if it differs from the source's: gpt2 (of example/models/gpt.py), hf-gpt2, "
        "hf-llama, or hf-llama-fused (queries, keys and values in one matrix, as Phi-3 has it)",
    )
    parser.add_argument(
        "--max-shard-size", type=_size, metavar="BYTES", help="of each file of a safetensors folder"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target")


_EXAMPLES = """examples:
  bmtrain convert run/step-0000100 model.safetensors
  bmtrain convert model.pt weights --to safetensors --max-shard-size 5000000000
  bmtrain convert out/model.pt weights --to safetensors --layout hf-gpt2

Values are preserved bit for bit. One tensor is in memory at a time. The target appears once it is complete."""


def _size(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of bytes from 1, got {text!r}")
    return int(text)


class _Progress:
    """Reports progress: on a terminal in one line, else in a line every few seconds; and the result at the end."""

    _SILENCE = 5.0  # seconds

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown, self._told = -1, time.monotonic()
        self._tensors = self._bytes = 0

    def __call__(self, done: int, total: int) -> None:
        self._tensors, self._bytes = self._tensors + 1, done
        percent = 100 * done // max(total, 1)
        if percent == self._shown or not (self._is_terminal or time.monotonic() - self._told > self._SILENCE):
            return
        self._shown, self._told = percent, time.monotonic()
        text = f"convert: {percent:3d} %, {done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
        begin, end = ("\r", "") if self._is_terminal else ("", "\n")
        print(begin + text, end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends an open line."""
        if self._is_terminal and self._shown >= 0:
            print(file=sys.stderr)

    def report(self, target: str) -> None:
        """Ends an open line, and prints the written files."""
        self.close()
        count = f"{self._tensors} tensor{'' if self._tensors == 1 else 's'}"
        print(f"convert: wrote {target}: {count}, {self._bytes / 1e6:,.1f} MB", file=sys.stderr)


def run(options: argparse.Namespace) -> int:
    """Converts; returns the exit status."""
    progress = _Progress()
    try:
        convert(
            options.source,
            options.target,
            options.to,
            layout=options.layout,
            max_shard_size=options.max_shard_size,
            overwrite=options.overwrite,
            report=progress,
        )
    except (OSError, ValueError, TypeError) as error:
        progress.close()
        print(f"bmtrain convert: {error}", file=sys.stderr)
        return 1
    progress.report(options.target)
    return 0
