"""Training with optimizer state on a drive and without, for tests that compare bits."""

from __future__ import annotations

import fcntl
import os
import struct
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

__all__ = ["kernel_bytes", "make", "reflink_drive", "shared_bytes", "small_chunks", "small_drive", "train"]


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
#: Shares of the blocks: the state of two of three, the gradients of one of three, the parameters of one of six.
MIXED = {
    "optimizer": {"disk": 2 / 3, "device": 1 / 3},
    "gradients": {"disk": 1 / 3, "host": 2 / 3},
    "parameters": {"disk": 1 / 6, "device": 5 / 6},
}


def make(
    kind: str, dtype: torch.dtype, on_disk: bool | dict[str, Any], **options: Any
) -> tuple[torch.nn.Module, Any]:
    """Returns a model and an optimizer of `bmtrain.optim`; ``on_disk``: options of the Blocks' policy, or the state."""
    torch.manual_seed(3)
    policy = TIERS[on_disk] if isinstance(on_disk, bool) else on_disk
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        model = Model().to(dtype)
    options = {"lr": 0.01, "weight_decay": 0.1, **options}
    if kind == "whole_matrix":
        return model, bmt.optim.whole_matrix(torch.optim.Adafactor, model.parameters(), **options)
    return model, getattr(bmt.optim, kind)(model.parameters(), **options)


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


def shared_bytes(path: Path) -> int:
    """Returns the bytes of a file whose blocks on the drive other files have too."""
    most, header = 500, "QQIIII"  # extents, and what the kernel is asked (FS_IOC_FIEMAP)
    request = bytearray(struct.pack(header, 0, 2**63, 1, 0, most, 0) + bytes(56 * most))
    file = os.open(path, os.O_RDONLY)
    fcntl.ioctl(file, 0xC020660B, request)
    os.close(file)
    extents = struct.iter_unpack("QQQQQIIII", request[32:])
    return sum(length for _, _, length, _, _, flags, *_ in extents if flags & 0x2000)


def _mounted(folder: Path, *commands: list[str]) -> None:
    """Runs the commands that mount a filesystem there. Skips the test where one fails."""
    folder.mkdir()
    for command in commands:
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip(f"{command[0]} is not installed (Debian: xfsprogs, btrfs-progs)")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no filesystem can be mounted here: {error.stderr.strip()}")


@contextmanager
def small_drive(folder: Path, nbytes: int) -> Iterator[Path]:
    """A filesystem of that many bytes. Skips the test where none can be mounted."""
    _mounted(folder, ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)])
    try:
        yield folder
    finally:  # whatever a test that failed holds open
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def reflink_drive(kind: str, folder: Path) -> Iterator[Path]:
    """A filesystem whose files can share blocks, "xfs" or "btrfs". Skips the test where none can be made."""
    image = str(folder.with_suffix(".image"))
    with open(image, "wb") as file:
        file.truncate(512 << 20)
    _mounted(folder, [f"mkfs.{kind}", "-q", image], ["mount", "-o", "loop", image, str(folder)])
    try:
        yield folder
    finally:  # io_uring lets go of files a moment after their process has ended
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
