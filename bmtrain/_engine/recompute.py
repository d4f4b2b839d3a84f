"""Recomputation of a forward in backward, under the state of its first run.

[Note: Early stop]
In the first forward, saved-tensor hooks replace what autograd saves by numbered slots. In backward the forward
runs again under hooks that put each tensor it saves into the slot of the same number, and stops as soon as the
last slot is filled: what follows the last saved tensor (a block's last matrix product) never runs again. Then
the *first* graph is differentiated. If the second run saves other tensors than the first did (scripted
functions may), it is completed instead, and its own graph, which holds its own tensors, is differentiated. Two
saves are the same if shape, dtype and the number of autograd nodes made before them are. Inner modules with
forward hooks see the whole second run: it does not stop early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._C import next_node_number
from .policy import Recompute
from .runtime import BlockRuntime, unreturned_tensor_error
from .selective import KeptResults

if TYPE_CHECKING:
    from .host_activations import HostActivations

__all__ = ["ModuleSnapshot", "ModuleState", "SavedTensors", "StopForward"]

#: Buffers up to this size are copied before each forward; larger ones only once they are known to be updated.
SMALL_BUFFER_BYTES = 1 << 16


class StopForward(BaseException):
    """Ends the second run of a forward; a BaseException, so that user code does not catch it."""


class _Slot:
    """Placeholder of a saved tensor between the first and the second run."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Kept(NamedTuple):
    """A tensor saved by the second run."""

    tensor: torch.Tensor
    version: int


class SavedTensors:
    """The tensors that one forward of a block saves for backward.

    Tensors in the gathered buffer are not replaced: they cost nothing between the runs and are valid again once the
    block is gathered.
    """

    def __init__(self, runtime: BlockRuntime) -> None:
        self._label = runtime.label
        self._in_gathered_buffer = runtime.owns_storage
        is_selective = runtime.policy.recompute is Recompute.SELECTIVE
        self._kept = KeptResults(self._in_gathered_buffer) if is_selective else None
        self._saves: list[tuple[torch.Size, torch.dtype, int]] = []
        self._values: list[_Kept] = []
        self.differs = False
        self._is_recording = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """Context manager for the first run of the forward."""
        self._is_recording = True
        try:
            with self._recording_hooks(), self._kept.recording() if self._kept else nullcontext():
                yield
        finally:
            self._is_recording = False
        if self._kept:
            self._kept.drop_unneeded()

    def _recording_hooks(self) -> Any:
        first_node = next_node_number()

        def pack(tensor: torch.Tensor) -> Any:
            if self._in_gathered_buffer(tensor):
                return tensor
            self._saves.append((tensor.shape, tensor.dtype, next_node_number() - first_node))
            if self._kept:
                self._kept.note_need()
            return _Slot(len(self._saves) - 1)

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            if self._is_recording:
                raise RuntimeError(
                    f"{self._label}: its forward calls torch.autograd.grad() or backward(), for which a block that "
                    "recomputes keeps nothing; give it use_checkpoint=False"
                )
            if not self._values:  # backward did not come through the block's results
                raise RuntimeError(unreturned_tensor_error(self._label))
            return self._checked(self._values[packed.index])

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @contextmanager
    def refill(self, *, stop_early: bool) -> Iterator[None]:
        """Context manager for the second run; ``stop_early`` raises :class:`StopForward` when all slots are filled."""
        with self._refilling_hooks(stop_early), self._kept.giving_out() if self._kept else nullcontext():
            yield

    def _refilling_hooks(self, stop_early: bool) -> Any:
        first_node = next_node_number()

        def pack(tensor: torch.Tensor) -> _Kept:
            kept = _Kept(tensor.detach(), tensor._version)
            if self._in_gathered_buffer(tensor):
                return kept
            index = len(self._values)
            save = (tensor.shape, tensor.dtype, next_node_number() - first_node)
            if index >= len(self._saves) or self._saves[index] != save:
                self.differs = True
            self._values.append(kept)
            if stop_early and index + 1 == len(self._saves) and not self.differs:
                raise StopForward
            return kept

        return torch.autograd.graph.saved_tensors_hooks(pack, self._checked)

    def _checked(self, kept: _Kept) -> torch.Tensor:
        # Under saved-tensor hooks autograd leaves this check to them.
        if kept.tensor._version != kept.version:
            raise RuntimeError(
                f"{self._label}: a tensor of shape {tuple(kept.tensor.shape)} needed for the gradient has been "
                "modified "
                f"by an inplace operation in the block's forward (version {kept.tensor._version}, expected "
                f"{kept.version})"
            )
        return kept.tensor

    @property
    def is_complete(self) -> bool:
        """Whether the first graph can be differentiated."""
        return not self.differs and len(self._values) == len(self._saves)

    def put_away(self, host: HostActivations) -> None:
        """Moves the tensors kept between the two runs to ``host``."""
        if self._kept:
            self._kept.put_away(host)

    def kept_results(self) -> Iterator[torch.Tensor]:
        """The tensors kept between the two runs."""
        return self._kept.tensors() if self._kept else iter(())

    def drop(self, *, for_good: bool) -> None:
        """Frees the second run's tensors; ``for_good`` (no further run) also frees the tensors kept for it."""
        self._values = []
        self.differs = False
        if self._kept and for_good:
            self._kept.drop()


