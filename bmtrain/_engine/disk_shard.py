"""The shards of one flat buffer that are on a drive."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._base.tensors import gradient_of
from .._C import ShardedBuffer, lend
from .._ranks.agree import failing_together
from .._shards.at_rest import finish_update, stored_shard_of
from ..errors import DiskError
from .disk_tier import AHEAD, DiskTier, SealedArray, StoredArray, aligned, sealed


class StoredShard:
    """The parameters, gradients or both of a buffer, in a file of their own.

    Args:
        tier: moves them.
        label: of the block, for messages.
        buffer: whose shards they are.
        parameters: whether its parameters are on the drive.
        gradients: whether its gradients are.

    Raises:
        DiskError: the drive has no room.
    """

    #: Memory of a device that a copy of gradients refers to, see `SentAhead`: none.
    storages: Sequence[int] = ()

    def __init__(
        self, tier: DiskTier, label: str, buffer: ShardedBuffer, *, parameters: bool, gradients: bool
    ) -> None:
        self.tier = tier
        self.label = label
        self.buffer = buffer
        self.members: Sequence[Any] = buffer.parameters
        shard = buffer.shard

        def put_gradient(memory: Tensor) -> None:  # not a method, which would keep this object, and its file
            if buffer.gradient_shard is not None:
                lend(buffer.gradient_shard, memory)

        nbytes = shard.numel() * shard.element_size()
        file = tier.drives.reserve(aligned(nbytes) * (parameters + gradients))
        self.parameters: StoredArray | None = None
        self.gradients: StoredArray | None = None
        if parameters:
            self.parameters = StoredArray(
                tier, file, 0, nbytes, f"parameters of {label}", lambda memory: lend(buffer.shard, memory)
            )
            lend(shard, self.parameters.mapping)
        if gradients:
            offset = aligned(nbytes) * parameters
            self.gradients = StoredArray(tier, file, offset, nbytes, f"gradients of {label}", put_gradient)
        self._sealed: Any = None  # mark of the parameters whose checksums are known
        self._fetched: Any = None  # when they were read
        self._sealed_gradients: Any = ()  # mark of those whose checksums are known; None: others may write to them
        self._is_due = False  # whether gradients are in memory only
        self._consumed: dict[int, int] = {}  # versions of gradients that an update has used, by id
        #: Whether parameters stay in memory after a call, for an update inside the backward, and it has them.
        self.waits_for_update = self.is_taken = False
        self._is_checked = True  # whether the parameters at rest were compared since they were written
        for member in self.members:
            member._stored = weakref.ref(self)  # type: ignore[attr-defined]

    @property
    def nbytes(self) -> int:
        """Bytes on the drive."""
        return sum(array.nbytes for array in (self.parameters, self.gradients) if array is not None)

    def finish_updates(self) -> None:
        """Waits for pending updates, which the files get."""
        for member in self.members:
            finish_update(member)

    # ---- parameters

    def _mark(self) -> tuple[int, int, int]:
        """Returns a mark that changes with each possible write to the parameters."""
        block = self.members[0]._block
        through_data = None if block is None else block._data_version
        return (
            self.buffer.version(),
            sum(p._unversioned_writes for p in self.members),
            0 if through_data is None else through_data.value,
        )

    def note_changes(self) -> None:
        """Called before parameters are read: checksums of others than the present values are dropped."""
        mark, array = self._mark(), self.parameters
        if array is not None and mark != self._sealed:
            array.unseal()
            if not array.is_in_use:
                array.rest()  # a read that met the change ends here, and seals what it read
                array.unseal()
            self._sealed = mark

    def note_written(self) -> None:
        """Called after the parameters were written, and sealed."""
        self._sealed = self._mark()
        self._is_checked = self.parameters is None

    def show_parameters(self) -> None:
        """Called before others read or write parameters at rest: compares their bytes, once after each write.

        Raises:
            DiskError: they differ from the written ones, or cannot be read.
        """
        self.finish_updates()
        if not self._is_checked and self.buffer.state == ShardedBuffer.State.SHARDED:
            assert self.parameters is not None
            self.note_changes()
            self.parameters.check()
            self._is_checked = True

    def sealed_parameters(self) -> list[SealedArray]:
        """Returns the parameters, if they are at rest with known checksums: to be cloned, or compared and read."""
        self.finish_updates()
        array = self.parameters
        if array is None or array.is_in_use or self.tier.drives.failure is not None:
            return []
        self.note_changes()
        return sealed(array.file, array.offset, array.mapping, self.show_parameters)

    def fetch_parameters(self) -> None:
        """Starts to read the parameters, unless they are in memory and unchanged."""
        array = self.parameters
        if array is None or array.is_in_use:
            return
        self.note_changes()
        self._fetched = self._sealed
        array.fetch()

    def rest_parameters(self) -> None:
        """Frees the memory of the parameters; writes to them there are kept."""
        array = self.parameters
        if array is None or array.memory is None:
            return
        is_changed = array.is_in_use and self._mark() != self._fetched
        if self.is_taken or (self.waits_for_update and array.is_in_use and not is_changed):
            return
        if is_changed:
            array.send()
        array.rest()
        if is_changed:
            self.note_written()

    def follow_shard(self) -> None:
        """Called after users have put other tensors in the parameters' places."""
        array, shard = self.parameters, self.buffer.shard
        if array is None:
            return
        here = array.memory if array.is_in_use else array.mapping
        if here is None:
            return
        if shard.data_ptr() == here.data_ptr():  # their values were copied there, perhaps after a read ahead
            self._sealed = self._fetched = None
        elif (new := self._leave(array)) is not None:
            new[: shard.numel() * shard.element_size()].copy_(shard.view(torch.uint8))
            lend(shard, new)

    def _leave(self, array: StoredArray) -> Tensor | None:
        """See :meth:`StoredArray.leave`; all ranks raise a failure before the next gather."""
        try:
            return array.leave()
        except DiskError as error:
            self.tier.drives.note(DiskError(f"{array.label}: {error}"))
            return None

    # ---- gradients

    def holds_gradient_of(self, p: Tensor) -> bool:
        """Whether the gradient of ``p`` is in the gradient shard, and that on the drive."""
        gradient, flat = _present_gradient(p), self.buffer.gradient_shard
        return (
            self.gradients is not None
            and gradient is not None
            and flat is not None
            and gradient.untyped_storage()._cdata == flat.untyped_storage()._cdata
        )

    def _gradient_mark(self) -> tuple[int | None, ...]:
        gradients = map(_present_gradient, self.members)
        return tuple(None if g is None else g._version for g in gradients)

    def begin_gradients(self) -> None:
        """Prepares memory for the reduction, with the gradients that it adds to."""
        array = self.gradients
        if array is None:
            return
        if self.buffer.gradient_shard is not None:
            self.rest_gradients()
            self.tier.note_return(self)
            self.fetch_gradients()
            array.arrive()
        elif array.memory is None:
            if array.is_held:  # a user keeps gradients of before
                self._leave(array)
            array.take()
            assert array.memory is not None
            self.buffer.use_gradient_memory(array.memory)
        self._is_due = True
        self._consumed.clear()

    def fetch_gradients(self) -> None:
        """Starts to read the gradients, unless they are in memory."""
        assert self.gradients is not None
        self.require_gradients()
        self.note_gradient_changes()
        self.gradients.fetch()

    def note_gradient_changes(self) -> None:
        """Called before gradients are read: checksums are dropped if users may have written to them."""
        if self._gradient_mark() != self._sealed_gradients:
            assert self.gradients is not None
            self.gradients.unseal()
            self.seal_gradients()

    def deliver_gradients(self) -> None:
        """Starts to write the gradients of a reduction, unless an update has taken or will read them."""
        if self._is_due:
            self.send_gradients()

    def send_gradients(self) -> None:
        """Starts to write the gradients, which are complete."""
        array, flat = self.gradients, self.buffer.gradient_shard
        self._is_due = False
        if array is not None and array.memory is not None:
            if flat is not None and flat.data_ptr() != array.memory.data_ptr():  # a user keeps some of before
                array.is_in_use = True
                new = array.leave()
                new[: flat.numel() * flat.element_size()].copy_(flat.view(torch.uint8))
                lend(flat, new)
            array.send()
            self.seal_gradients()
            self.tier.note_leaving(self)

    def rest_gradients(self) -> None:
        """Frees the memory of the gradients; writes to them there since they were sent are kept."""
        array = self.gradients
        assert array is not None
        if array.is_in_use and self._gradient_mark() != self._sealed_gradients:
            array.wait()
            array.send()
        array.rest()

    def seal_gradients(self) -> None:
        """Called when the file has the present gradients."""
        self._sealed_gradients = self._gradient_mark()
        for p in self.members:
            p._sent = self if self.holds_gradient_of(p) else None

    def show_gradients(self) -> None:
        """As `show_parameters`, before others read gradients."""
        array, is_shown = self.gradients, self._sealed_gradients is None
        self.require_gradients()
        if not (is_shown or array is None or array.memory is not None or self.buffer.gradient_shard is None):
            self.note_gradient_changes()
            array.check()
            self._sealed_gradients = None

    def drop(self) -> None:
        """A user reads ``.grad``, and may write to it. See `DistributedParameter.grad`."""
        self._sealed_gradients = None

    # ---- updates inside a backward

    def may_be_taken(self, parameters: Container[Tensor]) -> bool:
        """Whether an update of ``parameters``, of which it has all gradients, can read these in memory."""
        flat, array = self.buffer.gradient_shard, self.gradients
        return all(p in parameters for p in self.members if p.numel()) and (
            array is None
            or (
                self._is_due
                and array.memory is not None
                and flat is not None
                and flat.data_ptr() == array.memory.data_ptr()  # else a user keeps some of before
            )
        )

    def take(self) -> None:
        """Leaves gradients, and parameters that are in memory, to an update, their last reader, until `give_back`.

        The gradients are not written to the drive.
        """
        self.is_taken, self._is_due = True, False
        if self.gradients is not None:
            self.seal_gradients()
            marks = zip(self.members, self._gradient_mark(), strict=True)
            self._consumed = {id(p): mark for p, mark in marks if mark is not None}

    @property
    def lacks_gradients(self) -> bool:
        """Whether an update has consumed gradients that no code has written since: there is no copy of them."""
        found = ((self._consumed.get(id(p)), _present_gradient(p)) for p in self.members if self._consumed)
        return any(gradient is not None and version == gradient._version for version, gradient in found)

    def require_gradients(self) -> None:
        """Called before gradients are read, or added to.

        Raises:
            RuntimeError: an update has consumed some.
        """
        if self.lacks_gradients:
            raise RuntimeError(
                f"gradients of {self.label}: the update inside the last backward (step_in_backward=True) has used "
                "them, and a drive does not keep them; call zero_grad() before the next backward and step, and for a "
                "script that reads .grad keep gradients in memory: BlockPolicy(gradients='device')"
            )

    def note_replaced_gradient(self, p: Tensor) -> None:
        """Called when a script assigns to ``.grad``."""
        self._consumed.pop(id(p), None)

    def give_back(self) -> None:
        """Frees the memory; the drive has the updated parameters."""
        self.is_taken, self._fetched = False, self._mark()
        if self.gradients is not None:
            self.gradients.rest()
        self.stop_waiting()

    def decline(self) -> None:
        """Called when an update inside the backward reads the files, although parameters are in memory."""
        self._fetched = self._mark()  # which counts the update already
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Called when no update inside the backward can take the parameters any more."""
        self.waits_for_update = False
        if self.buffer.state == ShardedBuffer.State.SHARDED:
            self.rest_parameters()

    def zero_gradients(self, wanted: Sequence[Tensor]) -> bool:
        """Makes gradients at rest zeros, if these are all the gradients in the shard; returns whether it did."""
        array, chosen = self.gradients, set(map(id, wanted))
        found = [p for p in self.members if p.numel() and gradient_of(p) is not None]
        if array is None or array.memory is not None or not found:
            return False
        if not all(id(p) in chosen and self.holds_gradient_of(p) for p in found):
            return False
        array.zero()
        self.seal_gradients()
        self._consumed.clear()
        return True


def _present_gradient(p: Tensor) -> Tensor | None:
    """Returns the gradient, to be identified: its values are not read, so a pending update may continue."""
    with torch._C.DisableTorchFunctionSubclass():
        return gradient_of(p)


def _gradient_home(p: Tensor) -> StoredShard | None:
    stored: StoredShard | None = stored_shard_of(p)
    return stored if stored is not None and stored.holds_gradient_of(p) else None


def any_on_disk(parameters: Iterable[Tensor]) -> bool:
    """Whether any of the parameters, or its gradients, live on a drive of some rank; the same on all ranks."""
    return any(getattr(p, "_stored", None) is not None for p in parameters)


def reading_gradients(parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Context manager in which gradients are read; all ranks fail if one does. Collective if any is on a drive."""
    return failing_together("gradients on disk") if any_on_disk(parameters) else nullcontext()


def gradients_in_memory(parameters: Iterable[Tensor], *, changes: bool = False) -> Iterator[list[Tensor]]:
    """Yields ``parameters`` in order, in runs whose gradients are in memory until the next one.

    Args:
        parameters: the parameters.
        changes: whether the caller writes to the gradients.

    Raises:
        DiskError: gradients cannot be read.
        RuntimeError: an update has consumed them.
    """
    runs: list[tuple[StoredShard | None, list[Tensor]]] = []
    for p in parameters:
        home = _gradient_home(p)
        if not runs or runs[-1][0] is not home:
            runs.append((home, []))
        runs[-1][1].append(p)
    for number, (stored, members) in enumerate(runs):
        if stored is None:
            yield members
            continue
        stored.finish_updates()
        for ahead, _ in runs[number : number + AHEAD + 1]:
            if ahead is not None:
                ahead.fetch_gradients()
        assert stored.gradients is not None
        stored.gradients.arrive()
        stored.tier.drives.check()
        yield members
        if changes:
            stored.send_gradients()
        else:
            stored.rest_gradients()
    for stored, _ in runs:
        if stored is not None:
            stored.tier.settle()
