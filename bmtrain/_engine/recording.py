"""Inner tensors of a block call that are wanted outside of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from .engine import Engine
    from .island import BlockCall

__all__ = ["Recorder", "Recordings", "TotalGradient", "active_recorder", "place_outside", "running_call"]


class Recorder(Protocol):
    """Takes what :func:`bmtrain.inspect.record_tensor` is given."""

    def add(self, tensor: torch.Tensor, name: str, group: str | None) -> dict[str, Any]:
        """A new entry; its ``"tensor"`` is replaced by what stands for the tensor outside of the block."""


#: Who records right now: an inspector, or within a pipeline the stage.
active_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def running_call(engine: Engine) -> BlockCall | None:
    """The block call whose forward runs now, the innermost if there are several."""
    return engine.calls[-1] if engine.calls else None


def place_outside(entry: dict[str, Any], tensor: torch.Tensor, engine: Engine | None) -> None:
    """Makes ``tensor`` the entry's; inside a block, what the tensor is outside once the call has ended."""
    entry["tensor"] = tensor
    if not tensor.requires_grad:
        return
    tensor.retain_grad()
    call = None if engine is None else running_call(engine)
    if call is not None:
        call.recordings.want(tensor, lambda outer: place_outside(entry, outer, engine))


class TotalGradient:
    """Gives a tensor outside, which sees only the gradient from there, the total one.

    Args:
        outer: the tensor; referred to weakly, because it refers to the call that it came from.
    """

    def __init__(self, outer: torch.Tensor) -> None:
        self._outer = weakref.ref(outer)
        self._before: list[torch.Tensor | None] = []  # the gradient that it had when this backward came by
        outer.register_hook(self._remember)  # runs before the gradient from outside is retained

    def _remember(self, _gradient: torch.Tensor) -> None:
        outer = self._outer()
        self._before = [None if outer is None else outer.grad]

    def add(self, gradient: torch.Tensor) -> None:
        """Adds this backward's total to what earlier ones left."""
        outer = self._outer()
        if outer is not None:
            before = self._before.pop() if self._before else outer.grad
            outer.grad = gradient if before is None else before + gradient


class Recordings:
    """The tensors that were recorded in one block call.

    They become outputs of the call, matched by order when its forward runs again. Inside, a recorded tensor retains its
    gradient, which is its total one; outside, only the part from there would be seen, so the total is handed over.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.again: list[torch.Tensor] = []  # the same in the second run
        self._receivers: list[Callable[[torch.Tensor], None]] = []
        self._totals: list[TotalGradient | None] = []

    def want(self, tensor: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> None:
        """Asks for a tensor of the first run; ``receive`` gets what it is outside, when the call has ended."""
        self.tensors.append(tensor)
        self._receivers.append(receive)

    def see_again(self, tensor: torch.Tensor) -> None:
        """Meets, in order, the tensors of the second run."""
        if self.tensors and tensor.requires_grad:
            tensor.retain_grad()
            self.again.append(tensor)

    def deliver(self, outputs: Mapping[int, torch.Tensor], inputs: Mapping[int, torch.Tensor]) -> None:
        """Gives the tensors out.

        Args:
            outputs, inputs: what stands outside for an inner tensor of that identity.
        """
        done: set[int] = set()
        for tensor, receive in zip(self.tensors, self._receivers, strict=True):
            outer = outputs.get(id(tensor))
            if outer is None or id(outer) in done:
                self._totals.append(None)  # an input has its total gradient outside
            else:
                done.add(id(outer))
                self._totals.append(TotalGradient(outer))
            receive(inputs.get(id(tensor), tensor) if outer is None else outer)
        self._receivers = []

    def hand_over_gradients(self, *, second: bool) -> None:
        """Adds what the tensors of the first (the second) run retained to the gradients outside."""
        inner = self.again if second else self.tensors
        for tensor, total in zip(inner, self._totals, strict=True):
            if total is not None:
                if tensor.grad is not None:
                    total.add(tensor.grad)
                tensor.grad = None
        self.again = []
