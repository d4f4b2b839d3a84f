"""Copies of another rank's shards and optimizer state, which take part in every step.

[Note: Copies]
Each rank keeps what another one has: its *ward* (`ring.py`). When the gradients of a step are complete,
each rank sends its own to the rank that keeps its copy, and an optimizer of the same kind updates the copy as the ward
updates itself. Updates of elements do not depend on each other, so the bits are the same. For Adam the gradients are 2
or 4 bytes per parameter; a copy of the state after each step would be 8 to 14.

[Note: Damaged copies]
A copy is sealed by checksums after each update, which are compared before the next update and before the copy replaces
a lost rank. A message has a checksum for each parameter. A damaged array is named and never used: the copy misses its
update, all ranks hear of it at the next commit, and make all copies again from the ranks themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._C import Communicator, word_sums
from .._engine.engine import current_engine
from .._ranks.context import Context
from ..optim._arrays import MASTER
from ..optim._sharded import ShardedOptimizer
from ..parameter import DistributedParameter
from .ring import Ring

_LABEL = "copies"


def all_parameters(ctx: Context, optimizers: Iterable[ShardedOptimizer]) -> list[DistributedParameter]:
    """Returns the parameters of all Blocks and optimizers, in an order that is the same on all ranks."""
    found: dict[int, DistributedParameter] = {}
    for block in current_engine(ctx).blocks:
        for buffer in block.buffers:
            members: Sequence[Any] = buffer.parameters
            found.update((p._number, p) for p in members)
    for optimizer in optimizers:
        for p in _members(optimizer):
            found[p._number] = p
    return [found[number] for number in sorted(found)]


def name_of(param: DistributedParameter) -> str:
    """Returns the name of a parameter and of its Block."""
    block = None if param._block is None else param._block()
    return param._label if block is None else f"{param._label} in Block {block._label}"


def _members(optimizer: ShardedOptimizer) -> Iterator[DistributedParameter]:
    for group in optimizer.param_groups:
        yield from (p for p in group["params"] if isinstance(p, DistributedParameter))


def arrays_of(
    optimizers: Sequence[ShardedOptimizer],
) -> Iterator[tuple[int, DistributedParameter, tuple[str, ...]]]:
    """Yields the number of each optimizer, its parameters, and the arrays of their state, by names all ranks know."""
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            names = optimizer._formula.formula_in(group).arrays_of(group)
            for p in group["params"]:
                if isinstance(p, DistributedParameter):
                    keeps_master = optimizer.has_master(p) and not optimizer._place.shares_master(p)
                    yield number, p, (*names, MASTER) if keeps_master else names


class Held(NamedTuple):
    """The shards of a former rank that this process has: its own, or the copy of its ward's. Nothing changes them.

    Attributes:
        values: by parameter.
        states: of each optimizer, by parameter and name of the array.
        gradients: where they are complete.
    """

    values: Mapping[DistributedParameter, Tensor]
    states: Sequence[Mapping[Any, dict[str, Any]]]
    gradients: dict[DistributedParameter, Tensor] | None = None


class Ward:
    """The copy of another rank's shards.

    Attributes:
        rank: the other rank.
        params: copies of its shards, by the parameter.
        optimizers: update the copies.
    """

    def __init__(
        self,
        rank: int,
        values: dict[DistributedParameter, Tensor],
        optimizers: Sequence[ShardedOptimizer],
    ) -> None:
        self.rank = rank
        self.params = {p: torch.nn.Parameter(value, p.requires_grad) for p, value in values.items()}
        self.optimizers = [_twin(optimizer, self.params) for optimizer in optimizers]
        self._sums: dict[tuple[DistributedParameter, str], int] = {}
        self._gradients: dict[DistributedParameter, Tensor] = {}

    def seal(self) -> None:
        """Records the checksums of all arrays. See [Note: Damaged copies]."""
        self._sums = self._present_sums()

    def damage(self) -> str:
        """Returns the name of an array with other bits than at the last `seal`; empty if there is none."""
        wrong = (key for key, value in self._present_sums().items() if self._sums.get(key) != value)
        return next((f"{name} of {name_of(p)}" for p, name in wrong), "")

    def _present_sums(self) -> dict[tuple[DistributedParameter, str], int]:
        arrays = dict(self._arrays())
        return dict(zip(arrays, word_sums(list(arrays.values())), strict=True))

    def _arrays(self) -> Iterator[tuple[tuple[DistributedParameter, str], Tensor]]:
        for p, copy in self.params.items():
            yield (p, "the value"), copy.detach()
            for number, twin in enumerate(self.optimizers):
                for name, value in twin.state.get(copy, {}).items():
                    if isinstance(value, Tensor):
                        yield (p, f"{name} {number}" if number else name), value

    def take_options(self, number: int, optimizer: ShardedOptimizer) -> None:
        """Gives the optimizer of the copy with this number the options of ``optimizer``."""
        for group, own in zip(self.optimizers[number].param_groups, optimizer.param_groups, strict=True):
            options = {name: value for name, value in own.items() if name != "params"}
            group.update(deepcopy(options))  # a learning rate may be a tensor

    def step(self, number: int, scale: float) -> None:
        """Updates the copy by the optimizer with this number."""
        self.optimizers[number].step_unseen(scale)

    def held(self, gradients: dict[DistributedParameter, Tensor] | None) -> Held:
        """Returns the copy, with these gradients."""
        states = [
            {p: twin.state[copy] for p, copy in self.params.items() if copy in twin.state}
            for twin in self.optimizers
        ]
        return Held({p: copy.detach() for p, copy in self.params.items()}, states, gradients)

    def take_gradients(self, message: Message) -> None:
        """Gives the copies the gradients of the message, in memory of their own, as clipping scales them."""
        arrived = dict(zip(message.params, message.gradients, strict=True))
        for p, copy in self.params.items():
            copy.requires_grad_(p.requires_grad)
            gradient, room = arrived.get(p), self._gradients.get(p)
            if gradient is not None and (room is None or room.dtype != gradient.dtype):
                room = self._gradients[p] = torch.empty_like(gradient)
            copy.grad = None if gradient is None or room is None else room.copy_(gradient)


def _twin(optimizer: ShardedOptimizer, copies: dict[DistributedParameter, Any]) -> ShardedOptimizer:
    """Returns an optimizer of the same kind for copies of its parameters, without state."""
    groups = [
        {**group, "params": [copies[p] for p in group["params"] if p in copies]}
        for group in optimizer.param_groups
    ]
    twin: ShardedOptimizer = type(optimizer).__new__(type(optimizer))
    state = {**optimizer.__getstate__(), "param_groups": groups, "_early": set(), "_seen": {}}
    twin.__setstate__({**state, "state": {}})
    return twin


@torch.no_grad()
def put_state(optimizer: ShardedOptimizer, entries: dict[Tensor, dict[str, Any]]) -> None:
    """Replaces the state of an optimizer: by parameter ``step`` and its arrays."""
    optimizer.state.clear()
    optimizer._seen.clear()
    optimizer._create_state(
        {p: [name for name in entry if name not in ("step", MASTER)] for p, entry in entries.items()}
    )
    for p, entry in entries.items():
        state = optimizer.state[p]
        for name, value in entry.items():
            if name == "step":
                state["step"] = value
            else:
                state[name].copy_(value)
        optimizer._mark_seen(p)


class Message:
    """The gradients of one rank in a step, as bytes; for further steps too, as its memory takes long to get.

    Attributes:
        params: the parameters with gradients.
        gradients: their places in the message, 1-D.
    """

    def __init__(self, params: Sequence[DistributedParameter], rank: int) -> None:
        self.params = params
        self._dtypes = _gradient_dtypes(params)
        self._header = struct.Struct(f"{1 + len(params)}q")  # number of the step, checksum of each parameter
        counts = [p._spec.part(rank)[1] for p in params]
        sizes = [-(-n * dtype.itemsize // 8) * 8 for n, dtype in zip(counts, self._dtypes, strict=True)]
        self.data = torch.zeros(self._header.size + sum(sizes), dtype=torch.uint8)
        self._pieces = list(self.data[self._header.size :].split(sizes))
        known = zip(self._pieces, self._dtypes, counts, strict=True)
        self.gradients = [piece.view(dtype)[:count] for piece, dtype, count in known]

    def fits(self, params: Sequence[DistributedParameter]) -> bool:
        """Whether these parameters have gradients, of the same dtypes."""
        return (
            list(map(id, params)) == list(map(id, self.params)) and _gradient_dtypes(params) == self._dtypes
        )

    def pack(self, step: int) -> None:
        """Takes the gradients of this rank."""
        for place, p in zip(self.gradients, self.params, strict=True):
            if p.grad is not None:
                place.copy_(p.grad.reshape(-1))
        header = self._header.pack(step, *word_sums(self._pieces))
        self.data[: self._header.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)

    def damage(self, step: int) -> str:
        """Returns what is wrong with a message for ``step``; empty if nothing is."""
        found, *checksums = self._header.unpack(self.data[: self._header.size].numpy().tobytes())
        if found != step:
            return f"a message of step {found} instead of {step}"
        for p, checksum, present in zip(self.params, checksums, word_sums(self._pieces), strict=True):
            if checksum != present:
                return f"the message with the gradient of {name_of(p)} in step {step}"
        return ""

    def copies(self) -> dict[DistributedParameter, Tensor]:
        """Returns new tensors by parameter, 1-D."""
        return {p: gradient.clone() for p, gradient in zip(self.params, self.gradients, strict=True)}


def _gradient_dtypes(params: Iterable[DistributedParameter]) -> list[torch.dtype]:
    return [(p if p.grad is None else p.grad).dtype for p in params]


def exchange(comm: Communicator, own: Message, ward: Message, step: int, ring: Ring) -> str:
    """Sends a rank's gradients to the keeper of its copy, and receives the gradients of its ward. Collective.

    Returns:
        The damage of the received message.
    """
    own.pack(step)
    sent = comm.send(own.data, ring.keeper_of(comm.rank), _LABEL)
    received = comm.recv(ward.data, ring.ward_of(comm.rank), _LABEL)
    sent.wait()
    received.wait()
    return ward.damage(step)
