"""Optimizer state on a drive: the bits of training without, on any number of ranks, whatever reads the state."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RankError, run_process, run_ranks
from harness.disk_tier import make, small_chunks, train

import bmtrain as bmt
from bmtrain import _C

STEPS = 6
KINDS = ["AdamOptimizer", "AdamOffloadOptimizer", "LionOptimizer", "SGDOptimizer", "SGDOffloadOptimizer"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tiers(path: Path, **init: Any) -> dict[str, Any]:
    return {"tier_directories": [str(path)], **init}


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), f"value {number} of {len(left)} differs"


def compare(kind: str, dtype: torch.dtype, options: dict[str, Any], **run: Any) -> int:
    small_chunks()
    if kind.startswith("SGD"):
        options = {"momentum": 0.9, **options}
    plain = train(*make(kind, dtype, False, **options), range(STEPS), **run)
    model, optimizer = make(kind, dtype, True, **options)
    assert_equal(train(model, optimizer, range(STEPS), **run), plain)
    return sum(optimizer.is_on_disk(p) for p in model.parameters())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_same_bits(world: int, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    on_disk = run_ranks(world, compare, kind, dtype, {}, init=tiers(tmp_path))
    assert all(count >= 5 for count in on_disk)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS[2:])
def test_same_bits_of_other_formulas(kind: str, tmp_path: Path) -> None:
    run_ranks(2, compare, kind, torch.bfloat16, {}, init=tiers(tmp_path))


@pytest.mark.parametrize("back_end", ["io_uring", "threads"])
def test_same_bits_with_each_back_end_and_slow_transfers(back_end: str, tmp_path: Path) -> None:
    environment = {"BMTRAIN_DISK_IO": back_end}
    run_ranks(2, compare_disturbed, init=tiers(tmp_path), environment=environment)


def compare_disturbed() -> None:
    _C.disturb_transfers(2000)
    try:
        compare("AdamOptimizer", torch.bfloat16, {})
    finally:
        _C.disturb_transfers(0)


def test_bf16_moments(tmp_path: Path) -> None:
    run_ranks(
        2, compare, "AdamOffloadOptimizer", torch.float32, {"state_dtype": "bfloat16"}, init=tiers(tmp_path)
    )


@pytest.mark.parametrize("kind", KINDS[:2])
def test_steps_in_backward(kind: str, tmp_path: Path) -> None:
    run_ranks(2, compare, kind, torch.bfloat16, {}, clips=False, in_backward=True, init=tiers(tmp_path))


# ---- whatever reads or writes the state


def use_everything(dtype: torch.dtype) -> None:
    small_chunks()
    results = []
    for on_disk in (False, True):
        model, optimizer = make("AdamOptimizer", dtype, on_disk)
        train(model, optimizer, range(2))
        seen = [copy.deepcopy(optimizer.state_dict(gather=gather)) for gather in (False, True)]
        train(model, optimizer, range(2, 3))
        for state in optimizer.state.values():  # a user's write
            state["exp_avg"].mul_(0.5)
        train(model, optimizer, range(3, 4))
        optimizer.load_state_dict(seen[1])
        train(model, optimizer, range(4, 5))
        for p in model.parameters():  # the master follows
            p.data.mul_(0.9)
        train(model, optimizer, range(5, 6))
        states = {
            p: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()}
            for p, s in optimizer.state.items()
        }
        optimizer.state.clear()  # tensors of the user's own
        optimizer.state.update(states)
        results.append([*train(model, optimizer, range(6, 8)), *flat(seen)])
    assert_equal(*results)


def flat(value: Any) -> list[torch.Tensor]:
    leaves: list[Any] = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if torch.is_tensor(leaf)]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_state_is_read_and_written_as_ever(world: int, dtype: torch.dtype, tmp_path: Path) -> None:
    run_ranks(world, use_everything, dtype, init=tiers(tmp_path))


def save_here(folder: str, on_disk: bool, resumes: bool, steps: range) -> list[torch.Tensor]:
    small_chunks()
    model, optimizer = make("AdamOptimizer", torch.bfloat16, on_disk)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    if resumes:
        bmt.distributed.checkpoint.load(folder, model=model, optim=manager)
    train_alike(model, manager, optimizer, steps)
    bmt.distributed.checkpoint.save(folder, steps.stop, model=model, optim=manager)
    return [p.gather().detach() for p in model.parameters()] + flat(
        optimizer.state_dict(gather=True)["state"]
    )


def train_alike(model: Any, manager: Any, optimizer: Any, steps: range) -> None:
    """As `train`, with one batch for all ranks together: the mean of the ranks' losses does not depend on them."""
    for step in steps:
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step)).bfloat16()
        manager.zero_grad()
        manager.backward(model(x).float().square().mean())
        manager.step()


