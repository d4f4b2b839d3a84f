"""Training that is bit-identical on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._base.arguments import require_integer
from ._base.generators import kept_generators, seed_generators, seed_of
from ._C import TreeSum
from ._engine.engine import current_engine
from ._ranks import context as _context
from .global_var import context
from .topology import Topology

__all__ = ["VirtualShard", "VirtualShards", "virtual_shards"]


@dataclass(frozen=True)
class VirtualShard:
    """One of the equal parts that the batch of a step is cut into.

    Attributes:
        index: its number.
        count: their number, independent of the ranks: ``virtual_shards=`` of :func:`bmtrain.init_distributed`.
        is_repeated: whether the rank has computed this shard before, since no other is left for it in the last
            micro-step; its gradients and its value for ``mean`` are not used.
    """

    index: int
    count: int
    is_repeated: bool = False

    def of(self, batch: Any) -> Any:
        """Returns this shard's rows of a batch of the whole step.

        Args:
            batch: a tensor, or anything else with a length and slices; ``count`` divides its length.

        Raises:
            ValueError: it does not divide.

        Example:
            >>> bmtrain.virtual.VirtualShard(index=1, count=2).of([10, 11, 12, 13])
            [12, 13]
        """
        if not hasattr(batch, "__len__"):
            raise TypeError(f"batch: expected a tensor or a sequence, got {batch!r} ({type(batch).__name__})")
        rows, rest = divmod(len(batch), self.count)
        if rest:
            raise ValueError(
                f"batch: expected a multiple of {self.count} rows, one virtual shard's being alike, got {len(batch)}"
            )
        return batch[self.index * rows : (self.index + 1) * rows]


class VirtualShards:
    """The virtual shards of one step that this rank computes, see :func:`virtual_shards`."""

    def __init__(self, step: int, count: int) -> None:
        self.step = step
        self.count = count

    def __iter__(self) -> Iterator[VirtualShard]:
        """Yields this rank's shards; at the end of the loop, the gradients are complete."""
        survival = context().survival
        return self.micro_steps() if survival is None else survival.shards(self)

    def micro_steps(self) -> Iterator[VirtualShard]:
        """The loop, without the survival of lost ranks."""
        ctx = context()
        engine = current_engine(ctx)
        if engine.virtual.is_open:
            raise RuntimeError("virtual_shards: a loop over virtual shards is running already")
        engine.virtual.begin_step(self.count * ctx.topology.sp_size)
        try:
            with kept_generators(ctx.device), engine.gradients.going_to(engine.virtual):
                for number, index in enumerate(own := shards_of(ctx.topology, self.count)):
                    engine.virtual.begin_shard()
                    seed_generators(seed_of(ctx.seed, self.step, index))
                    yield VirtualShard(index, self.count, is_repeated=index in own[:number])
                    engine.virtual.end_shard()
            with engine.gradients.ending():
                engine.virtual.publish()
            if engine.tier is not None:
                engine.tier.settle()
            engine.gradients.run_accumulated_hooks()
        finally:  # after an error, or a `break`: nothing remains
            engine.virtual.forget()

    def __len__(self) -> int:
        """The number of micro-steps, in each of which this rank computes a virtual shard."""
        return -(-self.count // context().topology.dp_size)

    def mean(self, values: Sequence[torch.Tensor | float]) -> torch.Tensor:
        """Returns the mean over all virtual shards, bit-identical on all ranks and any number of them. Collective.

        Args:
            values: one number for each virtual shard of this rank, in their order; for instance the losses. Values of
                ranks that share a virtual shard count alike.

        Returns:
            0-dim, fp32, on the run device, without a graph.

        Raises:
            ValueError: not as many values as this rank has shards.

        Example:
            >>> bmtrain.init_distributed(virtual_shards=2)
            >>> bmtrain.virtual_shards(step=0).mean([1.0, 3.0])  # of one rank, which has both
            tensor(2.)
        """
        if not isinstance(values, Sequence):
            raise TypeError(
                f"values: expected a sequence of numbers, got {values!r} ({type(values).__name__})"
            )
        ctx = context()
        if ctx.survival is not None and (mean := ctx.survival.mean(self, values)) is not None:
            return mean
        if len(values) != len(self):
            raise ValueError(
                f"values: expected {len(self)}, one for each of this rank's shards, got {len(values)}"
            )
        own = torch.stack(
            [torch.as_tensor(value, dtype=torch.float32, device=ctx.device).detach() for value in values]
        )
        group = ctx.world
        slots = own.new_empty((group.size, len(own)))
        group.comm.all_gather(slots.view(-1), own, "mean of virtual shards").wait()
        num_values = self.count * (group.size // ctx.topology.dp_size)
        tree = TreeSum(num_values)
        for value in slots.t().reshape(-1, 1):
            tree.push(value)
        return tree.total().squeeze(0).div_(num_values)


def virtual_shards(step: int) -> VirtualShards:
    """Cuts a step into virtual shards, so that its result does not depend on the number of ranks.

    ``init_distributed(virtual_shards=V)`` fixes their number. Each is a micro-batch of its own with random generators
    seeded by job, step and shard; in a micro-step each rank computes one (where none is left for it in the last, it
    repeats the one before, without effect). Ranks that divide sequences or layers (``sp_size``, ``tp_size``) compute a
    shard together, and the result is then the same on any number of ranks with these sizes. Stages of a pipeline
    (``pipe_size``) change no bit. Gradients are summed in fp32 by a binary tree over the V shards and rounded once:
    after the loop, the parameters' ``.grad`` hold the mean's gradient if :meth:`OptimManager.backward
    <bmtrain.optim.OptimManager.backward>` was used. The generators are then as they were before the loop.

    Args:
        step: number of the step, which the generators are seeded with: the same on all ranks, another for each step.

    Returns:
        An iterable of this rank's :class:`VirtualShard`, with ``mean(values)`` for the losses. All ranks iterate to the
        end.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`, or it was not given ``virtual_shards``.
        TypeError: ``step`` is not an integer.

    Example::

        bmt.init_distributed(seed=1, virtual_shards=8)
        for step, batch in enumerate(batches):  # every rank has the whole batch, or reads its shards' rows only
            manager.zero_grad()
            shards = bmt.virtual_shards(step)
            losses = []
            for shard in shards:
                losses.append(model(shard.of(batch)))
                manager.backward(losses[-1])
            manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
            manager.step()
            print(shards.mean(losses).item())
    """
    count = context("virtual_shards").virtual_shards
    if not count:
        raise RuntimeError(
            "virtual_shards: their number is not known: call init_distributed(virtual_shards=...), the same on every "
            "number of ranks"
        )
    return VirtualShards(require_integer("step", step), count)


def shards_of(place: Topology, count: int) -> list[int]:
    """Returns the shards of a rank, one for each micro-step.

    If none is left for it in the last micro-step, it repeats the one before. Ranks that share a batch have the same.

    >>> [shards_of(Topology(rank, 3), 8) for rank in range(3)]
    [[0, 3, 6], [1, 4, 7], [2, 5, 5]]
    >>> [shards_of(Topology(rank, 4, sp_size=2), 4) for rank in range(4)]
    [[0, 2], [0, 2], [1, 3], [1, 3]]
    """
    first, groups = place.dp_id, place.dp_size
    num_steps = -(-count // groups)
    return [
        number if number < count else number - groups for number in range(first, num_steps * groups, groups)
    ]


def one_thread(device: torch.device) -> None:
    """Makes matrix products independent of shared processors, unless the user has set the number of threads."""
    if device.type == "cpu" and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(1)


def check_no_loop(what: str) -> None:
    """Raises RuntimeError in a loop over virtual shards: the gradients are not complete yet."""
    current = _context.current()
    if current is not None and current_engine(current).virtual.is_open:
        raise RuntimeError(
            f"{what}: the gradients of virtual shards are there after the loop over them; call it after the loop"
        )
