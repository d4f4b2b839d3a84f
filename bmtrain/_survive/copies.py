"""Copies of another rank's shards and optimizer state, which take part in every step.

[Note: Copies]
Each rank keeps what another one has: its *ward* (`ring.py`). When the gradients of a step are complete,
each rank sends its own to the rank that keeps its copy, and an optimizer of the same kind updates the copy as the ward
updates itself. Updates of elements do not depend on each other, so the bits are the same. For Adam the gradients are 2
or 4 bytes per parameter; a copy of the state after each step would be 8 to 14.

Shards that other ranks hold anyway (level 0, ``zero_size``) need no copy; their gradients stay on the rank.

Copies of GPU ranks are in host memory and updated there, by kernels with the same bits. Their gradients, and all that
ranks agree on, travel through host memory (`host_comm`), which no work that a device has queued holds up.

[Note: Damaged copies]
Each array of a copy has a checksum, taken by each update, and compared by the next one and before the copy replaces a
lost rank. A message has a checksum for each parameter, compared at the same times. A damaged array is named and never
used: all ranks hear of it at the next commit, and make all copies again from the ranks themselves.

[Note: Memory of gradients]
The gradients of a copy are the message itself. Until the gate the script's thread owns it, and leaves it as it came, as
a recovery needs gradients before clipping: factors of clipping are noted. After the gate the thread of updates owns it,
and multiplies by them in `Ward.step`, until `Keeper.settle`. The next message is received after that.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._C import Communicator, copy_and_sum, word_sums
from .._engine.engine import current_engine
from .._ranks.context import Context
from ..optim._arrays import MASTER
from ..optim._sharded import ShardedOptimizer
from ..parameter import DistributedParameter
from .ring import Ring

_LABEL = "copies"
_GRADIENT = "the message with the gradient"


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


def is_copied(param: DistributedParameter) -> bool:
    """Whether a shard has a copy; otherwise other ranks hold the same shard."""
    return param._spec.replicas is None


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
    """Yields the number of each optimizer, its parameters, and the arrays of their state, the same on all ranks.

    Masters of fp32 parameters are left out: they are equal to the parameter, and made again.
    """
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            names = optimizer._formula.formula_in(group).arrays_of(group)
            for p in group["params"]:
                if isinstance(p, DistributedParameter):
                    yield number, p, names if p.dtype is torch.float32 else (*names, MASTER)


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
        self, rank: int, values: dict[DistributedParameter, Tensor], optimizers: Sequence[ShardedOptimizer]
    ) -> None:
        self.rank = rank
        self.params = {p: torch.nn.Parameter(value, p.requires_grad) for p, value in values.items()}
        self.optimizers = [_twin(optimizer, self.params) for optimizer in optimizers]
        self._of: dict[Tensor, DistributedParameter] = {copy: p for p, copy in self.params.items()}
        self._sums: dict[Any, int] = {}  # of arrays, by their keys, and gradients
        self._updated: set[Any] = set()  # keys of arrays that this step has updated
        self._factors: dict[Tensor, list[float]] = {}  # of clipping, by copy

    def seal(self) -> None:
        """Records the checksums of all arrays. See [Note: Damaged copies]."""
        self._sums.update(self._present_sums())

    def damage(self) -> str:
        """Returns the name of an array with other bits than recorded; empty if there is none.

        Arrays that `step` has updated since the last call are left out.
        """
        damage = self._compare(self._present_sums().items())
        self._updated.clear()
        return damage

    def _compare(self, sums: Iterable[tuple[Any, int]]) -> str:
        wrong = [key for key, value in sums if self._sums.get(key, value) != value]
        return f"{wrong[0][1]} of {name_of(wrong[0][0])}" if wrong else ""

    def _present_sums(self) -> dict[Any, int]:
        arrays = {key: value for key, value in self._arrays() if key not in self._updated}
        return dict(zip(arrays, word_sums(list(arrays.values())), strict=True))

    def _arrays(self) -> Iterator[tuple[Any, Tensor]]:
        for p, copy in self.params.items():
            yield (p, "the value", 0), copy.detach()
            for number, twin in enumerate(self.optimizers):
                for name, value in twin.state.get(copy, {}).items():
                    if isinstance(value, Tensor) and value.data_ptr() != copy.data_ptr():
                        yield (p, name, number), value

    def is_current(self) -> bool:
        """Whether the copy has all arrays that there are: an update adds to it what it adds to the ward."""
        return True

    def create_state(self) -> int:
        """Returns 0: updates create state."""
        return 0

    def messages(self, params: Sequence[DistributedParameter], rank: int) -> tuple[Message, Message]:
        """Returns messages of this rank, which is ``rank``, and of the ward."""
        return Message(params, rank), Message(params, self.rank)

    def exchange(self, comm: Communicator, own: Message, ward: Message, step: int, ring: Ring) -> None:
        """Sends a rank's gradients to the keeper of its copy, and receives its ward's. Collective."""
        own.pack(step)
        sent = comm.send(own.data, ring.keeper_of(comm.rank), _LABEL)
        received = comm.recv(ward.data, self.rank, _LABEL)
        sent.wait()
        received.wait()

    def is_in_place(self, _: Sequence[ShardedOptimizer]) -> bool:
        """Returns False: a copy is made again."""
        return False

    def leave(self) -> None:
        """Does nothing: the ward does not know of its copy."""

    def place(self) -> int:
        """Returns 0: of gates that the ward has passed, its copy knows none."""
        return 0

    def pass_gate(self, place: int, is_left_out: bool) -> None:
        """Does nothing: the update itself changes the copy."""

    def note_update(self, number: int, optimizer: ShardedOptimizer, scale: float) -> Callable[[], str]:
        """Returns `step` by the optimizer with this number, with the present options of ``optimizer``."""
        for group, own in zip(self.optimizers[number].param_groups, optimizer.param_groups, strict=True):
            # A scheduler may change them before the update; a learning rate may be a tensor.
            group.update(deepcopy({name: value for name, value in own.items() if name != "params"}))
        return partial(self.step, number, scale)

    def scale_gradients(self, params: Iterable[Any], factor: float) -> None:
        """Notes what the gradients of these parameters are multiplied by before the update."""
        for copy in (self.params[p] for p in params if p in self.params):
            self._factors.setdefault(copy, []).append(factor)

    def step(self, number: int, scale: float) -> str:
        """Updates the copy by the optimizer with this number.

        Returns:
            The name of an array that had other bits than after its last update, or than the ward's gradient; empty if
            there is none.
        """
        sums = self.optimizers[number].step_checked(scale, self._factors)
        damage = self._compare((self._key(copy, name, number), before) for copy, name, before, _ in sums)
        for copy, name, _, after in sums:
            key = self._key(copy, name, number)
            if name == "gradient":  # a further optimizer finds it multiplied
                self._factors.pop(copy, None)
                self._sums.pop(key, None)
            else:
                self._sums[key] = after
                self._updated.add(key)
        return damage

    def _key(self, copy: Tensor, name: str, number: int) -> Any:
        shared = {"value": "the value", "gradient": _GRADIENT}
        return self._of[copy], shared.get(name, name), 0 if name in shared else number

    def held(self, gradients: dict[DistributedParameter, Tensor] | None) -> Held:
        """Returns the copy, with these gradients."""
        states = [
            {p: twin.state[copy] for p, copy in self.params.items() if copy in twin.state}
            for twin in self.optimizers
        ]
        return Held({p: copy.detach() for p, copy in self.params.items()}, states, gradients)

    def take_gradients(self, message: Message) -> None:
        """Gives the copies the gradients of the message, see [Note: Memory of gradients]."""
        arrived = dict(zip(message.params, message.gradients, strict=True))
        self._sums.update(((p, _GRADIENT, 0), checksum) for p, checksum in message.header()[1].items())
        self._factors = {}
        for p, copy in self.params.items():
            copy.requires_grad_(p.requires_grad)
            copy.grad = arrived.get(p)


def _twin(optimizer: ShardedOptimizer, copies: dict[DistributedParameter, Any]) -> ShardedOptimizer:
    """Returns an optimizer of the same kind for copies of its parameters, without state."""
    groups = [
        {**group, "params": [copies[p] for p in group["params"] if p in copies]}
        for group in optimizer.param_groups
    ]
    twin: ShardedOptimizer = type(optimizer).__new__(type(optimizer))
    state = {**optimizer.__getstate__(), "param_groups": groups, "_early": set(), "_seen": {}}
    twin.__setstate__({**state, "state": {}})
    twin._place.as_torch = optimizer._place.as_torch
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

    Args:
        params: the parameters with gradients.
        rank: the rank.
        memory: where the bytes are; default: in new memory.

    Attributes:
        params: the parameters with gradients.
        gradients: their places in the message, 1-D.
    """

    def __init__(
        self, params: Sequence[DistributedParameter], rank: int, memory: Tensor | None = None
    ) -> None:
        self.params = params
        self._dtypes = _gradient_dtypes(params)
        self._header = struct.Struct(f"{1 + len(params)}q")  # number of the step, checksum of each parameter
        counts = [p._spec.part(rank % p._spec.group.size)[1] for p in params]
        sizes = [-(-n * dtype.itemsize // 8) * 8 for n, dtype in zip(counts, self._dtypes, strict=True)]
        nbytes = self._header.size + sum(sizes)
        if memory is None:
            on_gpu = any(p.is_cuda for p in params)
            memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        self.data = memory[:nbytes]
        known = zip(self.data[self._header.size :].split(sizes), self._dtypes, counts, strict=True)
        self.gradients = [piece.view(dtype)[:count] for piece, dtype, count in known]

    def fits(self, params: Sequence[DistributedParameter]) -> bool:
        """Whether these parameters have gradients, of the same dtypes."""
        return (
            list(map(id, params)) == list(map(id, self.params)) and _gradient_dtypes(params) == self._dtypes
        )

    def pack(self, step: int) -> None:
        """Takes the gradients of this rank."""
        grads = [p.grad.reshape(-1).contiguous() for p in self.params if p.grad is not None]
        if all(grad.is_cpu for grad in grads):
            sums = copy_and_sum(self.gradients, grads)
        else:
            for piece, grad in zip(self.gradients, grads, strict=True):
                piece.copy_(grad, non_blocking=True)
            torch.cuda.current_stream().synchronize()
            sums = word_sums(self.gradients)
        header = self._header.pack(step, *sums)
        self.data[: self._header.size] = torch.frombuffer(bytearray(header), dtype=torch.uint8)

    def header(self) -> tuple[int, dict[DistributedParameter, int]]:
        """Returns the number of the step, and the checksum of each gradient."""
        step, *checksums = self._header.unpack(self.data[: self._header.size].numpy().tobytes())
        return step, dict(zip(self.params, checksums, strict=True))

    def damage(self, step: int) -> str:
        """Returns what is wrong with a message for ``step``; empty if nothing is."""
        found, checksums = self.header()
        if found != step:
            return f"a message of step {found} instead of {step}"
        present = zip(checksums.items(), word_sums(self.gradients), strict=True)
        wrong = (p for (p, checksum), now in present if checksum != now)
        return next((f"{_GRADIENT} of {name_of(p)} in step {step}" for p in wrong), "")

    def copies(self) -> dict[DistributedParameter, Tensor]:
        """Returns new tensors by parameter, 1-D."""
        return {p: gradient.clone() for p, gradient in zip(self.params, self.gradients, strict=True)}


def _gradient_dtypes(params: Iterable[DistributedParameter]) -> list[torch.dtype]:
    return [(p if p.grad is None else p.grad).dtype for p in params]