@pytest.mark.parametrize("worlds", [(2, 1), (2, 4), (1, 2), (4, 2)])
@pytest.mark.parametrize("from_disk", [True, False])
def test_checkpoints_go_between_sizes_and_tiers(
    worlds: tuple[int, int], from_disk: bool, tmp_path: Path
) -> None:
    init = tiers(tmp_path)
    values = []
    for tiered in (True, False):  # the second without tiers at all
        folder = str(tmp_path / str(tiered))
        first, then = (tiered and from_disk, tiered and not from_disk)
        run_ranks(worlds[0], save_here, folder, first, False, range(2), init=init if first else {})
        values.append(
            run_ranks(worlds[1], save_here, folder, then, True, range(2, 4), init=init if then else {})[0]
        )
    assert_equal(*values)


def pickled() -> None:
    small_chunks()
    model, optimizer = make("AdamOptimizer", torch.float32, True)
    train(model, optimizer, range(2))
    other = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 3 * sum(s["exp_avg"].numel() * 4 for s in optimizer.state.values()) + 100_000
    assert_equal(train(*other, range(2, 4)), train(model, optimizer, range(2, 4)))


def test_copies_have_a_state_of_their_own(tmp_path: Path) -> None:
    run_ranks(1, pickled, init=tiers(tmp_path))


# ---- bytes


