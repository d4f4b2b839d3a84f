"""Bytes of blocks on drives: stored, moved in a step, and the memory of the transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._engine.disk_tier import AHEAD, LEAVING, aligned
from ..optim.places import disk_arena
from .model import MOMENT_BYTES, FlatBuffer, ModelDescription
from .network import Network
from .policy import TrainingPolicy

__all__ = ["DiskEstimate", "on_disk", "pinned_bytes"]


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes of one rank; none without drives.

    Args:
        stored: in files, each in whole pages.
        read_in_forward: in the first forward.
        read_in_passes: in the forwards and backwards of a step.
        written_in_passes: in these.
        read_in_update: in the update.
        written_in_update: in this.
        buffers: memory through which all pass, with one drive.
    """

    stored: int = 0
    read_in_forward: int = 0
    read_in_passes: int = 0
    written_in_passes: int = 0
    read_in_update: int = 0
    written_in_update: int = 0
    buffers: int = 0

    @property
    def read(self) -> int:
        """In a step, without what clipping of the norm reads."""
        return self.read_in_passes + self.read_in_update

    @property
    def written(self) -> int:
        """In a step, without what clipping of the norm writes."""
        return self.written_in_passes + self.written_in_update


def on_disk(model: ModelDescription, policy: TrainingPolicy, network: Network) -> DiskEstimate:
    """Returns the bytes of a rank, by the formula of `docs/howto/disk.md`.

    Args:
        model: this rank's part of it.
        policy: with what is on drives.
        network: the ranks that share parameters.
    """
    if not policy.disk:
        return DiskEstimate()
    blocks = [
        [_Buffer(buffer, policy, network, policy.on_disk(number)) for buffer in block.buffers]
        for number, block in enumerate(model.blocks)
    ]
    buffers = [buffer for block in blocks for buffer in block]
    state = sum(b.state for b in buffers)
    parameters, gradients = sum(b.parameters for b in buffers), sum(b.gradients for b in buffers)
    updated = sum(b.parameters for b in buffers if b.trains)
    # The last block stays from its forward to its backward; at level 2, and in a stage, all of them do.
    is_again = policy.level == 3 and policy.pipe_size == 1
    again = (parameters - sum(b.parameters for b in blocks[-1])) * is_again
    return DiskEstimate(
        stored=parameters + gradients + state,
        read_in_forward=parameters,
        read_in_passes=policy.passes * (parameters + again) + (policy.passes - 1) * gradients,
        written_in_passes=policy.passes * gradients,
        read_in_update=updated + gradients + state,
        written_in_update=updated + state,
        buffers=_passage(buffers, policy) + _waiting(blocks, policy, network),
    )


def pinned_bytes(nbytes: int) -> int:
    """Returns the size of a page-locked allocation of torch: a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class _Buffer:
    """Bytes of a flat buffer on drives."""

    def __init__(
        self, buffer: FlatBuffer, policy: TrainingPolicy, network: Network, kept: tuple[str, ...]
    ) -> None:
        numel, size = buffer.partition(network.sharing(buffer, policy).size), buffer.element_size
        self.trains = buffer.trains
        moments = [MOMENT_BYTES[policy.state_dtype]] * (1 if policy.optimizer == "muon" else 2)
        widths = [4.0] * (size == 2) + moments if buffer.trains and kept else []
        self.num_arrays = len(widths)
        self.state = sum(aligned(int(numel * width)) for width in widths)
        self.parameters = aligned(numel * size) * ("parameters" in kept)
        self.gradients = aligned(numel * size) * ("gradients" in kept and buffer.trains)


def _passage(buffers: Sequence[_Buffer], policy: TrainingPolicy) -> int:
    """Returns the memory of an update's chunks, of one drive; with Muon, of three whole buffers."""
    if policy.optimizer == "muon":
        return sum(sorted(b.state + b.parameters + b.gradients for b in buffers if b.trains)[-3:])
    num_arrays = max((b.num_arrays for b in buffers), default=0)
    num_arrays += 2 * (num_arrays > 0 and len(policy.disk) > 1)  # parameters and gradients
    return (2 * disk_arena.AHEAD + 1) * num_arrays * disk_arena.CHUNK * torch.float32.itemsize


def _waiting(blocks: Sequence[Sequence[_Buffer]], policy: TrainingPolicy, network: Network) -> int:
    """Returns the memory of blocks that were read, the running one included, and of gradients that are written."""
    is_pinned = not network.machine.shares_memory
    # The shard of one rank is its gathered buffer, on a processor.
    is_gathered = policy.block_policy().num_sharing(network.size) == 1 and not is_pinned
    stays = is_gathered and (policy.level == 2 or policy.pipe_size > 1)
    num_read = len(blocks) if stays else AHEAD + 1
    held = pinned_bytes if is_pinned else int
    parameters = sorted(sum(held(b.parameters) for b in block) for block in blocks)
    gradients = sorted(sum(held(b.gradients) for b in block) for block in blocks)
    return sum(parameters[-num_read:]) + sum(gradients[-LEAVING - 1 :])
