"""Shards and optimizer state that outlive their rank, in memory which its keeper maps.

[Note: Shared shards]
Ranks of one host need no copies. The values and the optimizer state of a rank are in a memory file that its keeper
maps too, and at a commit the rank puts its gradients there. When it dies in an update, its journal tells what is
updated (see [Note: Journals] in the core): the keeper copies everything, and completes the update in its copy by the
notes of its own update: options, scale, factors of clipping.

A rank that was only stopped may continue while its keeper reads. The head of the journal changes with each piece that
is updated, so the keeper reads the head before and after the rest, until both are the same.

State of a parameter that begins with the coming update is created at the commit, as the update would create it
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.tensors import TORCH_DATA, data_of, gradient_of
from .._C import Communicator, StepJournal, lend
from .._engine.engine import current_engine
from .._ops import scale_
from .._ranks import shm_meeting
from .._ranks.agree import gather_json, largest
from .._ranks.context import Context
from .._ranks.groups import host_comm
from ..optim._arrays import MASTER
from ..optim._sharded import ShardedOptimizer
from ..optim._updates import Journal
from ..optim.places import OnDevice
from ..parameter import DistributedParameter
from .copies import Held, Message, Ward, all_parameters, arrays_of, is_copied, put_state
from .memory_file import Layout, MemoryFile, Places
from .ring import Ring

_LABEL = "copies"


def may_share(ctx: Context, optimizers: Iterable[ShardedOptimizer]) -> bool:
    """Whether ranks can map each other's memory, and optimizers update it within a step; the same on all ranks."""
    return (
        ctx.world.size > 1
        and ctx.device.type == "cpu"
        and len(set(ctx.places)) == 1
        and ctx.places[0] != ""
        and all(type(optimizer._place) is OnDevice for optimizer in optimizers)
    )


class _Update(NamedTuple):
    """Notes of an update of this rank by the optimizer with a number."""

    number: int
    scale: float
    options: list[dict[str, Any]]
    fresh: frozenset[Any]


