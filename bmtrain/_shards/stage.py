"""Pipeline stages: parameters that only one stage holds, and transfer of batches between stages.

A pipe group has one rank of every stage. Each of its ranks has its own batch; the stages process all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._C import Communicator, ReduceOp
from .._ranks.context import Context, Group
from .._ranks.groups import parts_of
from .._ranks.messages import header_of, read_header
from ..global_var import context
from .sharding import ShardSpec, layout_with


@dataclass(frozen=True)
class StagedShardSpec(ShardSpec):
    """Distribution of a parameter over the ranks of one stage; the other stages do not hold it.

    Args:
        pipe: the group with one rank of each stage; a rank's number in it is its stage.
        owner: the stage that holds the parameter.
    """

    pipe: Group | None = None
    owner: int = 0

    @property
    def is_here(self) -> bool:
        return self.pipe is None or self.pipe.rank == self.owner

    def _stage(self) -> int | None:
        return self.owner

    def part(self, rank: int) -> tuple[int, int]:
        return super().part(rank) if self.is_here else (0, 0)

    def gather(self, local: torch.Tensor, label: str) -> torch.Tensor:
        empty = local.new_empty(0 if self.is_here else self.numel, device=context().device)
        flat = super().gather(local, label) if self.is_here else empty
        if self.pipe is not None and self.pipe.size > 1:
            flat = flat.contiguous()
            self.pipe.comm.broadcast(flat, self.owner, label).wait()
        return flat

    def reduce_scatter(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        if self.pipe is not None and self.pipe.size > 1:
            flat = flat.clone()
            self.pipe.reduce_comm.reduce(flat, ReduceOp.SUM, self.owner, label).wait()
        return super().reduce_scatter(flat, label) if self.is_here else flat.new_empty(0)


def channel(pipe: Group, sender: int) -> Communicator:
    """Returns the communicator on which stage ``sender`` sends to its neighbours.

    [Note: Channels of a pipeline]
    On a GPU the operations of a communicator run in order on one stream, and a stage posts the receive of the next
    micro-batch before the result of the present one can be sent: on one communicator that result would be sent after
    the receive. So a stage receives and sends on different communicators: stages of even and odd number have one each,
    in both directions.
    """
    return pipe.comm if sender % 2 == 0 else pipe.reduce_comm


def spec_from_portable(portable: tuple[Any, ...], context: Context) -> ShardSpec:
    """Returns the spec that :meth:`ShardSpec.portable` described, with the groups of this process."""
    shape, family, flat, index, stage, *rest = portable  # `rest` is empty in pickles of 1.0
    num_sharing = rest[0] if rest and rest[0] is not None else context.groups[family].size
    group, replicas = parts_of(context, family, num_sharing)
    layout = None if flat is None else layout_with(*flat)
    if stage is not None:
        pipe = context.groups["pipe"]
        return StagedShardSpec(torch.Size(shape), group, layout, index, replicas, pipe, stage)
    return ShardSpec(torch.Size(shape), group, layout, index, replicas)


def share_shape(
    pipe: Group, tensor: torch.Tensor | None, source: int, device: torch.device
) -> tuple[torch.Size, torch.dtype]:
    """Returns the shape and dtype of the tensor of stage ``source``. Collective over the pipe group."""
    header = header_of(tensor, device)
    pipe.comm.broadcast(header, source, "pipe.shape").wait()
    return read_header(header)


def receive_header(pipe: Group, peer: int, device: torch.device) -> tuple[torch.Size, torch.dtype]:
    """Receives the shape and dtype of the tensor that stage ``peer`` sends next."""
    header = header_of(None, device)
    channel(pipe, peer).recv(header, peer, "pipe.shape").wait()
    return read_header(header)


def collect_batches(pipe: Group, batch: torch.Tensor, target: int | None = None) -> torch.Tensor | None:
    """Concatenates the ranks' batches along dim 0 on stage ``target`` (None: on all stages); returns None elsewhere."""
    batch = batch.detach().contiguous()
    if target is None:
        whole = batch.new_empty((pipe.size, *batch.shape))
        pipe.comm.all_gather(whole, batch, "pipe.collect").wait()
        return whole.flatten(0, 1)
    if pipe.rank != target:
        pipe.comm.send(batch, target, "pipe.collect").wait()
        return None
    parts = [batch if rank == target else torch.empty_like(batch) for rank in range(pipe.size)]
    works = [pipe.comm.recv(part, rank, "pipe.collect") for rank, part in enumerate(parts) if rank != target]
    for work in works:
        work.wait()
    return torch.cat(parts)


def hand_out_batches(pipe: Group, whole: torch.Tensor | None, source: int, out: torch.Tensor) -> torch.Tensor:
    """Fills and returns ``out`` with this rank's part of the batches on stage ``source``: the inverse of collecting."""
    return hand_out(pipe, None if whole is None else whole.chunk(pipe.size), source, out)


def hand_out(
    pipe: Group, parts: Sequence[torch.Tensor] | None, source: int, out: torch.Tensor
) -> torch.Tensor:
    """Fills and returns ``out``, contiguous, with the tensor that stage ``source`` has for this rank in ``parts``."""
    if pipe.rank != source:
        pipe.comm.recv(out, source, "pipe.hand_out").wait()
        return out
    if parts is None:
        raise RuntimeError(f"stage {source} has nothing to hand out")
    parts = [part.contiguous() for part in parts]
    works = [pipe.comm.send(part, rank, "pipe.hand_out") for rank, part in enumerate(parts) if rank != source]
    for work in works:
        work.wait()
    return out.copy_(parts[source])
