"""Recomputation: the part of a call that runs its forward again in backward, in the state of the first run.

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

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from .._base.argument_copies import snapshot
from .._base.tensors import refuse_other_results
from .._base.tree import is_function, replace_arguments, replace_tensors, tensors_of
from .._C import next_node_number
from .block_state import BlockState, unreturned_tensor_error
from .call import BlockCall, Graph, Part, Run
from .host_activations import HostActivations
from .policy import Recompute
from .run_state import ModeSnapshot, trainable_as
from .selective import KeptResults


class Replay(Part):
    """Runs the forward of a call again in its backward: with the same arguments, state and random numbers.

    It keeps the arguments and empty slots for the tensors that autograd saves, which the second run fills.
    """

    packs_saved = True

    def __init__(self, call: BlockCall) -> None:
        self._saved = SavedTensors(call.block)
        self._unchanged = Unchanged(call.block.label)  # arguments
        self._away: list[Any] | None = None  # handles of the offloaded leaves

    # ---- the first run

    def first_run(self, call: BlockCall, run: Run, args: Any, kwargs: dict[str, Any]) -> Any:
        for tensor in tensors_of((*args, *kwargs.values())):
            if call.host is None or not tensor.requires_grad:  # else Offload notes its leaf
                self._unchanged.note(tensor)
        met: dict[int, Any] = {}  # functions among the arguments, and copies of objects
        self._arguments = snapshot((args, kwargs), met) if call.has_state else (args, kwargs)
        self._modes = ModeSnapshot(call.engine.device)
        self._noted = [vars(tensor).copy() for tensor in call.inner]  # attributes, which the run may change
        self._before = call.modules.before_forward([*filter(is_function, met.values())])
        with self._saved.record():
            result = run(args, kwargs)
        self._before.after_forward()
        return result

    def after_forward(self, call: BlockCall, outer: dict[int, torch.Tensor]) -> None:
        host = call.host
        if host is not None and call.outputs:
            self._away = [host.put(tensor) for tensor in call.inner]
            known = dict(zip(map(id, call.inner), call.leaves, strict=True))
            self._arguments = replace_tensors(self._arguments, lambda tensor: known.get(id(tensor), tensor))
            self._saved.put_away(host)

    # ---- the second run

    def before_backward(self, call: BlockCall) -> None:
        self._unchanged.check()

    def graph(self, call: BlockCall, outputs: list[Any], leaves: list[torch.Tensor]) -> Graph:
        """Returns the graph of the first run, whose slots the second run has filled; else the graph of the second."""
        host = call.host
        values = leaves if host is None or self._away is None else map(host.take, self._away)
        fresh = [value.detach().requires_grad_() for value in values]
        for leaf, noted in zip(fresh, self._noted, strict=True):
            vars(leaf).update(noted)
        args, kwargs, result = self._second_run(call, dict(zip(map(id, leaves), fresh, strict=True)))
        if self._saved.is_complete:
            return outputs, leaves
        found = call.outputs_among(result, args, kwargs, fresh, again=True)
        refuse_other_results(call.block.label, outputs, found, fresh)
        return found, fresh

    def _second_run(self, call: BlockCall, fresh: dict[int, torch.Tensor]) -> tuple[Any, Any, Any]:
        """Runs the forward again until all tensors that the first run saved are computed.

        Returns the arguments and the result, which is None if the run stopped early. ``fresh``: new leaves by old ones.
        """
        args, kwargs = snapshot(self._arguments) if call.has_state else self._arguments
        args, kwargs = replace_arguments(args, kwargs, lambda tensor: fresh.get(id(tensor), tensor))
        stops = not self._before.hooks
        with (
            self._modes.restored(),
            self._before.restored(call.block.label),
            trainable_as(call.block, call.trains),
            torch.enable_grad(),
            self._saved.refill(stop_early=stops),
        ):
            try:
                return args, kwargs, self._modes.context().run(call.run_forward, args, kwargs)
            except (_StopForward, Exception):  # TorchScript and forwards may turn the first into others
                if not (stops and self._saved.is_complete):
                    raise
                return args, kwargs, None

    # ---- what is kept between them

    def kept(self) -> Iterator[torch.Tensor]:
        """The tensors kept for the second run."""
        return chain(tensors_of(self._arguments), self._saved.kept_results())

    def drop(self, *, for_good: bool) -> None:
        self._saved.drop(for_good=for_good)


class Unchanged:
    """Tensors that must not be written to before a block's backward."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._versions: list[tuple[torch.Tensor, int]] = []

    def note(self, tensor: torch.Tensor) -> None:
        """Records the version of ``tensor`` for `check()`; inference tensors have none and are skipped."""
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))

    def check(self) -> None:
        """Raises RuntimeError if one of the tensors was written to."""
        for number, (tensor, version) in enumerate(self._versions):
            if tensor._version != version:
                raise RuntimeError(
                    f"{self._label}: tensor argument {number} (shape {tuple(tensor.shape)}) was modified in "
                    f"place after the block's forward started (version {tensor._version}, expected {version}), "
                    "so its forward cannot be run again; pass a copy"
                )