class SharedWard:
    """The shards of another rank in memory that it updates itself, beside the memory of this rank's own.

    Attributes:
        rank: the other rank.
    """

    def __init__(self, ctx: Context, optimizers: Sequence[ShardedOptimizer], ring: Ring) -> None:
        self.rank = ring.ward_of(ctx.world.rank)
        self._optimizers = list(optimizers)
        self._params = all_parameters(ctx, optimizers)
        self._arrays = list(arrays_of(optimizers))
        self._kinds = kinds_of(optimizers)
        self._layout = Layout(ctx, self._params, self._arrays)
        self._message: Message | None = None  # the ward's
        self._factors: dict[DistributedParameter, list[float]] = {}  # of clipping, since the message
        self._gate = 0  # of the last update
        self._updated_from: Message | None = None
        self._updated_with: dict[DistributedParameter, list[float]] = {}
        self._trained: frozenset[DistributedParameter] = frozenset()
        self._updates: list[_Update] = []
        self._damage = ""

    # ---- memory

    @torch.no_grad()
    def meet(self, ctx: Context) -> bool:
        """Moves this rank's shards and state to a memory file, and maps the ward's file. Collective.

        Returns:
            Whether all ranks could do so.
        """
        current_engine(ctx).drop_ahead()
        told: dict[str, Any] = {"process": os.getpid(), "file": -1, "mark": "", "places": self._layout.places}
        file = None
        with suppress(OSError):
            if not shm_meeting.why_not():
                file, told["file"] = MemoryFile.new(self._layout.nbytes)
                told["mark"] = file.make_mark()
        try:
            found = gather_json(told, _LABEL, host_comm(ctx))[self.rank]
            of_ward = MemoryFile.of_process(found["process"], found["file"], found["mark"])
            failed = largest([int(file is None or of_ward is None)], _LABEL, host_comm(ctx))[0]
        finally:
            if file is not None:
                os.close(told["file"])
        if failed or file is None or of_ward is None:
            return False
        self._file, self._ward_file, self._ward = file, of_ward, Places(*found["places"])
        self._move()
        return True

    def _move(self) -> None:
        places = self._layout.places
        for buffer, offset in self._layout.buffers:
            if buffer.shard.numel():
                moved = self._file.tensor(offset, buffer.shard.numel(), buffer.shard.dtype)
                lend(buffer.shard, moved.copy_(buffer.shard))
        for p, offset in self._layout.alone:
            value, moved = data_of(p), self._file.tensor(offset, p.numel(), p.dtype)
            moved.copy_(value.reshape(-1))
            if p.numel() and value.untyped_storage().nbytes() == value.nbytes:
                lend(value, moved)  # views that a script holds stay views
            else:
                TORCH_DATA.__set__(p, moved.view(p.shape))
        for (number, p, names), offsets in zip(self._arrays, places.states, strict=True):
            self._move_state(number, p, names, offsets)
        journal = self._file.between(places.journal, places.journal + StepJournal.nbytes(places.num_pieces))
        self._core = StepJournal(journal, places.num_pieces)
        for number, optimizer in enumerate(self._optimizers):
            optimizer._journal = Journal(self._core, self._pieces_of(number, places))

    def _move_state(self, number: int, p: Tensor, names: Sequence[str], offsets: Sequence[int]) -> None:
        state = self._optimizers[number]._states.get(p, {})
        for name, offset in zip(names, offsets, strict=True):
            if name in state:
                moved = self._file.tensor(offset, p.numel(), torch.float32)
                state[name] = moved.copy_(state[name].reshape(-1)).view(state[name].shape)

    def _pieces_of(self, number: int, places: Places) -> dict[DistributedParameter, int]:
        pieces = zip(self._arrays, places.first_pieces, strict=True)
        return {p: first for (of, p, _), first in pieces if of == number}

    def is_in_place(self, optimizers: Sequence[ShardedOptimizer]) -> bool:
        """Whether shards and state of the job's optimizers are where `meet` has put them, and updates are recorded."""
        if [*optimizers] != [*self._optimizers] or any(o._journal is None for o in optimizers):
            return False
        if not self.is_current() or _shapes_of(arrays_of(self._optimizers)) != _shapes_of(self._arrays):
            return False
        base = self._file.between(0, 1).data_ptr()
        found = [(buffer.shard, offset) for buffer, offset in self._layout.buffers]
        found += [(data_of(p), offset) for p, offset in self._layout.alone]
        for (number, p, names), offsets in zip(self._arrays, self._layout.places.states, strict=True):
            state = self._optimizers[number]._states.get(p, {})
            found += [(state[name], at) for name, at in zip(names, offsets, strict=True) if name in state]
        return all(x.numel() == 0 or x.data_ptr() == base + offset for x, offset in found)

    def leave(self) -> None:
        """Ends the records of updates; the memory stays where it is."""
        for optimizer in self._optimizers:
            optimizer._journal = None

    # ---- the step, as of a `Ward`

    def is_current(self) -> bool:
        """Whether the optimizers have the parameters and the arrays that they had in `meet`."""
        return kinds_of(self._optimizers) == self._kinds

    def seal(self) -> None:
        """Does nothing: there is no copy that could be damaged."""

    def damage(self) -> str:
        """Returns the name of gradients that were damaged when `held` needed them; empty if there is none."""
        return self._damage

    def create_state(self) -> int:
        """Creates state that begins with the coming update; returns the number of writes to it."""
        writes = 0
        arrays = list(zip(self._arrays, self._layout.places.states, strict=True))
        for number, optimizer in enumerate(self._optimizers):
            states = optimizer._states
            journal = optimizer._journal
            lacking = [
                (p, names, offsets)
                for (of, p, names), offsets in arrays
                if of == number and _is_updated(p) and (p not in states or not {*names} <= states[p].keys())
            ]
            if lacking and journal is not None:
                optimizer._create_state({p: [n for n in names if n != MASTER] for p, names, _ in lacking})
                for p, names, offsets in lacking:
                    self._move_state(number, p, names, offsets)
                    writes += sum(states[p][name]._version for name in names)
                fresh = frozenset([*journal.fresh, *(p for p, *_ in lacking)])
                optimizer._journal = journal._replace(fresh=fresh)
        return writes

    def messages(self, params: Sequence[DistributedParameter], rank: int) -> tuple[Message, Message]:
        """Returns the messages of this rank, which is ``rank``, and of the ward."""
        own, ward = self._layout.places, self._ward
        return (
            Message(params, rank, self._file.between(own.message, own.journal)),
            Message(params, self.rank, self._ward_file.between(ward.message, ward.journal)),
        )

    def exchange(self, comm: Communicator, own: Message, _: Message, step: int, __: Ring) -> None:
        """Puts this rank's gradients where its keeper reads them. Collective."""
        own.pack(step)
        comm.barrier(_LABEL)

    def take_gradients(self, message: Message) -> None:
        """Notes the message of the ward."""
        self._message, self._factors = message, {}

    def scale_gradients(self, params: Iterable[Any], factor: float) -> None:
        """Notes what the gradients of these parameters are multiplied by before the update."""
        for p in params:
            self._factors.setdefault(p, []).append(factor)

    def pass_gate(self, place: int, is_left_out: bool) -> None:
        """Notes that this rank will update its shards, and from what its ward updates its own."""
        if is_left_out:
            self._message = None
        self._gate, self._updates = place, []
        self._updated_from, self._updated_with = self._message, self._factors
        params = () if self._message is None else self._message.params
        self._trained = frozenset(p for p in params if p.requires_grad)
        self._core.start(place)
        for optimizer in self._optimizers:
            if optimizer._journal is not None:
                optimizer._journal = optimizer._journal._replace(is_open=not is_left_out)

    def note_update(self, number: int, optimizer: ShardedOptimizer, scale: float) -> None:
        """Notes an update of this rank by the optimizer with this number."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        journal = optimizer._journal
        if journal is not None:
            self._updates.append(_Update(number, scale, deepcopy(options), journal.fresh))
            optimizer._journal = journal._replace(fresh=frozenset(), is_open=False)

    # ---- after a loss

    def place(self) -> int:
        """Returns the number of the last gate that the ward has passed, see [Note: Places in a step]; 0: none here."""
        head = self._ward_file.between(self._ward.journal, self._ward.journal + 8)
        return int(head.view(torch.int64))

    @torch.no_grad()
    def held(self, gradients: dict[DistributedParameter, Tensor] | None) -> Held:
        """Returns a copy of the shards and state of the ward, after its update, with these gradients."""
        values, states, message, journal = self._read()
        copy = Ward(self.rank, {p: v for p, v in values.items() if is_copied(p)}, self._optimizers)
        rest = self._updates_left(journal)
        entries: list[dict[Tensor, dict[str, Any]]] = [{} for _ in self._optimizers]
        for (number, p, names), arrays in zip(self._arrays, states, strict=True):
            own, records = self._optimizers[number]._states.get(p), self._optimizers[number]._journal
            if own is not None and p in copy.params and records is not None and p not in records.fresh:
                step = own["step"] - ((number, p._number) in rest)
                entries[number][copy.params[p]] = {"step": step, **dict(zip(names, arrays, strict=True))}
        for twin, entry in zip(copy.optimizers, entries, strict=True):
            put_state(twin, entry)
        if rest and message is not None:
            self._update(copy, message, journal)
        return copy.held(gradients)

    def _read(self) -> tuple[dict[DistributedParameter, Tensor], list[list[Tensor]], Message | None, Tensor]:
        """Returns copies of the ward's values, state, gradients of the last update, and journal."""
        file, places = self._ward_file, self._ward
        end = places.journal + StepJournal.nbytes(places.num_pieces)
        memory = file.between(places.journal, end)
        head = memory[: StepJournal.head_nbytes(places.num_pieces)]
        while True:
            before = head.clone()
            values = {
                p: file.tensor(offset, self._size(p), p.dtype).clone()
                for p, offset in zip(self._params, places.values, strict=True)
            }
            states = [
                [file.tensor(offset, self._size(p), torch.float32).clone() for offset in offsets]
                for (_, p, _), offsets in zip(self._arrays, places.states, strict=True)
            ]
            known = self._updated_from
            message = None if known is None else Message(known.params, self.rank, known.data.clone())
            journal = memory.clone()
            if torch.equal(journal[: len(head)], before) and torch.equal(head, before):
                return values, states, message, journal

    def _size(self, p: DistributedParameter) -> int:
        return p._spec.part(self.rank % p._spec.group.size)[1]

    def _updates_left(self, journal: Tensor) -> set[tuple[int, int]]:
        """Returns number of the optimizer and of the parameter, if the ward has not completed all its updates."""
        numbers = {update.number for update in self._updates}
        done, found, is_left = journal.view(torch.int64)[1:], set(), False
        for (number, p, _), first in zip(self._arrays, self._ward.first_pieces, strict=True):
            if number in numbers and p in self._trained and is_copied(p):
                found.add((number, p._number))
                pieces = done[first : first + StepJournal.num_pieces_of(self._size(p))]
                is_left |= not bool((pieces == self._gate).all())
        return found if is_left else set()

    def _update(self, copy: Ward, message: Message, journal: Tensor) -> None:
        """Completes the ward's update in its copy."""
        self._damage = message.damage(message.header()[0])
        for p, gradient in zip(message.params, message.gradients, strict=True):
            for factor in self._updated_with.get(p, ()):
                scale_([gradient], torch.tensor(factor, dtype=torch.float64, device="cpu"))
        core = StepJournal(journal, self._ward.num_pieces)
        core.start(self._gate)
        copy.take_gradients(message)
        for p, value in copy.params.items():
            value.requires_grad_(p in self._trained)  # then, and not now
        for number, scale, options, fresh in self._updates:
            twin, pieces = copy.optimizers[number], self._pieces_of(number, self._ward)
            del twin.param_groups[len(options) :]  # of a group that was added since
            for group, known in zip(twin.param_groups, options, strict=True):
                group.update(known)
            copies = copy.params
            first_pieces = {copies[p]: first for p, first in pieces.items() if p in copies}
            begun = frozenset(copies[p] for p in fresh if p in copies)
            twin._journal = Journal(core, first_pieces, begun, is_open=True)
            twin.step_checked(scale, {})


def _shapes_of(arrays: Iterable[tuple[int, DistributedParameter, tuple[str, ...]]]) -> list[Any]:
    return [(number, id(p), p.numel(), p.dtype, names) for number, p, names in arrays]


def _is_updated(p: DistributedParameter) -> bool:
    return gradient_of(p) is not None and p.requires_grad


def kinds_of(optimizers: Iterable[ShardedOptimizer], name: Callable[[Any], Any] = id) -> list[Any]:
    """Returns the names of the members of each group, and of their arrays, which options may change."""
    return [
        (tuple(map(name, group["params"])), optimizer._formula.formula_in(group).arrays_of(group))
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