def count_bytes(dtype: torch.dtype) -> tuple[int, int, int]:
    torch.manual_seed(0)
    policy = bmt.BlockPolicy(optimizer="disk")
    model = bmt.Block(bmt.nn.Linear(2000, 2000, dtype=dtype), policy=policy)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    train_block(model, optimizer)  # the masters are made in the first step
    before = kernel_bytes()
    for _ in range(3):
        train_block(model, optimizer)
    read, written = ((now - old) // 3 for now, old in zip(kernel_bytes(), before, strict=True))
    return read, written, sum(p.numel() for p in model.parameters())


def train_block(model: Any, optimizer: Any) -> None:
    model(torch.ones(1, 2000, dtype=next(model.parameters()).dtype)).float().sum().backward()
    optimizer.step()


def kernel_bytes() -> tuple[int, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(number) for name, number in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


@pytest.mark.parametrize(("dtype", "state"), [(torch.float32, 8), (torch.bfloat16, 12)])
@pytest.mark.parametrize("world", [1, 2])
def test_state_passes_once_in_each_direction(
    world: int, dtype: torch.dtype, state: int, tmp_path: Path
) -> None:
    for read, written, numel in run_ranks(world, count_bytes, dtype, init=tiers(tmp_path)):
        assert read == pytest.approx(state * numel, rel=0.02)
        assert written == pytest.approx(state * numel, rel=0.02)


# ---- what goes wrong


def fail(result: int, failing: int) -> str:
    small_chunks()
    model, optimizer = make("AdamOptimizer", torch.bfloat16, True)
    train(model, optimizer, range(2))
    if bmt.rank() == bmt.world_size() - 1:
        _C.disturb_transfers(0, failing, result)
    try:
        with pytest.raises(bmt.errors.DiskError) as raised:
            train(model, optimizer, range(2, 3))
        with pytest.raises(bmt.errors.DiskError):  # for ever
            optimizer.step()
    finally:
        _C.disturb_transfers(0)
    return str(raised.value)


@pytest.mark.parametrize(
    ("result", "failing", "words"),
    [(-5, 0, "Input/output error"), (0, 5, "the file ended after"), (-28, 12, "No space")],
)
def test_failed_transfers(result: int, failing: int, words: str, tmp_path: Path) -> None:
    for text in run_ranks(2, fail, result, failing, init=tiers(tmp_path), fresh=True):
        assert words in text
        assert f"disk tier in {tmp_path}" in text
        assert "optimizer state of " in text


def flip() -> str:
    small_chunks()
    model, optimizer = make("AdamOptimizer", torch.float32, True)
    train_only(model, optimizer)
    if bmt.rank() == 1:
        arena = next(iter(optimizer._place._homes.values())).arena
        arena.mapping.tensor(arena.file.nbytes // 2, 1).bitwise_xor_(4)
    with pytest.raises(bmt.errors.DiskError) as raised:
        train_only(model, optimizer)
    return str(raised.value)


def train_only(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()


def test_flipped_bit(tmp_path: Path) -> None:
    for text in run_ranks(2, flip, init=tiers(tmp_path), fresh=True):
        assert "their checksum differs" in text
        assert str(tmp_path) in text


def flip_and_read() -> None:
    small_chunks()
    model, optimizer = make("AdamOptimizer", torch.float32, True)
    train_only(model, optimizer)
    arena = next(iter(optimizer._place._homes.values())).arena
    arena.mapping.tensor(5000, 1).bitwise_xor_(4)
    optimizer.state_dict()


def test_flipped_bit_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="their checksum differs"):
        run_ranks(1, flip_and_read, init=tiers(tmp_path), fresh=True)


def fill() -> str:
    model, _ = make("AdamOptimizer", torch.bfloat16, False)  # the first optimizer has nothing on the drive
    with bmt.default_policy(bmt.BlockPolicy(optimizer="disk")):
        block = bmt.Block(bmt.nn.Linear(2000, 2000, dtype=torch.bfloat16))
    with pytest.raises(bmt.errors.DiskError) as raised:
        bmt.optim.AdamOptimizer([*model.parameters(), *block.parameters()])
    return str(raised.value)


def test_no_room(tmp_path: Path) -> None:
    with small_drive(tmp_path / "drive", 20 << 20) as drive:
        texts = run_ranks(2, fill, init=tiers(drive), fresh=True)
        assert len(set(texts)) == 1
        assert re.search(r"24[0-9]{6} bytes are needed, [0-9]+ are free", texts[0])
        assert os.statvfs(drive).f_bfree == os.statvfs(drive).f_blocks


@contextlib.contextmanager
def small_drive(folder: Path, nbytes: int) -> Iterator[Path]:
    """A filesystem of that many bytes. Skips the test where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, check=False, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no filesystem can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_killed_ranks_leave_nothing(tmp_path: Path) -> None:
    with small_drive(tmp_path / "drive", 20 << 20) as drive:
        for number in range(5):
            delay = random.Random(number).random() * 0.3
            done = run_process(
                [sys.executable, "-c", KILLED, str(drive), str(delay)], timeout=120, check=False
            )
            assert done.returncode == -signal.SIGKILL
            assert not any(drive.iterdir())
            # io_uring lets go of files a moment after the process has ended.
            deadline = time.monotonic() + 60
            while os.statvfs(drive).f_bfree != os.statvfs(drive).f_blocks:
                assert time.monotonic() < deadline
                time.sleep(0.05)


KILLED = """
import os, sys, threading, time
from pathlib import Path
import torch
import bmtrain as bmt
bmt.init_distributed(tier_directories=[sys.argv[1]])
with bmt.default_policy(bmt.BlockPolicy(optimizer="disk")):
    model = bmt.Block(bmt.nn.Linear(300, 300))
threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), 9)).start()
while True:
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    for _ in range(20):
        model(torch.ones(1, 300)).sum().backward()
        optimizer.step()
"""


# ---- what is refused


def refusals(wrong: str) -> str:
    policy = bmt.BlockPolicy(optimizer="disk")
    if wrong != "tierless":
        model = bmt.Block(bmt.nn.Linear(8, 8), policy=policy)
    calls = {
        "int8": lambda: bmt.optim.AdamOptimizer(model.parameters(), state_dtype="int8"),
        "muon": lambda: bmt.optim.MuonOptimizer(model.named_parameters()),
        "muon offload": lambda: bmt.optim.MuonOffloadOptimizer(model.named_parameters()),
        "torch": lambda: bmt.optim.OptimManager().add_optimizer(torch.optim.SGD(model.parameters(), lr=1)),
        "tierless": lambda: bmt.Block(bmt.nn.Linear(8, 8), policy=policy),
    }
    with pytest.raises(ValueError) as raised:
        calls[wrong]()
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("int8", "expected state_dtype float32 or bfloat16, got int8"),
        ("muon", "expected an optimizer of single elements"),
        ("muon offload", "expected an optimizer of single elements"),
        ("torch", "expected an optimizer of bmtrain.optim, got SGD"),
        ("tierless", "init_distributed"),
    ],
)
def test_refused(kind: str, words: str, tmp_path: Path) -> None:
    init = {} if kind == "tierless" else tiers(tmp_path)
    (text,) = run_ranks(1, refusals, kind, init=init)
    assert words in text
    assert "BlockPolicy(optimizer='disk')" in text
