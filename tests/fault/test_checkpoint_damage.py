"""Checkpoints that were damaged: noticed before anything changes, on all ranks, file and tensor named."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from harness import run_ranks
from harness.checkpoint_run import Run, differences, state_of

import bmtrain as bmt
from bmtrain.distributed import checkpoint
from bmtrain.distributed.checkpoint.manifest import CHUNK, Manifest, Piece, ShardFile, StoredTensorInfo
from bmtrain.errors import UnreadableFileError


def make(folder: str) -> None:
    run = Run()
    for _ in range(2):
        run.train(1)
        run.save(f"{folder}/good")


def refused(path: Path, run: Run, before: dict) -> str:
    """Loads on all ranks; returns the error's text after making sure that nothing changed."""
    with pytest.raises((UnreadableFileError, FileNotFoundError)) as caught:
        checkpoint.load(path, run.model, run.manager)
    assert differences(before, state_of(run)) == []
    return str(caught.value)


def on_rank_0(action) -> None:
    bmt.synchronize()
    if bmt.rank() == 0:
        action()
    bmt.synchronize()


@pytest.mark.parametrize("world", [1, 2])
def test_damage_is_noticed_and_named(world, tmp_path):
    run_ranks(world, make, str(tmp_path))
    assert len(set(run_ranks(world, check_damage, str(tmp_path)))) == 1  # the same texts on all ranks


def check_damage(folder: str) -> str:
    good, bad = Path(folder) / "good" / "step-0000002", Path(folder) / "bad"
    run = Run(seed=5)
    before = state_of(run)
    generator = random.Random(1)
    texts: list[str] = []

    def attempt(damage) -> str:
        def replace() -> None:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            damage()

        on_rank_0(replace)
        texts.append(refused(bad, run, before))
        return texts[-1]

    manifest = json.loads((good / "manifest.json").read_text())["manifest"]
    shards = [file["name"] for file in manifest["files"]]
    for name in (*shards, "manifest.json"):
        size = (good / name).stat().st_size
        for point in sorted({0, 1, size // 2, size - 1, *(generator.randrange(size) for _ in range(4))}):
            text = attempt(lambda name=name, point=point: cut(bad / name, point))
            assert name in text
            assert name == "manifest.json" or "from tensor" in text
        for _ in range(12):
            bit = generator.randrange(8 * size)
            text = attempt(lambda name=name, bit=bit: flip(bad / name, bit))
            assert name in text
            assert name == "manifest.json" or "damaged at tensor " in text
    other = Path(folder) / "good" / "step-0000001"
    [foreign] = other.glob("shard-0-*.bin")
    assert shards[0] in attempt(lambda: shutil.copy(foreign, bad / shards[0]))
    assert shards[-1] in attempt(lambda: (bad / shards[-1]).unlink())
    if len(shards) > 1:
        assert "shard-" in attempt(lambda: swap(bad / shards[0], bad / shards[1]))
    assert checkpoint.load(good, run.model, run.manager).step == 2
    return "\n".join(texts)


#: Where the text of a manifest is changed, the value that is put there, and what the refusal says.
CHANGES: list[tuple[tuple[Any, ...], Any, str]] = [
    (("format",), 2, "format 2: this version reads format 1"),
    (("step",), True, "the manifest: expected a number of at least 0, got True"),
    (("tp_size",), 0, "the manifest: expected a number of at least 1, got 0"),
    (("ep_size",), 0, "the manifest: expected a number of at least 1, got 0"),
    (("values",), [], "values: expected a table"),
    (("ranks", 1), None, "values: expected a table, and one for each rank"),
    (("files", 0, "name"), "../shard-0.bin", "is not the name of a shard"),
    (("files", 0, "size"), CHUNK + 1, "shard-0.bin: 1 checksums do not go with"),
    (("files", 1, "crc32"), [-1], "shard-1.bin: expected a number of at least 0, got -1"),
    (("tensors", "w", "dtype"), "float31", "tensor w: unknown dtype 'float31'"),
    (("tensors", "w", "shape"), [2, -3], "tensor w: expected a number of at least 0, got -3"),
    (("tensors", "w", "parts"), 4, "cannot cut shape"),
    (("tensors", "w", "dim"), -1, "parts: expected 1 without a dimension to cut"),
    (("tensors", "w", "pieces", 0, 1), CHUNK - 4, "tensor w: goes beyond the end of shard-0.bin"),
    (("tensors", "w", "pieces", 0, 0), 2, "not a manifest of this library: IndexError"),
    (("tensors", "w", "pieces", 2, 2), 2, "tensor w: a piece of slice 2 of 2"),
    (("tensors", "w", "pieces", 2, 2), 0, "tensor w: pieces of 1 of 2 slices"),
    (("tensors", "w", "pieces", 0, 4), 1, "tensor w: its pieces make 1 of 3 elements"),
    (("tensors", "w", "pieces", 1, 3), 3, "tensor w: its pieces make 2 of 3 elements"),
    (("tensors", "w", "pieces", 1, 4), 2, "tensor w: its pieces make 4 of 3 elements"),
]


@pytest.mark.parametrize(("place", "value", "text"), CHANGES, ids=str)
def test_a_manifest_that_makes_no_sense_is_refused(place: tuple[Any, ...], value: Any, text: str) -> None:
    """Although its checksum is right: the text that ``save`` makes of the ranks' messages is read in this way too."""
    pieces = [Piece(0, 0, 0, 0, 2), Piece(1, 64, 0, 2, 1), Piece(1, 0, 1, 0, 3)]
    files = [ShardFile(f"shard-{rank}.bin", CHUNK, [7]) for rank in range(2)]
    tensors = {"w": StoredTensorInfo("float32", [2, 3], 0, 2, pieces)}
    good = Manifest(3, "0a", 2, 1, 1, files, tensors, {}, [{}, {}])
    assert Manifest.from_bytes(good.to_bytes(), "it") == good
    entry = table = json.loads(good.to_bytes())["manifest"]
    for name in place[:-1]:
        entry = entry[name]
    entry[place[-1]] = value
    body = json.dumps(table).encode()
    head = f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",\n"manifest": '.encode()
    with pytest.raises(UnreadableFileError, match=re.escape(text)):
        Manifest.from_bytes(head + body + b"}\n", "it")


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_passed_over_is_told(world, tmp_path):
    run_ranks(world, check_passed_over, str(tmp_path))


def check_passed_over(folder: str) -> None:
    """A run that goes back to an older checkpoint, or to the beginning, says which one it could not take, and why."""
    make(folder)
    good = Path(folder) / "good"
    run = Run(seed=5)
    for step, is_left in ((2, True), (1, False)):
        path = good / f"step-{step:07d}"
        on_rank_0(lambda path=path: cut(next(path.glob("shard-0-*")), 100))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = checkpoint.latest(good)
        assert (found is not None) == is_left
        if bmt.rank() == 0:  # who looks at the folder
            text = str(caught[-1].message)
            assert text.startswith(f"{path}: passed over, no longer a complete checkpoint: {path}/shard-0-")
            assert "got 100" in text
    with pytest.raises(FileNotFoundError, match="no complete checkpoint: none in this folder"):
        run.load(good)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint: no such file or folder"):
        run.load(good / "nowhere")


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
