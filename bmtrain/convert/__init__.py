"""Convert weights between files of bmtrain.save, safetensors (Hugging Face models included) and checkpoint folders."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .._archive_writer import write_archive
from .._safetensors import write_folder, write_safetensors
from ..distributed.checkpoint.layout import step_folder
from ..distributed.checkpoint.snapshot import Run
from ..distributed.checkpoint.spread import Spread
from ..distributed.checkpoint.writer import write_single
from .sources import TIES, Source, open_source

__all__ = ["add_arguments", "convert", "run"]

KINDS = ("pt", "safetensors", "checkpoint")


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str | None = None,
    *,
    max_shard_size: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Writes the weights of ``source`` to ``target``, bit for bit, holding one tensor at a time.

    Names stay: a model of Hugging Face keeps the names of Hugging Face. A tensor with several names is stored once.

    Args:
        source: a file of :func:`bmtrain.save` or ``torch.save``; a safetensors file, index, or folder of these; a
            checkpoint or a folder of checkpoints.
        target: a file; for ``"checkpoint"`` the folder in which ``step-0000000`` is made; for ``"safetensors"`` a
            file or a folder that gets ``model.safetensors`` and, if that is too large, numbered files with an index.
        to: ``"pt"``, ``"safetensors"`` or ``"checkpoint"``; by default what the name of ``target`` says.
        max_shard_size: bytes of the largest safetensors file in a folder; None for one file.
        report: called with bytes done and to do.

    Raises:
        ValueError: ``target`` does not say what it is to be.
        UnreadableFileError: the source is damaged or not of a known kind.
        OSError: something cannot be read or written; nothing appears at ``target`` then.
    """
    path = Path(target)
    kind = to or _kind_of(path)
    if kind not in KINDS:
        raise ValueError(f"to: expected one of {', '.join(KINDS)}, got {kind!r}")
    opened = open_source(Path(source))
    read = _reporting(opened, report)
    if kind == "pt":
        write_archive(path, opened.table, read, opened.ties, opened.order)
    elif kind == "safetensors":
        _to_safetensors(opened, path, read, max_shard_size)
    else:
        _to_checkpoint(opened, path, read)


def _kind_of(path: Path) -> str:
    if path.suffix in (".pt", ".pth", ".bin"):
        return "pt"
    if path.suffix == ".safetensors":
        return "safetensors"
    raise ValueError(
        f"{path}: cannot tell what to write from the name: give to= (--to) one of {', '.join(KINDS)}"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``python -m bmtrain convert``."""
    parser.add_argument("source", help="file of torch.save, safetensors file, index or folder, or checkpoint")
    parser.add_argument("target", help="what to write")
    parser.add_argument("--to", choices=KINDS, help="kind of the target, where its name does not say it")
    parser.add_argument(
        "--max-shard-size", type=int, metavar="BYTES", help="split a safetensors folder into files"
    )


def run(options: argparse.Namespace) -> int:
    """Converts; returns the exit status."""
    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        if percent >= shown + 5 or done == total:
            shown = percent
            print(
                f"convert: {percent:3d} %, {done / 1e6:.1f} of {total / 1e6:.1f} MB",
                file=sys.stderr,
                flush=True,
            )

    try:
        convert(
            options.source, options.target, options.to, max_shard_size=options.max_shard_size, report=report
        )
    except (OSError, ValueError, TypeError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    return 0
