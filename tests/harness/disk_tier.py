"""Training with optimizer state on a drive and without, for tests that compare bits."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import bmtrain as bmt
from bmtrain.optim.places import disk_arena

from .offloaded import Model, values_of

__all__ = ["kernel_bytes", "make", "small_chunks", "small_drive", "train"]


def small_chunks() -> None:
    """Cuts state into chunks as small as a drive allows, so that small models have several."""
    disk_arena.CHUNK = 2048


#: What is on the drive, by number of the kind of tier.
TIERS: list[dict[str, Any]] = [
    {},
    {"optimizer": "disk"},
    {"optimizer": "disk", "gradients": "disk"},
    {"optimizer": "disk", "parameters": "disk"},
    {"optimizer": "disk", "gradients": "disk", "parameters": "disk"},
]
ALL = TIERS[-1]


def make(
    kind: str, dtype: torch.dtype, on_disk: bool | dict[str, Any], **options: Any
) -> tuple[torch.nn.Module, Any]:
    """Returns a model and an optimizer of `bmtrain.optim`; ``on_disk``: options of the Blocks' policy, or the state."""
    torch.manual_seed(3)
    policy = TIERS[on_disk] if isinstance(on_disk, bool) else on_disk
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        model = Model().to(dtype)
    return model, getattr(bmt.optim, kind)(model.parameters(), lr=0.01, weight_decay=0.1, **options)


def train(
    model: torch.nn.Module, optimizer: Any, steps: range, *, clips: bool = True, in_backward: bool = False
) -> list[torch.Tensor]:
    """Trains, and returns the losses and everything that a step changes."""
    manager = bmt.optim.OptimManager(step_in_backward=in_backward)
    manager.add_optimizer(optimizer)
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + bmt.rank())
        x = torch.randn(3, 40, generator=generator).to(next(model.parameters()).dtype)
        loss = model(x).float().square().mean()
        manager.zero_grad()
        manager.backward(loss)
        if clips:
            manager.clip_grad_norm(optimizer.param_groups, 0.5)
        manager.step()
        losses.append(loss.detach().clone())
    return [*losses, *values_of(model, [optimizer])]


def kernel_bytes() -> tuple[int, int]:
    """Returns the bytes that this process has read from drives and written to them, by the kernel's count."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(number) for name, number in (line.split(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"]


@contextmanager
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
