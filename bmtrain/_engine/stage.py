"""Pipeline stages: parameters that only one stage holds, and moving batches between the stages.

A pipe group has one rank of every stage. Each of its ranks brings its own batch; the stages work on all of them
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import _C
from .sharding import ShardSpec

if TYPE_CHECKING:
    from .._context import Group

__all__ = ["StagedShardSpec", "announce", "collect_batches", "hand_out_batches", "hear", "share_shape"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool)  # fmt: skip


@dataclass(frozen=True)
class StagedShardSpec(ShardSpec):
    """The spread of a parameter that the ranks of one stage share, and the other stages do not hold.

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

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        flat = super().gather(local) if self.is_here else local.new_empty(self.numel)
        if self.pipe is not None and self.pipe.size > 1:
            flat = flat.contiguous()
            self.pipe.comm.broadcast(flat, self.owner, "pipe.parameter").wait()
        return flat

    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        if self.pipe is not None and self.pipe.size > 1:
            flat = flat.clone()
            self.pipe.reduce_comm.reduce(flat, _C.ReduceOp.SUM, self.owner, "pipe.parameter").wait()
        return super().reduce_scatter(flat) if self.is_here else flat.new_empty(0)


def share_shape(
    pipe: Group, tensor: torch.Tensor | None, source: int, device: torch.device
) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype of the tensor that stage ``source`` has. Collective over the pipe group."""
    header = _header(tensor, device)
    pipe.comm.broadcast(header, source, "pipe.shape").wait()
    return _read_header(header)


def announce(pipe: Group, tensor: torch.Tensor, peer: int) -> None:
    """Tells stage ``peer`` the shape and dtype of what it will receive."""
    pipe.comm.send(_header(tensor, tensor.device), peer, "pipe.shape").wait()


def hear(pipe: Group, peer: int, device: torch.device) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype that stage ``peer`` announces."""
    header = _header(None, device)
    pipe.comm.recv(header, peer, "pipe.shape").wait()
    return _read_header(header)


def _header(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    values = [] if tensor is None else [tensor.dim(), _DTYPES.index(tensor.dtype), *tensor.shape]
    return torch.tensor(values + [0] * (16 - len(values)), dtype=torch.int64, device=device)


def _read_header(header: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    dims, dtype, *sizes = header.tolist()
    return torch.Size(sizes[:dims]), _DTYPES[dtype]


def collect_batches(pipe: Group, batch: torch.Tensor, target: int | None = None) -> torch.Tensor | None:
    """The ranks' batches, concatenated along dim 0, on stage ``target`` (None: on every stage; elsewhere None)."""
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


def hand_out_batches(
    pipe: Group,
    whole: torch.Tensor | None,
    source: int,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """This rank's part, of ``shape``, of what stage ``source`` holds for all ranks: the inverse of collecting."""
    if pipe.rank != source:
        part = torch.empty(shape, dtype=dtype, device=device)
        pipe.comm.recv(part, source, "pipe.hand_out").wait()
        return part
    if whole is None:
        raise RuntimeError(f"stage {source} has nothing to hand out")
    parts = [part.contiguous() for part in whole.chunk(pipe.size)]
    works = [pipe.comm.send(part, rank, "pipe.hand_out") for rank, part in enumerate(parts) if rank != source]
    for work in works:
        work.wait()
    return parts[source].clone()
