"""Sums of the gradients of one step's virtual shards, independent of the number of ranks.

[Note: Independence of the number of ranks]
A virtual shard runs alone, on one rank, on full parameters: its gradient is the same wherever it runs. The gradients
are summed by a `TreeSum` (csrc/shard/reduction.h) for each of a block's buffers and each parameter outside blocks,
elementwise: so the bounds of the ranks' shards do not matter. If a backward reaches a parameter several times (a block
that is used twice), the first arrivals of all virtual shards form one tree, the second ones another, and the trees are
added: a single tree would sum in different orders on one rank and on many.

In a micro-step adjacent ranks compute adjacent shards, or parts of one: sequence and tensor-parallel ranks share its
tokens, and each has a gradient of what is not sliced. Where the last micro-step has more ranks than shards, the last
ranks repeat a shard, so that all ranks make the same calls; their gradients come last, and a full tree ignores them.

Where experts are divided over ranks, a rank has a gradient of its experts from each rank of its group. These do not go
through the block's buffer, which has room for one: they wait here for the end of the block's backward, and are sent and
summed parameter by parameter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .._C import ShardedBuffer, TreeSum
from .._shards.gather import changed_by_hooks
from ..global_var import context
from ..parameter import DistributedParameter
from .block_state import BlockState
from .gradients import Destination, Gradients
from .unsent import Unsent


class _Sums:
    """The trees of one owner, by order of arrival."""

    def __init__(self, owner: ShardedBuffer | DistributedParameter, num_shards: int) -> None:
        self.owner = owner  # kept: its identity is the key
        self._num_shards = num_shards
        self._trees: list[TreeSum] = []

    def tree(self, arrival: int) -> TreeSum:
        if arrival == len(self._trees):
            self._trees.append(TreeSum(self._num_shards))
        return self._trees[arrival]

    def total(self) -> torch.Tensor:
        for tree in self._trees:
            if tree.num_leaves != self._num_shards:
                raise RuntimeError(
                    f"{self._name()}: {tree.num_leaves} of {self._num_shards} virtual shards gave it a gradient; "
                    "every one must use the same parameters equally often"
                )
        total = self._trees[0].total()
        for tree in self._trees[1:]:
            total.add_(tree.total())
        owner = self.owner
        if isinstance(owner, ShardedBuffer):
            param: DistributedParameter = owner.parameters[0]  # type: ignore[assignment]
            return param._spec.join_pieces(total, owner.layout.partition, param._label)
        return owner._spec.join_pieces(total, owner._spec.local_part[1], owner._label)

    def _name(self) -> str:
        if isinstance(self.owner, ShardedBuffer):
            return f"a block's buffer of {self.owner.layout.total} elements"
        return f"a parameter of shape {tuple(self.owner._original_shape)}"


class VirtualSum(Destination):
    """Gradients are summed over the virtual shards of a step, and are there when it ends; closed between steps."""

    sums_on_arrival = False
    adds_to_shards = False

    def __init__(self, unsent: Unsent) -> None:
        super().__init__(unsent)
        self.is_open = False
        self._num_shards = 0
        self._sums: dict[int, _Sums] = {}
        self._arrivals: Counter[int] = Counter()  # in this micro-step
        self._arrivals_of: defaultdict[int, Counter[int]] = defaultdict(
            Counter
        )  # by micro-batch of a pipeline
        self._of_experts: dict[int, tuple[DistributedParameter, list[torch.Tensor]]] = {}

    # ---- the destination of gradients

    def of_parameter(self, param: DistributedParameter, gradient: torch.Tensor) -> None:
        """Adds the full gradient of a parameter outside blocks. Collective."""
        tree = self._tree(param, param)
        for part in param._spec.scatter(gradient.reshape(-1), param._label):
            tree.push(part)

    def takes(self, trained: tuple[ShardedBuffer, list[bool]]) -> bool:
        """As of the base class; never for experts that get rows of several ranks."""
        param: DistributedParameter = trained[0].parameters[0]  # type: ignore[assignment]
        return super().takes(trained) and not (param._ep_mode and param._slice_group.size > 1)

    def of_experts(self, param: DistributedParameter, gradients: Sequence[torch.Tensor]) -> None:
        """Adds the full gradients of this rank's experts: for the rows of each rank of their group."""
        block = _block_of(param)
        dtype = param.dtype if block is None else block.policy.dtypes_of(param.dtype).reduce
        own = [changed_by_hooks(param, gradient).to(dtype) for gradient in gradients]
        known = self._of_experts.get(id(param))
        if known is not None:
            own = [one + other for one, other in zip(known[1], own, strict=True)]
        self._of_experts[id(param)] = param, own

    def of_block(self, block: BlockState, buffers: Sequence[ShardedBuffer]) -> Sequence[ShardedBuffer] | None:
        self._send_experts(block)
        for buffer in buffers:
            spec = buffer.parameters[0]._spec  # type: ignore[attr-defined]
            if spec.replicas is not None:
                buffer.send_pieces(spec.all_ranks.reduce_comm)
        return super().of_block(block, buffers)

    def _send_experts(self, block: BlockState | None) -> None:
        """Sends the gradients of experts in ``block``; None: outside blocks. Collective."""
        for param, gradients in list(self._of_experts.values()):
            if _block_of(param) is block:
                del self._of_experts[id(param)]
                parts = [param._spec.scatter(own.reshape(-1), param._label) for own in gradients]
                tree = self._tree(param, param)
                for of_rank in zip(*parts, strict=True):
                    for part in of_rank:
                        tree.push(part)

    def keeps(self, param: DistributedParameter) -> bool:
        return True

    def tree_of(self, buffer: ShardedBuffer) -> TreeSum:
        return self._tree(buffer, buffer.parameters[0])  # type: ignore[arg-type]

    def _tree(self, owner: ShardedBuffer | DistributedParameter, param: DistributedParameter) -> TreeSum:
        arrival = self._arrivals[id(owner)]
        self._arrivals[id(owner)] += 1
        number = self._num_shards * (1 if param._tp_mode else context("virtual shards").topology.tp_size)
        return self._sums.setdefault(id(owner), _Sums(owner, number)).tree(arrival)

    # ---- steps

    def begin_step(self, num_shards: int) -> None:
        """Opens the sum: gradients are collected here until `publish` or `forget`."""
        self.is_open = True
        self._num_shards = num_shards
        self._sums.clear()

    def begin_shard(self) -> None:
        """Begins the next of this rank's virtual shards."""
        self._arrivals.clear()
        self._arrivals_of.clear()

    @contextmanager
    def of_micro(self, gradients: Gradients, micro: int) -> Iterator[None]:
        """Context manager for the backward of a micro-batch in a pipeline, which is a virtual shard."""
        if not self.is_open:
            yield
            return
        gradients.finish()
        outside, self._arrivals = self._arrivals, self._arrivals_of[micro]
        try:
            yield
        finally:
            self._arrivals = outside

    def end_shard(self) -> None:
        """Ends a virtual shard: all its gradients are there. Collective."""
        self._send_experts(None)

    def forget(self) -> None:
        """Ends a step, and drops its sums."""
        self.is_open = False
        self._sums.clear()
        self._of_experts.clear()

    @torch.no_grad()
    def publish(self) -> None:
        """Ends a step, and adds the sums to the gradients."""
        sums = list(self._sums.values())
        self.forget()
        for owned in sums:
            total = owned.total()
            if isinstance(owned.owner, ShardedBuffer):
                block = _block_of(owned.owner.parameters[0])  # type: ignore[arg-type]
                assert block is not None
                block.prepare_reduce([owned.owner])
                owned.owner.add_gradient(total)
                block.end_reduce([owned.owner])
            elif owned.owner.requires_grad:
                _add_gradient(owned.owner, total)


def _block_of(param: DistributedParameter) -> BlockState | None:
    return None if param._block is None else param._block.runtime()


def _add_gradient(param: DistributedParameter, total: torch.Tensor) -> None:
    if param.grad is None:
        param.grad = total.to(param.device, param.dtype)
    else:
        param.grad.copy_(total.to(param.device).view_as(param.grad) + param.grad)
    param._run_accumulated_hooks()
