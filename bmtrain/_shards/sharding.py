"""Distribution of the elements of one parameter over ranks, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from .._C import FlatLayout, ReduceOp
from .._ranks.collectives import all_gather
from .._ranks.context import Group
from ..global_var import context

#: Parts of parameters outside blocks are sent in slots of a multiple of this, see [Note: Aligned slices] in
#: csrc/shard/buffer_spec.h. They are sent in their own dtype.
SLOT_BYTES = 16


def slot_length(numel: int, element_size: int) -> int:
    """Returns the number of elements of a rank's slot in a message, for a part of ``numel`` elements."""
    multiple = max(SLOT_BYTES // element_size, 1)
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class ShardSpec:
    """Distribution of the elements of one (flattened) parameter over the ranks of a group.

    Outside blocks the ranks own equal runs of ``ceil(numel / ranks)`` elements, which are padded in messages. In a
    block, parameters lie one after the other in a flat buffer, and a rank owns the elements in its partition of the
    buffer.

    Args:
        shape: full shape of the parameter (for a tensor-parallel one: of this rank's slice).
        group: the ranks that share the parameter.
        layout: the block's flat buffer, or None outside blocks.
        index: number of the parameter in ``layout``.
        replicas: the ranks that hold the same elements as this one, with it; None if there are no others.
    """

    shape: torch.Size
    group: Group
    layout: FlatLayout | None = None
    index: int = 0
    replicas: Group | None = None

    @property
    def all_ranks(self) -> Group:
        """The ranks that share the parameter, and their replicas."""
        return context().groups[self.group.name]

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is the first of the ranks that hold the same elements."""
        return self.replicas is None or self.replicas.rank == 0

    def portable(self, element_size: int) -> tuple[Any, ...]:
        """Returns plain values for pickles; `spec_from_portable` rebuilds the spec from them."""
        layout = self.layout
        flat = None
        if layout is not None:
            numels = [layout.numel(index) for index in range(len(layout))]
            flat = (numels, element_size, layout.num_ranks, layout.partition)
        num_sharing = None if self.replicas is None else self.group.size
        return tuple(self.shape), self.group.name, flat, self.index, self._stage(), num_sharing

    def _stage(self) -> int | None:
        """The one stage of a pipeline that holds the parameter."""
        return None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def part(self, rank: int) -> tuple[int, int]:
        """Returns the first element and the number of elements that group rank ``rank`` owns."""
        if self.layout is not None:
            begin, count, _ = self.layout.local_part(self.index, rank)
            return begin, count
        chunk = -(-self.numel // self.group.size)
        begin = min(rank * chunk, self.numel)
        return begin, min(begin + chunk, self.numel) - begin

    def before_alignment(self, element_size: int) -> ShardSpec | None:
        """Returns the parameter's spec before partitions were aligned, or None if the bounds were the same."""
        if self.layout is None:
            return None
        numels = [self.layout.numel(index) for index in range(len(self.layout))]
        layout = layout_with(numels, element_size, self.layout.num_ranks)
        return None if layout.partition == self.layout.partition else replace(self, layout=layout)

    @property
    def local_part(self) -> tuple[int, int]:
        """The first element and the number of elements that this rank owns."""
        return self.part(self.group.rank)

    def slice_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a flattened full tensor, as a view."""
        begin, count = self.local_part
        return flat.narrow(0, begin, count)

    def gather(self, local: torch.Tensor, label: str) -> torch.Tensor:
        """Returns the flattened full tensor (a new one on the run device), gathered from all ranks. Collective.

        Args:
            local: this rank's part, on the run device or the host.
            label: names the parameter, in all collectives of this class; ranks with different labels raise an error.
        """
        size = self.group.size
        self.check_local(local)
        if size == 1:
            return local.reshape(-1).to(context().device, copy=True)
        local = local.to(context().device)
        counts = [self.part(rank)[1] for rank in range(size)]
        longest = max(counts)
        slot = slot_length(longest, local.element_size())
        slots = local.new_empty(size * slot)
        self.group.comm.all_gather(slots, _padded(local, slot), label).wait()
        if self.layout is None and slot == longest:
            return slots[: self.numel]  # equal runs: only the tail is padding
        return torch.cat([slots.narrow(0, rank * slot, count) for rank, count in enumerate(counts)])

    def make_replicas_equal(self, local: torch.Tensor, label: str) -> None:
        """Copies the elements of the first replica to the other replicas, in place. Collective."""
        if self.replicas is not None and local.numel():
            own = local.detach()
            wire = own.to(context().device)
            self.replicas.comm.broadcast(wire, 0, label).wait()
            if wire is not own:
                own.copy_(wire)

    def check_local(self, local: torch.Tensor) -> None:
        """Raises RuntimeError unless ``local`` has as many elements as this rank owns."""
        if local.numel() != self.local_part[1]:
            raise RuntimeError(
                f"a parameter of shape {tuple(self.shape)} holds {local.numel()} elements on rank {self.group.rank} of "
                f"{self.group.name!r}; expected this rank's {self.local_part[1]} (was its .data replaced?)"
            )

    def reduce_scatter(self, flat: torch.Tensor, label: str) -> torch.Tensor:
        """Returns this rank's part of the sum of the ranks' full tensors (16-bit dtypes accumulate in fp32)."""
        size = self.group.size
        if size == 1:
            return self._over_replicas(flat.clone(), label)
        slots = self._slots(flat)
        reduced = flat.new_empty(slots.shape[1])
        self.group.reduce_comm.reduce_scatter(reduced, slots.view(-1), ReduceOp.SUM, label).wait()
        return self._over_replicas(reduced[: self.local_part[1]], label)

    def _over_replicas(self, part: torch.Tensor, label: str) -> torch.Tensor:
        if self.replicas is not None:
            self.replicas.reduce_comm.all_reduce(part, ReduceOp.SUM, label).wait()
        return part

    def scatter(self, flat: torch.Tensor, label: str) -> list[torch.Tensor]:
        """Returns this rank's part of every rank's full tensor, in rank order; of replicas, each has a piece of it.

        Collective over the group and the replicas.
        """
        size, count = self.group.size, self.local_part[1]
        if self.replicas is None and size == 1:
            return [flat]
        slots, comm = self._slots(flat), self.group.reduce_comm
        if self.replicas is not None:
            comm, pieces = self.all_ranks.reduce_comm, self.replicas.size
            count = -(-slots.shape[1] // pieces)
            padded = torch.nn.functional.pad(slots, (0, count * pieces - slots.shape[1]))
            slots = padded.view(size, pieces, count).transpose(0, 1).reshape(-1, count)
        received = torch.empty_like(slots)
        comm.all_to_all(received.view(-1), slots.view(-1), label).wait()
        return list(received[:, :count].unbind(0))

    def join_pieces(self, piece: torch.Tensor, numel: int, label: str) -> torch.Tensor:
        """Returns the ``numel`` elements of which each replica has a piece. Collective over the replicas."""
        if self.replicas is None:
            return piece
        joined = piece.new_empty(self.replicas.size * piece.numel())
        self.replicas.reduce_comm.all_gather(joined, piece, label).wait()
        return joined[:numel]

    def _slots(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a matrix whose row r is the part of rank r, padded."""
        parts = [self.part(rank) for rank in range(self.group.size)]
        slot = slot_length(max(count for _, count in parts), flat.element_size())
        slots = flat.new_zeros((self.group.size, slot))
        for slot, (begin, count) in zip(slots, parts, strict=True):
            slot[:count].copy_(flat.narrow(0, begin, count))
        return slots


def layout_with(
    numels: list[int], element_size: int, num_ranks: int, partition: int | None = None
) -> FlatLayout:
    """Returns the layout of a block's buffer; without ``partition``, the layout before partitions were aligned."""
    if partition is None:
        partition = -(-FlatLayout(numels, element_size, 1).total // num_ranks)
    return FlatLayout(numels, element_size, num_ranks, partition=partition)


def _padded(local: torch.Tensor, length: int) -> torch.Tensor:
    if local.numel() == length:
        return local.detach().contiguous()
    padded = local.new_zeros(length)
    padded[: local.numel()] = local.detach()
    return padded


def merged_shape(shape: torch.Size, dim: int, number: int) -> torch.Size:
    """Returns the shape of ``number`` slices concatenated along ``dim``; -1: slices are whole."""
    if dim < 0:
        return shape
    return torch.Size([size * number if i == dim else size for i, size in enumerate(shape)])


def merge_slices(value: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Concatenates the slices of the ranks of ``group`` along ``dim``; differentiable. Collective over them."""
    if group.size == 1:
        return value
    return torch.cat(list(all_gather(value, group.comm).unbind(0)), dim=max(dim, 0))
