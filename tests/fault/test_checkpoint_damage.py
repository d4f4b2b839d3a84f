"""Checkpoints that were damaged: noticed before anything changes, on all ranks, file and tensor named."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path

import pytest
from harness import run_ranks
from harness.checkpoint_run import Run, differences, state_of

import bmtrain as bmt
from bmtrain.distributed import checkpoint
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
