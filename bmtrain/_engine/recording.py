"""Recording of inner tensors of a block call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .call import BlockCall, Part


class Recorder(Protocol):
    """Receives the tensors of :func:`bmtrain.inspect.record_tensor`."""

    def add(self, tensor: torch.Tensor, name: str, group: str | None) -> dict[str, Any]:
        """Adds an entry; its ``"tensor"`` is replaced by the corresponding tensor outside of the block."""


class _RunsCalls(Protocol):
    calls: list[BlockCall]


def running_call(engine: _RunsCalls) -> BlockCall | None:
    """Returns the innermost block call whose forward is running, or None."""
    return engine.calls[-1] if engine.calls else None


def place_outside(entry: dict[str, Any], tensor: torch.Tensor, engine: _RunsCalls | None) -> None:
    """Sets the entry's tensor; inside a block, to the corresponding outer tensor when the call has ended."""
    entry["tensor"] = tensor
    if not tensor.requires_grad:
        return
    tensor.retain_grad()
    call = None if engine is None else running_call(engine)
    if call is not None:
        known = _recordings_of(call)
        if known is None:
            known = Recordings()
            call.parts.append(known)
        known.want(tensor, lambda outer: place_outside(entry, outer, engine))


def record_again(call: BlockCall | None, tensor: torch.Tensor) -> None:
    """Records a tensor of the second run of ``call``, in order."""
    known = None if call is None else _recordings_of(call)
    if known is not None and tensor.requires_grad:
        tensor.retain_grad()
        known.again.append(tensor)


def _recordings_of(call: BlockCall) -> Recordings | None:
    return next((part for part in call.parts if isinstance(part, Recordings)), None)


class TotalGradient:
    """Total gradient of an outer tensor, whose own `.grad` would have the part from outside only.

    Args:
        outer: the tensor; referred to weakly, because it refers to the call that it came from.
    """

    gives_total = True  # not refused by `SeveralResults`

    def __init__(self, outer: torch.Tensor) -> None:
        self._outer = weakref.ref(outer)
        self._before: list[torch.Tensor | None] = []  # its gradient at the start of this backward
        outer.register_hook(self._remember)  # runs before the gradient from outside is retained

    def _remember(self, _gradient: torch.Tensor) -> None:
        outer = self._outer()
        self._before = [None if outer is None else outer.grad]

    def add(self, gradient: torch.Tensor) -> None:
        """Adds this backward's total to the gradient of earlier backwards."""
        outer = self._outer()
        if outer is not None:
            before = self._before.pop() if self._before else outer.grad
            outer.grad = gradient if before is None else before + gradient


class Recordings(Part):
    """The tensors recorded in one block call.

    They become outputs of the call, matched by order when its forward runs again. An inner recorded tensor retains its
    total gradient; the outer tensor would only get the part from outside, so the total is passed to it.

    Attributes:
        again: the tensors of the second run.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.again: list[torch.Tensor] = []
        self._receivers: list[Callable[[torch.Tensor], None]] = []
        self._totals: list[TotalGradient | None] = []

    def want(self, tensor: torch.Tensor, receive: Callable[[torch.Tensor], None]) -> None:
        """Requests a tensor of the first run; ``receive`` gets its outer tensor when the call has ended."""
        self.tensors.append(tensor)
        self._receivers.append(receive)

    def results(self, again: bool) -> list[torch.Tensor]:
        return self.again if again else self.tensors

    def after_forward(self, call: BlockCall, outer: dict[int, torch.Tensor]) -> None:
        """Delivers the outer tensors."""
        inputs = dict(zip(map(id, call.inner), call.inputs, strict=True))
        done: set[int] = set()
        for tensor, receive in zip(self.tensors, self._receivers, strict=True):
            known = outer.get(id(tensor))
            if known is None or id(known) in done:
                self._totals.append(None)  # an input gets its total gradient outside
            else:
                done.add(id(known))
                self._totals.append(TotalGradient(known))
            receive(inputs.get(id(tensor), tensor) if known is None else known)
        self._receivers = []

    def after_backward(self, *, again: bool) -> None:
        """Adds the retained gradients of the first (or second) run's tensors to the outer gradients."""
        inner = self.again if again else self.tensors
        for tensor, total in zip(inner, self._totals, strict=True):
            if total is not None:
                if tensor.grad is not None:
                    total.add(tensor.grad)
                tensor.grad = None
        self.again = []
