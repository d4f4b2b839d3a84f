"""State on a drive, which passes through a few buffers in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from ..._base.tensors import data_of
from ..._C import lead_graphs_to
from ..._engine.block_state import BlockState
from ..._engine.disk_block import DiskBlockState
from ..._engine.disk_shard import StoredShard
from ..._engine.disk_tier import SealedArray, tier_of
from ..._engine.drives import Drives
from ..._engine.engine import current_engine
from ..._engine.pending import PendingUpdates
from ..._ranks.agree import failing_together
from ..._ranks.context import Context
from ..._shards.at_rest import stored_shard_of, wants_disk
from ...errors import DiskError
from .._arrays import MASTER
from .._owners import is_here
from .._updates import Update
from ..formulas import Formula, Part
from .disk_arena import IN_FILE, Arena, Arrays, Chunk, Home, Stream
from .disk_later import Background, DiskUpdate, PendingDiskUpdate
from .disk_whole import pass_whole
from .overlap.references import ArenaReferences, is_unwatched
from .place import Groups, Place, States, zero_gradient
from .ranges import split


class OnDisk(Place):
    """A drive, for parameters of Blocks with such a policy; the state of others is where another place has it.

    [Note: A step of state on a drive]
    Arrays of neighbouring parameters are cut into chunks. While one chunk is computed, by the other place and in
    memory, the next ones are read and those before are written, so that a step takes as long as the slower of
    computation and drive. Every chunk is read once and written once.

    Outside a step the tensors of the state are mappings of the file, with the page cache as memory: reading the state
    reads the file. The file is checked before the optimizer's ``state`` is handed out; as its reader may write to
    it, the next step takes the chunks as they are then.

    Where a formula takes whole matrices, the arrays of a buffer with matrices pass as a whole
    (`disk_whole.pass_whole`), in the same order on all ranks; the state of its other parameters is in memory.

    The chunks pass behind the caller's back, see [Note: Updates on drives that overlap].

    Args:
        inner: the place of the other parameters, which also computes.
        context: of this process.
        formula_of: returns the formula of a parameter.
    """

    def __init__(self, inner: Place, context: Context, formula_of: Callable[[Tensor], Formula]) -> None:
        super().__init__(inner._formula, state_dtype=inner.state_dtype)
        self._inner = inner
        self._context = context
        self._formula_of: Any = WeakMethod(formula_of)
        self._homes: dict[Tensor, Home] = {}
        self._stream: Stream | None = None
        self._background: Background | None = None
        self._pending = PendingUpdates()
        self._references = ArenaReferences()
        self._is_used = False  # by any rank

    def __getattr__(self, name: str) -> Any:
        """Returns a setting of the other place."""
        return getattr(self.__dict__["_inner"], name)

    @property
    def settings(self) -> tuple[str, ...]:  # type: ignore[override]
        """The arguments of the other place: a copy of the optimizer detects state on a drive itself."""
        return self._inner.settings

    # ---- state

    def has_master(self, p: Tensor) -> bool:
        return self._inner.has_master(p)

    def shares_master(self, p: Tensor) -> bool:
        return self._inner.shares_master(p)

    def device_of(self, p: Tensor) -> torch.device:
        return self._inner.device_of(p)

    def dtype_of(self, p: Tensor) -> torch.dtype:
        return self._inner.dtype_of(p)

    def is_on_disk(self, p: Tensor) -> bool:
        return p in self._homes and bool(self._homes[p].tensors)

    @property
    def disk_buffer_bytes(self) -> int:  # type: ignore[override]
        return 0 if self._stream is None else self._stream.nbytes

    def reserve(self, parameters: Sequence[Tensor]) -> None:
        """Reserves the space of new parameters on all ranks. Collective.

        Raises:
            DiskError: a drive has no room.
            ValueError: the state cannot be on a drive.
        """
        self._is_used |= any(map(wants_disk, parameters))
        with failing_together("reserving space for optimizer state"):
            wanted = [p for p in parameters if p.requires_grad and self._wants(p)]
            for p in wanted:
                self._check(p)
            self._make_arenas(wanted)

    def _check(self, p: Tensor) -> None:
        where = "BlockPolicy(optimizer='disk')"
        if self.dtype_of(p) is torch.uint8:
            raise ValueError(f"{where}: expected state_dtype float32 or bfloat16, got int8")

    def _wants(self, p: Tensor) -> bool:
        """Whether ``p`` belongs on a drive, and this rank has elements of it or takes part in its update."""
        return wants_disk(p) and (p.numel() > 0 or (is_here(p) and self._formula_of()(p).is_whole))

    def _make_arenas(self, parameters: Iterable[Any]) -> None:
        pairs = [(p, self._formula_of()(p)) for p in parameters]
        for p, formula in sorted(pairs, key=lambda pair: not pair[1].is_whole):
            arrays = [(name, self.dtype_of(p)) for name in formula.arrays]
            if self.has_master(p) and not self.shares_master(p):
                arrays.append((MASTER, torch.float32))
            self._homes[p] = self._arena_of(p, arrays, formula.is_whole).add(p, formula.is_whole)

    def _arena_of(self, p: Any, arrays: Arrays, is_whole: bool) -> Arena:
        """Returns the arena of the flat buffer of ``p``, which other parameters of it may have already."""
        runtime = p._block.runtime()
        buffer = next(b for b in runtime.buffers if any(member is p for member in b.parameters))
        known = [home for member in buffer.parameters if (home := self._homes.get(member)) is not None]
        arenas = [home.arena for home in known if home.arena.buffer is buffer]
        for arena in arenas:
            if arena.is_whole or (arena.arrays == tuple(arrays) and not is_whole):
                return arena
        made = Arena(self._drives, arrays, buffer, stored_shard_of(p), is_whole)
        for arena in arenas if is_whole else ():  # made for groups before; their tensors stay
            for member in arena.homes:
                self._homes[member] = made.add(member, False)
        return made

    def allocate(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> list[list[Tensor]]:
        # Reserved already, unless the parameter has changed since.
        self._make_arenas(
            p
            for p in parameters
            if not (p in self._homes and self._homes[p].fits(p, names, dtypes)) and self._wants(p)
        )
        mine = {p for p in parameters if self.is_on_disk(p)}
        others = [p for p in parameters if p not in mine]
        in_memory = iter(zip(*self._inner.allocate(others, names, dtypes, device), strict=True))
        rows = [self._homes[p].zeroed(names) if p in mine else next(in_memory) for p in parameters]
        return [list(array) for array in zip(*rows, strict=True)]

    def note_new_state(self, parameters: Sequence[Tensor], names: Sequence[str], states: States) -> None:
        self._inner.note_new_state([p for p in parameters if not self.is_on_disk(p)], names, states)
        self._references.note([p for p in parameters if self.is_on_disk(p)], names, states)

    def note_write(self, p: Tensor) -> None:
        if self.is_on_disk(p):
            self._homes[p].unseal()

    def note_new_group(self) -> None:
        self._inner.note_new_group()

    def show_state(self) -> None:
        self._inner.show_state()
        self.finish()
        for arena in self._arenas():
            self._show(arena)

    def _show(self, arena: Arena) -> None:
        if arena.is_sealed:
            if arena.is_whole:
                pass_whole(tier_of(current_engine(self._context)), arena.chunks(), None)
            else:
                self._passage().check(arena)
            arena.file.unseal(0, arena.file.nbytes)
            arena.is_sealed = False

    @contextmanager
    def lending(self) -> Iterator[list[SealedArray]]:
        """Context manager in which the state is handed out without a comparison of the arrays that it returns.

        The caller clones these, or compares them before it reads them, and does not write to them.
        """
        self.finish()
        lent: dict[Arena, list[SealedArray]] = {}
        for arena in self._arenas() if self._drives.failure is None else []:
            if arena.is_sealed and (arrays := arena.sealed(partial(self._show, arena))):
                lent[arena] = arrays
                arena.is_sealed = False
        try:
            yield [array for arrays in lent.values() for array in arrays]
        finally:
            for arena in lent:
                arena.is_sealed = True

    @property
    def _drives(self) -> Drives:
        drives = current_engine(self._context).drives
        assert drives is not None
        return drives

    def _arenas(self) -> list[Arena]:
        return list({id(home.arena): home.arena for home in self._homes.values()}.values())

    def _passage(self) -> Stream:
        num_arrays = max(
            len(arena.dtypes) + 2 * (arena.stored is not None)  # and parameters and gradients
            for arena in self._arenas()
            if not arena.is_whole
        )
        if self._stream is None or self._stream.num_arrays < num_arrays:
            if self._background is not None:
                self._background.finish()
            self._stream = Stream(num_arrays, self._drives)
        return self._stream

    # ---- a step

    def start_step(self, groups: Groups, states: States) -> None:
        with suppress(DiskError):  # which `apply` raises, on all ranks
            self.finish()
        self._inner.start_step(groups, states)
        moved = [p for p in states if p in self._homes and wants_disk(p) and not self._homes[p].is_of(p)]
        if moved:  # on all ranks alike
            with failing_together("optimizer state on disk"):
                self.show_state()
        self._make_arenas([*moved, *(p for p in states if p not in self._homes and self._wants(p))])

    def begin_updates(self, parameters: Sequence[Tensor], *, is_early: bool) -> None:
        self._inner.begin_updates(parameters, is_early=is_early)
        tier = current_engine(self._context).tier
        if tier is not None and not is_early:
            tier.settle()
        members: Iterable[Any] = parameters
        references = [getattr(p, "_block", None) for p in members]
        # Early, a rank decides by itself.
        with nullcontext() if is_early else failing_together("parameters and gradients on disk"):
            for block in {reference.runtime() for reference in references if reference is not None}:
                if isinstance(block, DiskBlockState):
                    block.begin_update(is_early=is_early)
            if not is_early:
                self._drives.check()

    def apply(self, parts: list[Part], states: States, *, is_early: bool) -> None:
        mine, others = split(parts, lambda _, u: self._moves(u.param))
        engine, drives = current_engine(self._context), self._drives
        if not is_early:
            engine.lagging_steps += self._is_used
        self._inner.apply(list(others), states, is_early=is_early)
        self.owner_bytes = self._inner.owner_bytes
        try:
            if drives.failure is None:
                whole, cut = split(mine, lambda _, u: self._homes[u.param].arena.is_whole)
                if chunks := self._chunks_of(whole):
                    pass_whole(tier_of(engine), chunks, self._compute)
                    for stored in {chunk.arena.stored for chunk in chunks}:
                        if stored is not None:
                            stored.note_written()
                if cut:
                    self._post(cut, states, is_early=is_early)
                elif self._background is not None:
                    self._background.queue_ready()
        except DiskError as error:
            drives.note(error)
        if not is_early:
            with failing_together("optimizer state on disk"):
                drives.check()

    def _post(self, parts: Sequence[Part], states: States, *, is_early: bool) -> None:
        """Queues the updates of each block."""
        if self._background is None:
            self._background = Background(self._drives)
        by_block: dict[BlockState, list[Part]] = {}
        for part in parts:
            of_part: dict[BlockState, list[Update]] = {}
            for update in part.updates:
                of_part.setdefault(update.param._block.runtime(), []).append(update)  # type: ignore[attr-defined]
            for block, members in of_part.items():
                by_block.setdefault(block, []).append(part._replace(updates=members))
        posted, at_once = [], []
        for block, of_block in by_block.items():
            for earlier in tuple(block.pending):  # its chunks may be ours
                earlier.finish_together()
            members = [update for part in of_block for update in part.updates]
            parameters = [update.param for update in members]
            arenas = {self._homes[p].arena for p in parameters}
            stored = [arena.stored for arena in arenas if arena.stored is not None]
            made = DiskUpdate(self._background, block, stored, partial(self._chunks_of, of_block))
            if (
                (made.is_ready or is_early)
                and is_unwatched(members, block, states, self._references)
                and not lead_graphs_to(parameters)
            ):
                if is_early:
                    made.take(set(parameters))
                posted.append(PendingDiskUpdate(made, parameters, block, self._zero))
            else:
                at_once.append(made)
            for shard in stored:
                if not shard.is_taken:
                    shard.decline()
            for arena in arenas:
                arena.is_sealed = True
        updates = [*at_once, *(pending.update for pending in posted)]
        self._background.post(updates, self._passage(), self._compute)
        self._pending.add(posted)
        for made in at_once:
            made.wait()
        self._background.limit_taken()

    def _moves(self, p: Tensor) -> bool:
        """Whether an update of ``p`` moves bytes of a drive."""
        return self.is_on_disk(p) or (p in self._homes and self._homes[p].arena.stored is not None)

    def _compute(self, pieces: list[Part]) -> None:
        self._inner.apply(pieces, {}, is_early=True)
        self.owner_bytes = max(self.owner_bytes, self._inner.owner_bytes)

    def _chunks_of(self, parts: Sequence[Part]) -> list[Chunk]:
        """Returns the chunks of updates, first of matrices, in an order that all ranks have alike."""
        chunks: dict[tuple[int, int], Chunk] = {}
        for part in sorted(parts, key=lambda part: not part.formula.is_whole):
            for update in part.updates:
                home, data = self._homes[update.param], data_of(update.param).view(-1)
                home.take_foreign(update.state)
                flat = update._replace(param=data, grad=_gradient(update, home), source=update.param)
                for number in home.chunk_numbers():
                    key = (id(home.arena), number)
                    if key not in chunks:
                        chunks[key] = Chunk(home.arena, number)
                    chunks[key].pieces.append((part, flat, home))
        return list(chunks.values())

    def finish(self) -> None:
        self._inner.finish()
        try:
            self._pending.finish()
        finally:
            if self._background is not None:
                self._background.finish()

    def zero_grad(self, parameters: Sequence[Tensor], set_to_none: bool) -> bool:
        pending = [update for update in self._pending if not update.is_finished]
        if not pending:
            return self._zero_now(parameters, set_to_none)
        later = {id(p): p for update in pending for p in update.parameters}
        if set_to_none:
            with torch._C.DisableTorchFunctionSubclass():  # so that nothing waits here
                for p in later.values():
                    p.grad = None
        else:
            for update in pending:
                update.zero_gradients_afterwards()
        self._zero([p for p in parameters if id(p) not in later], set_to_none)
        return True

    def _zero(self, parameters: Sequence[Tensor], set_to_none: bool = False) -> None:
        """Fills gradients with zeros, or sets them to None."""
        if not self._zero_now(parameters, set_to_none):
            for p in parameters:
                zero_gradient(p, set_to_none)

    def _zero_now(self, parameters: Sequence[Tensor], set_to_none: bool) -> bool:
        shards = {} if set_to_none else self._gradient_shards(parameters)
        if not shards:
            return self._inner.zero_grad(parameters, set_to_none)
        zeroed = {p for shard, members in shards.items() if shard.zero_gradients(members) for p in members}
        for p in parameters:
            if p not in zeroed:
                zero_gradient(p, False)
        return True

    def _gradient_shards(self, parameters: Sequence[Tensor]) -> dict[StoredShard, list[Tensor]]:
        """Returns the shards of gradients on a drive, each with the parameters whose gradients it holds."""
        shards: dict[StoredShard, list[Tensor]] = {}
        for p in parameters:
            home = self._homes.get(p) if p.numel() else None
            if home is not None and home.arena.stored is not None and home.arena.stored.gradients:
                shards.setdefault(home.arena.stored, []).append(p)
        return shards


def _gradient(update: Update, home: Home) -> Tensor:
    """Returns the flat gradient, or `IN_FILE`."""
    stored = home.arena.stored
    if stored is None or stored.gradients is None or stored.gradients.memory is not None:
        return update.grad.reshape(-1)
    if not stored.holds_gradient_of(update.param):
        return update.grad.reshape(-1)
    stored.note_gradient_changes()
    return IN_FILE