class _StopForward(BaseException):
    """Ends the second run of a forward; a BaseException, so that user code does not catch it."""


_Kept = tuple[torch.Tensor, int]  # what the second run saves, and its version then


class _Slot:
    """Place of a saved tensor, empty between the first and the second run.

    Autograd alone holds it, and lets go of it when its node has run, unless the graph is kept: so the tensors of a
    second run are freed one after the other.
    """

    kept: _Kept | None = None


def _size_of(tensor: torch.Tensor) -> torch.Size | int:
    """Returns its shape; the number of elements if it has none, as the rows that attention of jagged tensors saves."""
    return tensor.numel() if tensor.is_nested and tensor.layout is torch.strided else tensor.shape


class SavedTensors:
    """The tensors that one forward of a block saves for backward.

    Tensors in the gathered buffer are not replaced: they cost nothing between the runs and are valid again once the
    block is gathered.
    """

    def __init__(self, runtime: BlockState) -> None:
        self._label = runtime.label
        self._in_gathered_buffer = runtime.owns_storage
        self._gradients = runtime.engine.gradients
        is_selective = runtime.policy.recompute is Recompute.SELECTIVE
        self._kept = KeptResults(self._in_gathered_buffer) if is_selective else None
        self._saves: list[tuple[torch.Size | int, torch.dtype, int]] = []
        self._slots: list[weakref.ref[_Slot]] = []  # held by autograd
        self._num_filled = 0
        self.differs = self._is_recording = False

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
            self._saves.append((_size_of(tensor), tensor.dtype, next_node_number() - first_node))
            if self._kept:
                self._kept.note_need()
            self._slots.append(weakref.ref(slot := _Slot()))
            return slot

        def unpack(packed: Any) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            if self._is_recording:
                raise RuntimeError(
                    f"{self._label}: its forward calls torch.autograd.grad() or backward(), for which a block that "
                    "recomputes keeps nothing; give it use_checkpoint=False"
                )
            if packed.kept is None:  # backward did not come through the block's results
                raise RuntimeError(unreturned_tensor_error(self._label))
            return self._checked(packed.kept)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @contextmanager
    def refill(self, *, stop_early: bool) -> Iterator[None]:
        """Context manager for the second run; ``stop_early`` raises :class:`_StopForward` when all slots are filled."""
        try:
            with self._refilling_hooks(stop_early), self._kept.giving_out() if self._kept else nullcontext():
                yield
        finally:  # what has been given out is in slots
            if self._kept and not torch._C._autograd._get_current_graph_task_keep_graph():
                self._kept.drop()

    def _refilling_hooks(self, stop_early: bool) -> Any:
        first_node = next_node_number()

        def pack(tensor: torch.Tensor) -> _Kept:
            kept = tensor.detach(), tensor._version
            if self._in_gathered_buffer(tensor):
                return kept
            self._gradients.sum_arrived()  # see [Note: One buffer of gradients] in reduction.h
            index = self._num_filled
            if not (stop_early and 0 < index == len(self._saves) and not self.differs):  # else caught before
                save = (_size_of(tensor), tensor.dtype, next_node_number() - first_node)
                self.differs |= self._saves[index : index + 1] != [save]
                self._num_filled += 1
                if not self.differs and (slot := self._slots[index]()) is not None:
                    slot.kept = kept
            if stop_early and self._num_filled == len(self._saves) and not self.differs:
                raise _StopForward
            return kept

        return torch.autograd.graph.saved_tensors_hooks(pack, self._checked)

    def _checked(self, kept: _Kept) -> torch.Tensor:
        tensor, version = kept
        if tensor._version != version:  # under saved-tensor hooks autograd leaves this check to them
            raise RuntimeError(
                f"{self._label}: a tensor of shape {tuple(tensor.shape)} needed for the gradient was modified by "
                f"an inplace operation in the block's forward (version {tensor._version}, expected {version})"
            )
        return tensor

    @property
    def is_complete(self) -> bool:
        """Whether the first graph can be differentiated."""
        return not self.differs and self._num_filled == len(self._saves)

    def put_away(self, host: HostActivations) -> None:
        """Moves the tensors kept between the two runs to ``host``."""
        if self._kept:
            self._kept.put_away(host)

    def kept_results(self) -> Iterator[torch.Tensor]:
        """The tensors kept between the two runs."""
        return self._kept.tensors() if self._kept else iter(())

    def drop(self, *, for_good: bool) -> None:
        """Frees the second run's tensors; ``for_good`` (no further run) also frees the tensors kept for it."""
        for reference in self._slots:
            if (slot := reference()) is not None:
                slot.kept = None
        self._num_filled = 0
        self.differs = False
        if self._kept and for_good:
            self._kept.drop()
