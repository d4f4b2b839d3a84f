"""Running a forward again in backward, exactly as it ran the first time.

[Note: Early stop]
In the first forward, saved-tensor hooks replace what autograd saves by numbered slots. In backward the forward runs
again under hooks that put each tensor it saves into the slot of the same number, and stops as soon as the last slot
is filled: what follows the last saved tensor (a block's last matrix product) never runs again. Then the *first* graph
is differentiated. If the second run saves other tensors than the first did (scripted functions may), it is completed
instead, and its own graph, which holds its own tensors, is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .runtime import BlockRuntime

__all__ = ["BufferGuard", "ModeSnapshot", "SavedTensors", "StopForward"]


class StopForward(BaseException):
    """Ends the second run of a forward; not an Exception, so that user code does not catch it."""


class _Slot:
    """Stands in for a saved tensor between the first and the second run."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class SavedTensors:
    """The tensors that one forward of a block saves for backward.

    Tensors in the gathered buffer are not replaced: they cost nothing between the runs and are valid again once the
    block is gathered.
    """

    def __init__(self, runtime: BlockRuntime) -> None:
        self._groups = runtime.groups
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._values: list[torch.Tensor] = []
        self.differs = False

    def _in_gathered_buffer(self, tensor: torch.Tensor) -> bool:
        return any(group.owns_storage(tensor) for group in self._groups)

    def record(self) -> Any:
        """The hooks for the first run."""

        def pack(tensor: torch.Tensor) -> Any:
            if self._in_gathered_buffer(tensor):
                return tensor
            self._shapes.append((tensor.shape, tensor.dtype))
            return _Slot(len(self._shapes) - 1)

        return torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        value: torch.Tensor = self._values[packed.index]
        return value

    def refill(self) -> Any:
        """The hooks for the second run; they raise :class:`StopForward` when everything is there."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            kept = tensor.detach()
            if self._in_gathered_buffer(tensor):
                return kept
            index = len(self._values)
            if index >= len(self._shapes) or self._shapes[index] != (tensor.shape, tensor.dtype):
                self.differs = True
            self._values.append(kept)
            if index + 1 == len(self._shapes) and not self.differs:
                raise StopForward
            return kept

        def unpack(kept: torch.Tensor) -> torch.Tensor:
            return kept

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    @property
    def is_empty(self) -> bool:
        return not self._shapes

    @property
    def is_complete(self) -> bool:
        """Whether the first graph can be differentiated."""
        return not self.differs and len(self._values) == len(self._shapes)

    def drop(self) -> None:
        """Frees the second run's tensors."""
        self._values = []
        self.differs = False


class ModeSnapshot:
    """Random-number, autocast and grad-mode state at the start of a forward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu_rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ({"cpu", device.type})
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Recreates the state, and afterwards puts the current one back as if nothing had run."""
        cpu_rng = torch.get_rng_state()
        cuda_rng = torch.cuda.get_rng_state(self._device) if self._cuda_rng is not None else None
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            torch.set_rng_state(self._cpu_rng)
            if self._cuda_rng is not None:
                torch.cuda.set_rng_state(self._cuda_rng, self._device)
            try:
                yield
            finally:
                torch.set_rng_state(cpu_rng)
                if cuda_rng is not None:
                    torch.cuda.set_rng_state(cuda_rng, self._device)


class BufferGuard:
    """Keeps buffers that a forward updates (running statistics) from being updated again by the second run.

    Which buffers a forward updates is learnt from its first run (in each of training and evaluation mode), during which
    all are copied; after that only those are.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._updated: dict[bool, list[tuple[torch.nn.Module, str]]] = {}

    def before_forward(self) -> Callable[[], list[tuple[torch.nn.Module, str, torch.Tensor]]]:
        """Copies what the forward may update; the result, called after the forward, gives the old values to restore."""
        known = self._updated.get(self._module.training)
        watched = known if known is not None else _buffers_of(self._module)
        before = [
            (owner, name, buffer, buffer._version, buffer.clone())
            for owner, name in watched
            if (buffer := owner._buffers.get(name)) is not None
        ]
        training = self._module.training

        def after_forward() -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
            changed = [
                (owner, name, value)
                for owner, name, buffer, version, value in before
                if owner._buffers.get(name) is not buffer or buffer._version != version
            ]
            if known is None:
                self._updated[training] = [(owner, name) for owner, name, _ in changed]
            return changed

        return after_forward

    @contextmanager
    def rewound(self, old_values: list[tuple[torch.nn.Module, str, torch.Tensor]]) -> Iterator[None]:
        """Runs with the old values in place (as new tensors), then puts the current buffers back."""
        current = [(owner, name, owner._buffers[name]) for owner, name, _ in old_values]
        for owner, name, value in old_values:
            owner._buffers[name] = value.clone()
        try:
            yield
        finally:
            for owner, name, buffer in current:
                owner._buffers[name] = buffer


def _buffers_of(module: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    return [
        (owner, name)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