class _Buffer(NamedTuple):
    """A buffer at the start of a forward; ``old`` is a copy, or None if none was made."""

    owner: torch.nn.Module
    name: str
    tensor: torch.Tensor
    version: int
    old: torch.Tensor | None


class ModuleState:
    """State of modules that may change between two runs of a forward: training flags, and buffers it updates.

    Small buffers are copied before each forward, and a second run gets the copies, updated or not: batch norm and
    writes through `.data` count no version, and on a GPU a comparison would make the host wait. Copying large buffers
    (tables of positions, masks) each time would be slow: they are copied before the first forward only, which shows
    whether it updates them.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root
        self._modules: list[torch.nn.Module] = [root]
        self._children: list[torch.nn.Module | None] = [None]
        self._large: set[tuple[int, str]] | None = None  # known to be updated; None before the first forward

    def _walk(self) -> list[torch.nn.Module]:
        children: list[torch.nn.Module | None] = []
        for module in self._modules:
            children += module._modules.values()  # a comprehension costs a call of its own before Python 3.12
        if children != self._children:
            self._modules = list(self.root.modules())
            self._children = [child for module in self._modules for child in module._modules.values()]
        return self._modules

    def has_forward_hooks(self) -> bool:
        """Whether an inner module has forward hooks."""
        hooks = torch.nn.modules.module
        return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks) or any(
            module._forward_hooks or module._forward_pre_hooks for module in self._walk()
        )

    def has_own_forward_hooks(self) -> bool:
        """Whether one of the modules has a forward hook that receives its result."""
        for module in self._walk():  # noqa: SIM110 (a generator costs as much again, for each module)
            if module._forward_hooks:
                return True
        return False

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yields all buffers of the modules."""
        for module in self._walk():
            yield from (buffer for buffer in module._buffers.values() if buffer is not None)

    def before_forward(self) -> ModuleSnapshot:
        """Takes a snapshot; :meth:`ModuleSnapshot.after_forward` must be called when the forward has run."""
        modules = self._walk()
        buffers = []
        copies: dict[int, torch.Tensor] = {}  # one of each tensor, as modules may share it
        for owner in modules:
            for name, tensor in owner._buffers.items():
                if tensor is not None:
                    copied = (
                        tensor.nbytes <= SMALL_BUFFER_BYTES
                        or self._large is None
                        or (id(owner), name) in self._large
                    )
                    if copied and id(tensor) not in copies:
                        copies[id(tensor)] = tensor.clone()
                    buffers.append(_Buffer(owner, name, tensor, tensor._version, copies.get(id(tensor))))
        return ModuleSnapshot(self, modules, [module.training for module in modules], buffers)

    def learn(self, updated: list[_Buffer]) -> None:
        """Records the large buffers that a forward updated."""
        known = self._large or set()
        known.update((id(b.owner), b.name) for b in updated if b.tensor.nbytes > SMALL_BUFFER_BYTES)
        self._large = known


class ModuleSnapshot:
    """Training flags and buffers at the start of one forward."""

    def __init__(
        self,
        state: ModuleState,
        modules: list[torch.nn.Module],
        training: list[bool],
        buffers: list[_Buffer],
    ) -> None:
        self._state = state
        self._modules = modules
        self._training = training
        self._buffers = buffers

    def after_forward(self) -> None:
        """Keeps old values only of the buffers that the forward updated or may have updated."""
        self._buffers = [buffer for buffer in self._buffers if _may_be_updated(buffer)]
        self._state.learn(self._buffers)

    @contextmanager
    def restored(self, label: str) -> Iterator[None]:
        """Context manager with the old flags and (new tensors of) the old values; the current ones are put back."""
        flipped = [
            module
            for module, flag in zip(self._modules, self._training, strict=True)
            if module.training is not flag
        ]
        values: dict[int, torch.Tensor] = {}
        for noted in self._buffers:
            if id(noted.tensor) not in values:
                values[id(noted.tensor)] = _old_value(noted, label)
        old = [(noted.owner, noted.name, values[id(noted.tensor)]) for noted in self._buffers]
        current = [(owner, name, owner._buffers.get(name)) for owner, name, _ in old]
        for module in flipped:
            module.__dict__["training"] = not module.training
        for owner, name, value in old:
            owner._buffers[name] = value
        try:
            yield
        finally:
            for module in flipped:
                module.__dict__["training"] = not module.training
            for owner, name, buffer in current:
                owner._buffers[name] = buffer


def _may_be_updated(buffer: _Buffer) -> bool:
    if (
        buffer.tensor._version != buffer.version
        or buffer.owner._buffers.get(buffer.name) is not buffer.tensor
    ):
        return True
    if buffer.old is None:
        return False
    if buffer.tensor.nbytes <= SMALL_BUFFER_BYTES and buffer.old.stride() == buffer.tensor.stride():
        return True
    # A copy with other strides (of an expanded tensor) could make a kernel round differently.
    return not torch.equal(buffer.old, buffer.tensor)


def _old_value(buffer: _Buffer, label: str) -> torch.Tensor:
    if buffer.old is None and buffer.tensor._version == buffer.version:
        return buffer.tensor.clone()  # replaced, not written to
    if buffer.old is None:
        raise RuntimeError(
            f"{label}: the forward updated its buffer {buffer.name!r} (shape {tuple(buffer.tensor.shape)}), "
            "which earlier "
            "forwards left alone, so that there is no copy to run it again with; build the Block with "
            "use_checkpoint=False, or repeat the step"
        )
    return buffer.old.clone()
