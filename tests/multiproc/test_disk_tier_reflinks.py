"""Checkpoints that share blocks of the drive with the files of a disk tier: what a save moves, and who can load it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.disk_tier import ALL, kernel_bytes, reflink_drive, shared_bytes

import bmtrain as bmt
from bmtrain import _C
from bmtrain.distributed import checkpoint

WIDTH, LAYERS = 1024, 2
#: Bytes of the parameters and moments of a rank of two.
NBYTES = LAYERS * 3 * 4 * WIDTH * (WIDTH + 1) // 2


class Run:
    """Layers and their training, with the same batch for all ranks: values do not depend on how many there are."""

    def __init__(self, places: dict[str, Any], folder: Path | None = None) -> None:
        with bmt.default_policy(bmt.BlockPolicy(**places)):
            layers = [bmt.Block(bmt.nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
        self.model = bmt.TransformerBlockList(layers)
        torch.manual_seed(7)
        bmt.init_parameters(self.model)
        self.optimizer: Any = bmt.optim.AdamOptimizer(self.model.parameters(), lr=0.01)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(self.optimizer)
        self.number = 0
        if folder is not None:
            self.number = checkpoint.load(folder, self.model, self.manager).step or 0

    def step(self) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(self.number))
        self.manager.zero_grad()
        self.manager.backward(self.model(x).square().mean())
        self.manager.step()
        self.number += 1

    def save(self, folder: Path, **options: Any) -> checkpoint.CheckpointHandle:
        return checkpoint.save(folder, self.number, self.model, self.manager, **options)

    def values(self) -> list[str]:
        """Returns digests of the parameters and their moments."""
        state = self.optimizer.state_dict(gather=True)["state"]
        moments = [entry[name] for _, entry in sorted(state.items()) for name in ("exp_avg", "exp_avg_sq")]
        tensors = [*(p.gather().detach() for p in self.model.parameters()), *moments]
        return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]


def flip(run: Run) -> None:
    """Changes a bit of each kind of array that rank 1 has on the drive, or changes it back."""
    run.optimizer._place.finish()
    arena = next(iter(run.optimizer._place._homes.values())).arena
    if bmt.rank() == 1:
        arena.mapping.tensor(arena.file.nbytes // 2, 1).bitwise_xor_(4)
        arena.stored.parameters.mapping[1000:1001].bitwise_xor_(4)


def write(run: Run) -> None:
    for p, state in run.optimizer.state.items():
        p.data.mul_(0.5)
        state["exp_avg"].mul_(0.5)


@torch.no_grad()
def read_ahead(run: Run) -> None:
    """Leaves a block gathered, and reads of others under way."""
    for _ in range(2):
        run.model(torch.ones(1, WIDTH))


#: What happens between a step and a save, by the name of the checkpoint.
BEFORE: dict[str, Callable[[Run], Any]] = {
    "step": lambda run: None,
    "writes": write,
    "reads": read_ahead,
    "background": lambda run: None,
}


def save_all(folder: Path, kind: str) -> tuple[list[list[str]], tuple[int, int]]:
    """Returns the values in each checkpoint, and the bytes that the first moved and shared."""
    run, values, counts = Run(ALL), [], (0, 0)
    checkpoint.save(folder / "warm", 0)  # modules are imported now
    for name, act in BEFORE.items():
        run.step()
        _C.disturb_transfers(1000)
        act(run)
        if name == "step":
            run.optimizer._place.finish()
        before = kernel_bytes()
        run.save(folder / name, non_blocking=name == "background").wait()
        moved = sum(kernel_bytes()) - sum(before)
        _C.disturb_transfers(0)
        if name == "step":
            counts = moved, shared_bytes(own_file(folder / name))
        values.append(run.values())
    run.step()
    flip(run)
    run.save(folder / "flipped")
    flip(run)
    run.step()  # other values, in the files that checkpoints share
    if kind == "xfs":  # btrfs does not say how much it has room for
        save_without_room(run, folder)
    return values, counts


def save_without_room(run: Run, folder: Path) -> None:
    """Later steps need blocks of their own: where there are none, a save fails, and not a step after it."""
    run.optimizer._place.finish()
    bmt.synchronize()
    if bmt.rank() == 0:
        with open(folder / "full", "wb") as file:
            drive = os.statvfs(folder)
            os.posix_fallocate(file.fileno(), 0, drive.f_bavail * drive.f_frsize - NBYTES)
    bmt.synchronize()
    with pytest.raises(OSError, match="No space left on device"):
        run.save(folder / "refused")
    bmt.synchronize()
    (folder / "full").unlink(missing_ok=True)
    run.step()


def own_file(folder: Path) -> Path:
    return next(folder.glob(f"step-*/shard-{bmt.rank()}-of-*"))


def load_all(folder: Path) -> list[list[str]]:
    found = [Run({}, folder / name).values() for name in BEFORE]
    run = Run({})
    with pytest.raises(bmt.errors.UnreadableFileError, match=r"damaged at tensor .*: bytes [0-9]+ to [0-9]+"):
        checkpoint.load(folder / "flipped", run.model, run.manager)
    return found


def go_on(folder: Path, then: Path, places: dict[str, Any]) -> list[str]:
    run = Run(places, folder)
    run.step()
    run.save(then)
    return run.values()


@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_a_save_clones(kind: str, tmp_path: Path) -> None:
    with reflink_drive(kind, tmp_path / "drive") as drive:
        init = {"tier_directories": [str(drive)]}
        first, second = run_ranks(2, save_all, drive, kind, init=init, fresh=True, timeout=600)
        for values, (moved, shared) in (first, second):
            assert values == first[0]
            assert shared >= NBYTES
            assert moved < NBYTES / 10
        assert run_ranks(1, load_all, drive) == [first[0]]
        plain = run_ranks(4, go_on, drive / "step", tmp_path / "plain", {})
        tiered = run_ranks(2, go_on, drive / "step", drive / "tiered", ALL, init=init, fresh=True)
        assert plain + tiered == plain[:1] * 6
        back = run_ranks(2, go_on, tmp_path / "plain", drive / "back", ALL, init=init, fresh=True)
        assert back == run_ranks(1, go_on, drive / "tiered", tmp_path / "again", {}) * 2


def save_here(folder: Path) -> tuple[list[str], int]:
    """Returns the values saved, and the bytes that the save read."""
    run = Run(ALL)
    run.step()
    checkpoint.save(folder / "warm", 0)  # modules are imported now
    before, _ = kernel_bytes()
    run.save(folder / "step")
    read = kernel_bytes()[0] - before
    values = run.values()
    run.step()
    flip(run)
    for parts in ((run.model, None), (None, run.manager)):
        with pytest.raises(
            bmt.errors.DiskError, match=r"of Linear#0: .* at offset [0-9]+ .* checksum differs"
        ):
            checkpoint.save(folder / "flipped", 1, *parts)
        run.model[0].weight._stored().tier.drives.failure = None
    bmt.synchronize()  # each rank removes its own file
    assert not any((folder / "flipped").glob("*/shard*"))
    return values, read


def load_here(folder: Path) -> list[str]:
    return Run({}, folder / "step").values()


def test_a_save_reads_once_what_it_cannot_clone(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        init = {"tier_directories": [str(tmp_path)]}
        saved = run_ranks(2, save_here, Path(folder), init=init, fresh=True)
        expected = run_ranks(1, load_here, Path(folder))
    for values, read in saved:
        assert [values] == expected
        assert read < 1.25 * NBYTES
