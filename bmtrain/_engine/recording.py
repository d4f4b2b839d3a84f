"""Inner tensors of a block call that are wanted outside of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .island import BlockCall
    from .runtime import Engine

__all__ = ["Recordings", "running_call"]


def running_call(engine: Engine) -> BlockCall | None:
    """The block call whose forward runs now, the innermost if there are several."""
    return engine.calls[-1] if engine.calls else None


class Recordings:
    """The tensors that were recorded in one block call.

    They become outputs of the call, matched by order when its forward runs again. Inside, a recorded tensor retains its
    gradient, which is its total one; outside, only the part from there would be seen, so the total is handed over.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.again: list[torch.Tensor] = []  # the same in the second run
        self._receivers: list[Callable[[torch.Tensor], None]] = []
        self._outer: list[weakref.ref[torch.Tensor] | None] = []  # weakly: they refer to the call
        self._before: dict[int, torch.Tensor | None] = {}  # gradients of earlier backwards, by number

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
        for number, (tensor, receive) in enumerate(zip(self.tensors, self._receivers, strict=True)):
            outer = outputs.get(id(tensor))
            if outer is None or id(outer) in done:
                self._outer.append(None)  # an input has its total gradient outside
            else:
                done.add(id(outer))
                self._outer.append(weakref.ref(outer))
                outer.register_hook(partial(self._remember, number))  # runs before the gradient is retained
            receive(inputs.get(id(tensor), tensor) if outer is None else outer)
        self._receivers = []

    def _remember(self, number: int, _gradient: torch.Tensor) -> None:
        reference = self._outer[number]
        outer = None if reference is None else reference()
        self._before[number] = None if outer is None else outer.grad

    def hand_over_gradients(self, *, second: bool) -> None:
        """Adds what the tensors of the first (the second) run retained to the gradients outside."""
        inner = self.again if second else self.tensors
        for number, (tensor, reference) in enumerate(zip(inner, self._outer, strict=True)):
            outer = None if reference is None else reference()
            if outer is not None and tensor.grad is not None:
                before = self._before.pop(number) if number in self._before else outer.grad
                outer.grad = tensor.grad if before is None else before + tensor.grad
            if reference is not None:
                tensor.grad = None
        self.again = []
