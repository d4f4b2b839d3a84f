"""Faults of drives in mid-run: an error on all ranks; the last checkpoint has the bits of a run without faults."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_process, run_ranks
from harness.disk_tier import ALL, make, small_chunks, small_drive

import bmtrain as bmt
from bmtrain import _C

STEPS, SAVED = 5, 2


def steps(model: Any, manager: Any, numbers: range) -> None:
    for step in numbers:
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(100 * step + bmt.rank()))
        manager.zero_grad()
        manager.backward(model(x).square().mean())
        manager.step()


def built(places: dict[str, Any]) -> tuple[Any, Any, Any]:
    small_chunks()
    model, optimizer = make("AdamOptimizer", torch.float32, places)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    return model, optimizer, manager


def values(model: Any, optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    kept = [
        value for _, of_one in sorted(state.items()) for value in of_one.values() if torch.is_tensor(value)
    ]
    return [value.clone() for value in (*(p.detach() for p in model.parameters()), *kept)]


def without_faults() -> list[torch.Tensor]:
    model, optimizer, manager = built({})
    steps(model, manager, range(STEPS))
    return values(model, optimizer)


# ---- faults of the last rank


def fail_transfers(number: int, result: int) -> Callable[[Any, Path], None]:
    return lambda model, drive: _C.disturb_transfers(0, number, result)


def flip(what: str) -> Callable[[Any, Path], None]:
    def change(model: Any, drive: Path) -> None:
        stored = model.layers[1].weight._stored()
        getattr(stored, what).mapping[100:101].bitwise_xor_(4)

    return change


def fill(model: Any, drive: Path) -> None:
    """Leaves no room on the drive, and puts a tensor in a parameter's place, whose memory a user keeps."""
    with open(drive / "full", "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 16))
            except OSError:
                break
    global kept
    kept = model.layers[1].weight.data
    model.layers[1].weight.data = torch.zeros_like(kept)


kept: Any = None
FAULTS: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "read": (fail_transfers(0, -5), "Input/output error"),
    "write": (fail_transfers(12, -5), "Input/output error"),
    "short": (fail_transfers(1, 0), "the file ended after"),
    "room": (fail_transfers(30, -28), "No space left"),
    "parameters": (flip("parameters"), "checksum differs"),
    "full drive": (fill, "cannot reserve space"),
}


def fail(name: str, folder: str, drive: Path) -> str:
    model, _, manager = built(ALL)
    steps(model, manager, range(SAVED))
    bmt.distributed.checkpoint.save(folder, SAVED, model=model, optim=manager)
    if bmt.rank() == bmt.world_size() - 1:
        FAULTS[name][0](model, drive)
    try:
        with pytest.raises(bmt.errors.DiskError) as raised:
            steps(model, manager, range(SAVED, STEPS))
    finally:
        _C.disturb_transfers(0)
    return str(raised.value)


def resume(folder: str, places: dict[str, Any]) -> list[torch.Tensor]:
    model, optimizer, manager = built(places)
    assert bmt.distributed.checkpoint.load(folder, model=model, optim=manager).step == SAVED
    steps(model, manager, range(SAVED, STEPS))
    return values(model, optimizer)


@pytest.mark.parametrize("name", FAULTS)
def test_the_last_checkpoint_continues(name: str, tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    folder, place = str(tmp_path / "checkpoint"), nullcontext(tmp_path / "drive")
    with small_drive(tmp_path / "small", 16 << 20) if name == "full drive" else place as drive:
        init = {"tier_directories": [str(drive)]}
        texts = run_ranks(2, fail, name, folder, drive, init=init, fresh=True)
        assert len(set(texts)) == 1
        assert FAULTS[name][1] in texts[0]
        assert f"disk tier in {drive}" in texts[0]
        if name == "full drive":
            (drive / "full").unlink()
            assert os.statvfs(drive).f_bfree == os.statvfs(drive).f_blocks
        expected = run_ranks(2, without_faults)
        for found in (
            run_ranks(2, resume, folder, ALL, init=init, fresh=True),
            run_ranks(2, resume, folder, {}),
        ):
            for ours, theirs in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- kills

#: Forks processes that train, and kills each at a random moment. Prints how far they came.
KILLER = """
import os, random, sys, time
import torch
import bmtrain as bmt

def train(drive):
    bmt.init_distributed(tier_directories=[drive])
    everything = bmt.BlockPolicy(parameters="disk", gradients="disk", optimizer="disk")
    say = os.open(said, os.O_WRONLY | os.O_APPEND)
    while True:
        with bmt.default_policy(everything):
            model = bmt.TransformerBlockList([bmt.Block(bmt.nn.Linear(300, 300)) for _ in range(3)])
        optimizer = bmt.optim.AdamOptimizer(model.parameters())
        for _ in range(20):
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
            os.write(say, b".")

drive, said, longest = sys.argv[1], sys.argv[3], None
open(said, "w").close()
for number in range(1 + int(sys.argv[2])):
    begin = time.monotonic()
    child = os.fork()
    if not child:
        train(drive)
    if longest is None:  # the first shows how long 30 steps and the second model take
        while os.stat(said).st_size < 30:
            time.sleep(0.01)
        longest = time.monotonic() - begin
    else:
        time.sleep(longest * random.Random(number).random())
    os.kill(child, 9)
    assert os.waitpid(child, 0)[1] == 9
    assert os.listdir(drive) == []
    # io_uring lets go of files a moment after the process has ended.
    deadline = time.monotonic() + 60
    while os.statvfs(drive).f_bfree != os.statvfs(drive).f_blocks:
        assert time.monotonic() < deadline, number
        time.sleep(0.01)
"""


@pytest.mark.parametrize("back_end", ["auto", "threads"])
def test_killed_processes_leave_nothing(back_end: str, tmp_path: Path) -> None:
    """``BMTRAIN_DISK_KILLS``: how many."""
    count = os.environ.get("BMTRAIN_DISK_KILLS", "5")
    said = tmp_path / "steps"
    with small_drive(tmp_path / "drive", 60 << 20) as drive:
        command = [sys.executable, "-c", KILLER, str(drive), count, str(said)]
        run_process(command, environment={"BMTRAIN_DISK_IO": back_end}, timeout=60 + 10 * int(count))
    assert said.stat().st_size > 30
