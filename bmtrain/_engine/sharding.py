"""Which rank holds which elements of one parameter, and how the whole is put together again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..global_var import context

if TYPE_CHECKING:
    from .. import _C
    from .._context import Context, Group

__all__ = ["ShardSpec", "merge_slices", "merged_shape"]


@dataclass(frozen=True)
class ShardSpec:
    """How the elements of one (flattened) parameter are spread over the ranks of a group.

    Outside blocks the ranks own equal runs of ``ceil(numel / ranks)`` elements. In a block, parameters lie one after
    the other in a flat buffer, and a rank owns what falls into its partition of the buffer.

    Args:
        shape: full shape of the parameter (for a tensor-parallel one: of this rank's slice).
        group: the ranks that share the parameter.
        layout: the block's flat buffer, or None outside blocks.
        index: number of the parameter in ``layout``.
        replicas: the ranks that hold the same elements as this one, with it; None if there are no others.
    """

    shape: torch.Size
    group: Group
    layout: _C.FlatLayout | None = None
    index: int = 0
    replicas: Group | None = None

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank speaks for those that hold the same elements."""
        return self.replicas is None or self.replicas.rank == 0

    def portable(self, element_size: int) -> tuple[Any, ...]:
        """Plain values from which :meth:`from_portable` makes the same spec, for pickles."""
        layout = self.layout
        flat = None
        if layout is not None:
            numels = [layout.numel(index) for index in range(len(layout))]
            flat = (numels, element_size, layout.num_ranks)
        num_sharing = None if self.replicas is None else self.group.size
        return tuple(self.shape), self.group.name, flat, self.index, self._stage(), num_sharing

    def _stage(self) -> int | None:
        """The stage of a pipeline that alone holds the parameter."""
        return None

    @classmethod
    def from_portable(cls, portable: tuple[Any, ...], context: Context) -> ShardSpec:
        """The spec that :meth:`portable` described, in this process's groups."""
        from .. import _C
        from .stage import StagedShardSpec

        shape, family, flat, index, stage, *rest = portable  # `rest` is empty in pickles of 1.0
        num_sharing = rest[0] if rest and rest[0] is not None else context.groups[family].size
        group, replicas = context.parts_of(family, num_sharing)
        layout = None if flat is None else _C.FlatLayout(*flat)
        if stage is not None:
            pipe = context.groups["pipe"]
            return StagedShardSpec(torch.Size(shape), group, layout, index, replicas, pipe, stage)
        return cls(torch.Size(shape), group, layout, index, replicas)

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def part(self, rank: int) -> tuple[int, int]:
        """First element and number of elements that group rank ``rank`` owns."""
        if self.layout is not None:
            begin, count, _ = self.layout.local_part(self.index, rank)
            return begin, count
        chunk = -(-self.numel // self.group.size)
        begin = min(rank * chunk, self.numel)
        return begin, min(begin + chunk, self.numel) - begin

    @property
    def local_part(self) -> tuple[int, int]:
        """First element and number of elements that this rank owns."""
        return self.part(self.group.rank)

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flattened full tensor, as a view."""
        begin, count = self.local_part
        return flat.narrow(0, begin, count)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The flattened full tensor (a new one), from every rank's part. Collective over the group."""
        size = self.group.size
        self.check_local(local)
        if size == 1:
            return local.reshape(-1).clone()
        counts = [self.part(rank)[1] for rank in range(size)]
        longest = max(counts)
        slots = local.new_empty(size * longest)
        self.group.comm.all_gather(slots, _padded(local, longest), "parameter").wait()
        if self.layout is None:
            return slots[: self.numel]  # equal runs: only the tail is padding
        return torch.cat([slots.narrow(0, rank * longest, count) for rank, count in enumerate(counts)])

    def make_replicas_equal(self, local: torch.Tensor) -> None:
        """Gives all ranks that hold the same elements those of the first of them, in place. Collective."""
        if self.replicas is not None and local.numel():
            self.replicas.comm.broadcast(local.detach(), 0, "parameter").wait()

    def check_local(self, local: torch.Tensor) -> None:
        """Raises RuntimeError unless ``local`` has as many elements as this rank owns."""
        if local.numel() != self.local_part[1]:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.shape)} holds {local.numel()} elements on rank {self.group.rank} of "
                f"{self.group.name!r}; expected this rank's {self.local_part[1]} (was its .data replaced?)"
            )

    def reduce_scatter(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sum of the ranks' full tensors (16-bit dtypes accumulate in fp32)."""
        from .. import _C

        size = self.group.size
        if size == 1:
            return self._over_replicas(flat.clone())
        slots = self._slots(flat)
        reduced = flat.new_empty(slots.shape[1])
        self.group.reduce_comm.reduce_scatter(reduced, slots.view(-1), _C.ReduceOp.SUM, "parameter").wait()
        return self._over_replicas(reduced[: self.local_part[1]])

    def _over_replicas(self, part: torch.Tensor) -> torch.Tensor:
        from .. import _C

        if self.replicas is not None:
            self.replicas.reduce_comm.all_reduce(part, _C.ReduceOp.SUM, "parameter").wait()
        return part

    def scatter(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's part of every rank's full tensor, in rank order. Collective over the group."""
        if self.group.size == 1:
            return [flat]
        slots = self._slots(flat)
        received = torch.empty_like(slots)
        self.group.reduce_comm.all_to_all(received.view(-1), slots.view(-1), "parameter").wait()
        return list(received[:, : self.local_part[1]].unbind(0))

    def _slots(self, flat: torch.Tensor) -> torch.Tensor:
        """In row r what rank r owns, padded to the longest."""
        parts = [self.part(rank) for rank in range(self.group.size)]
        slots = flat.new_zeros((self.group.size, max(count for _, count in parts)))
        for slot, (begin, count) in zip(slots, parts, strict=True):
            slot[:count].copy_(flat.narrow(0, begin, count))
        return slots


def _padded(local: torch.Tensor, length: int) -> torch.Tensor:
    if local.numel() == length:
        return local.detach().contiguous()
    padded = local.new_zeros(length)
    padded[: local.numel()] = local.detach()
    return padded


def merged_shape(shape: torch.Size, dim: int, tp_size: int) -> torch.Size:
    """The shape of ``tp_size`` tensor-parallel slices side by side along ``dim``; -1: each slice is the whole."""
    if dim < 0:
        return shape
    return torch.Size([size * tp_size if i == dim else size for i, size in enumerate(shape)])


def merge_slices(value: torch.Tensor, dim: int) -> torch.Tensor:
    """The slices of the tensor-parallel ranks side by side along ``dim``, differentiable. Collective over them."""
    group = context().groups["tp"]
    if group.size == 1:
        return value
    from ..distributed import all_gather  # imports this

    return torch.cat(list(all_gather(value, group.comm).unbind(0)), dim=max(dim, 0))
