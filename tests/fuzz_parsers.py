"""Damaged and hostile tables of contents: whatever the bytes, they are read or refused by name.

    python tests/fuzz_parsers.py [--executions 1000000] [--seed 1] [--target manifest ...]

Each execution mutates a valid file of one kind (bytes of it, or values in its JSON, with the checksums made right again
where there are any) and gives it to the parser. Anything but success or UnreadableFileError is a failure: the bytes are
printed. The process may use 1 GiB more than it does at the start, so that a length that is believed is a failure too.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import resource
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from bmtrain._files.archive import read_archive
from bmtrain._files.safetensors import SafetensorsFile, locate_tensors, write_safetensors
from bmtrain._files.torch_folder import TorchFolder
from bmtrain._files.torch_folder_writer import Part, write_part, write_table
from bmtrain._files.torch_table import METADATA, read_table
from bmtrain.distributed.checkpoint.manifest import CHUNK, Manifest, Piece, ShardFile, StoredTensorInfo
from bmtrain.errors import UnreadableFileError

HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 63, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 10**400,
    0.5, -0.0, 1e308, float("nan"), float("inf"), "", "0", "F32", "float32", "bool", "../x", "/etc/passwd", "\0",
    "é\ud800", [], {}, [0], [[]], [0, 0], [-1, 1], [2**62, 2**62], [0, 2**62], {"": 0}, [[0, 0, 0, 0, 0]], "x" * 300,
]  # fmt: skip
TOKENS = [*(bytes([c]) for c in b'{}[]",:-0'), b"1e999", b"null", b"9" * 30, b"\\u0000", b"\xff", b"[" * 2000]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few random changes anywhere."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = rng.randrange(256)
        elif kind == 2:
            del out[at : at + rng.choice((1, 2, 5, 40))]
        elif kind == 3:
            out[at:at] = rng.choice(TOKENS)
        elif kind == 4:
            begin = rng.randrange(len(out) + 1)
            out[at:at] = out[begin : begin + rng.randrange(1, 30)]
        else:
            del out[at:]
    return bytes(out)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """One value of a copy is replaced, removed, repeated or given another name."""
    if isinstance(value, dict) and value and rng.random() < 0.95:
        changed: dict[str, Any] = dict(value)
        key = rng.choice(list(changed))
        kind = rng.randrange(12)
        if kind == 0:
            del changed[key]
        elif kind == 1:
            changed[str(rng.choice(HOSTILE))[:40]] = changed.pop(key)
        else:
            changed[key] = mutate_json(changed[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        items = list(value)
        at = rng.randrange(len(items))
        kind = rng.randrange(10)
        if kind == 0:
            del items[at]
        elif kind == 1:
            items.insert(at, rng.choice(items))
        else:
            items[at] = mutate_json(items[at], rng)
        return items
    if isinstance(value, int) and rng.random() < 0.3:
        return value + rng.choice((-1, 1, 2, -value, value, 2**32))
    return rng.choice(HOSTILE)


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass")


class Case:
    """A valid file, what becomes of it, and who reads it."""

    also_refused: tuple[type[BaseException], ...] = ()
    valid: bytes

    def __call__(self, rng: random.Random) -> bytes:
        """Other bytes."""
        raise NotImplementedError

    def parse(self, data: bytes) -> None:
        """Reads them all."""
        raise NotImplementedError


class Safetensors(Case):
    """One file: its length, its JSON, its data."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.safetensors"
        tensors = {
            "a": torch.ones(2, 3),
            "b.weight": torch.zeros(5, dtype=torch.bfloat16),
            "c": torch.zeros(()),
        }
        table = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        write_safetensors(self.path, table, tensors.values(), {"format": "pt"})
        self.valid = self.path.read_bytes()
        length = int.from_bytes(self.valid[:8], "little")
        self.table, self.data = json.loads(self.valid[8 : 8 + length]), self.valid[8 + length :]
        self.file = self.path.open("r+b", buffering=0)

    def __call__(self, rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutate_bytes(self.valid, rng)
        header = dumps(mutate_json(self.table, rng))
        if rng.random() < 0.3:
            header = mutate_bytes(header, rng)
        return len(header).to_bytes(8, "little") + header + self.data

    def parse(self, data: bytes) -> None:
        self.file.seek(0)
        self.file.write(data)
        self.file.truncate()
        file = SafetensorsFile(self.path)
        for name in file.places:
            file.read(name)


class Index(Safetensors):
    """The table that says which of several files has a tensor; one that it names may be missing."""

    also_refused = (FileNotFoundError,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file.close()
        self.path = folder / "model.safetensors.index.json"
        self.table = {"metadata": {"total_size": 34}, "weight_map": dict.fromkeys("abc", "model.safetensors")}
        self.table["weight_map"]["b.weight"] = self.table["weight_map"].pop("b")
        self.valid = dumps(self.table)
        self.path.write_bytes(self.valid)
        self.file = self.path.open("r+b", buffering=0)

    def __call__(self, rng: random.Random) -> bytes:
        data = dumps(mutate_json(self.table, rng))
        return mutate_bytes(data, rng) if rng.random() < 0.5 else data

    def parse(self, data: bytes) -> None:
        self.file.seek(0)
        self.file.write(data)
        self.file.truncate()
        locate_tensors(self.path)


class ManifestText(Case):
    """The manifest of a checkpoint; its checksum is right in most executions."""

    def __init__(self, folder: Path) -> None:
        files = [ShardFile(f"shard-0a-{rank}.bin", 2 * CHUNK - 5, [1, 2**32 - 1]) for rank in range(2)]
        pieces = [Piece(0, 0, 0, 0, 12), Piece(1, 64, 1, 0, 12)]
        tensors = {
            "model/w": StoredTensorInfo("float32", [4, 6], 0, 2, pieces),
            "model/b": StoredTensorInfo("bfloat16", [3], -1, 1, [Piece(1, 2, 0, 0, 3)]),
            "empty": StoredTensorInfo("int64", [0, 2], -1, 1, []),
        }
        values = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "scale": 1024}
        self.valid = Manifest(3, "0a", 2, 1, 1, files, tensors, values, [{"data": 1}, {}]).to_bytes()
        self.table = json.loads(self.valid)["manifest"]

    def __call__(self, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return mutate_bytes(self.valid, rng)
        body = dumps(mutate_json(self.table, rng))
        if rng.random() < 0.3:
            body = mutate_bytes(body, rng)
        return f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",\n"manifest": '.encode() + body + b"}\n"

    def parse(self, data: bytes) -> None:
        manifest = Manifest.from_bytes(data, "manifest")
        numbers = [manifest.step, manifest.world_size, manifest.tp_size, manifest.pipe_size]
        for file in manifest.files:
            numbers += [file.size, *file.crc32]
        for tensor in manifest.tensors.values():
            numbers += [
                *tensor.shape,
                tensor.dim + 1,
                tensor.parts,
                *(n for piece in tensor.pieces for n in piece),
            ]
            for piece in tensor.pieces:  # as a reader uses them
                assert piece.offset + piece.num <= manifest.files[piece.file].size
                for begin, count in islice(tensor.spread.to_whole(piece.part, piece.begin, piece.num), 100):
                    assert 0 <= begin <= begin + count <= tensor.spread.numel
        assert all(type(number) is int and number >= 0 for number in numbers), numbers
        dict(manifest.values)
        assert all(isinstance(rank, dict) for rank in manifest.ranks)


class Archive(Case):
    """A file of ``bmtrain.save``: a zip archive whose records have checksums, which are right in most executions."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.pt"
        torch.save({"a": torch.ones(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16)}, self.path)
        self.valid = self.path.read_bytes()
        with zipfile.ZipFile(self.path) as archive:
            self.records = {info.filename: archive.read(info) for info in archive.infolist()}
        self.pickle = next(name for name in self.records if name.endswith("data.pkl"))

    def __call__(self, rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutate_bytes(self.valid, rng)
        records = dict(self.records)
        name = self.pickle if rng.random() < 0.8 else rng.choice(list(records))
        records[name] = mutate_bytes(records[name], rng)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
            for record, data in records.items():
                archive.writestr(record, data)
        return packed.getvalue()

    def parse(self, data: bytes) -> None:
        self.path.write_bytes(data)
        for value in read_archive(self.path).values():
            if isinstance(value, torch.Tensor):
                value.clone()


class TorchTable(Case):
    """The table of ``torch.distributed.checkpoint``, a pickle; a file that it names may be missing."""

    also_refused: tuple[type[BaseException], ...] = (FileNotFoundError,)
    file = METADATA

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "torch"
        boxes = [((0, 0), (2, 3)), ((2, 0), (1, 2)), ((2, 2), (1, 1))]
        parts = [
            Part(("model", "w"), torch.float32, (3, 3), *box, partial(torch.ones, box[1])) for box in boxes
        ]
        write_table(self.folder, [write_part(self.folder, 0, 1, parts, {("lr",): 0.1})])
        self.path = self.folder / self.file
        self.valid = self.path.read_bytes()

    def __call__(self, rng: random.Random) -> bytes:
        return mutate_bytes(self.valid, rng)

    def parse(self, data: bytes) -> None:
        self.path.write_bytes(data)
        found = TorchFolder(self.folder, json.loads(json.dumps({**read_table(self.folder), "paths": None})))
        found.check_sizes()
        for name in found.places:
            found.read(name)
        for name in found.values:
            found.value(name)


class TorchArchive(TorchTable):
    """The file of tensors that such a table describes."""

    also_refused = ()
    file = "__0_0.distcp"


TARGETS: dict[str, Callable[[Path], Case]] = {
    "safetensors": Safetensors,
    "index": Index,
    "manifest": ManifestText,
    "archive": Archive,
    "torch-table": TorchTable,
    "torch-archive": TorchArchive,
}


def fuzz(target: str, executions: int, seed: int) -> Counter[str]:
    """How many were read and how many refused.

    Raises:
        AssertionError: a parser raised something else; with the bytes.
    """
    rng, outcomes = random.Random(f"{target} {seed}"), Counter[str]()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        case = TARGETS[target](Path(folder))
        case.parse(case.valid)
        for number in range(executions):
            data = case(rng)
            try:
                case.parse(data)
                outcomes["read"] += 1
            except UnreadableFileError:
                outcomes["refused"] += 1
            except case.also_refused:
                outcomes["missing"] += 1
            except Exception as error:
                raise AssertionError(
                    f"{target}, execution {number} of seed {seed}: {error!r} for {data!r}"
                ) from error
    return outcomes


def limit_memory(more: int = 1 << 30) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--executions", type=int, default=1_000_000, help="of each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch has something to say about most pickles
    limit_memory()
    for target in options.target:
        start = time.monotonic()
        outcomes = fuzz(target, options.executions, options.seed)
        print(f"{target}: {dict(outcomes)} in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
