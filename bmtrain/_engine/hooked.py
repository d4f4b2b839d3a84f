"""Results of inner modules that forward hooks have seen, and that may be wanted outside of the block."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .recompute import left_behind
from .tree import tensors_of

if TYPE_CHECKING:
    from .runtime import BlockRuntime

__all__ = ["HookedResults"]


class HookedResults:
    """What the forward hooks of a block's inner modules were shown in one call.

    A hook may keep a tensor for a loss (transformers collects attentions and router logits like that). Nobody can put
    another in its place, as for tensors that were recorded, so the tensor itself becomes a result of the block. It is
    matched by order when the forward runs again.
    """

    def __init__(self, runtime: BlockRuntime) -> None:
        self._runtime = runtime
        self._first: list[weakref.ref[torch.Tensor]] = []
        self._second: list[torch.Tensor] = []
        self._has_run = False
        self._kept: list[int] = []  # which of the first run's

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, run so that what its modules' hooks are shown is noted; the first run is the first."""
        note = self._note_again if self._has_run else self._note
        self._has_run = True
        self._second = []

        def see(module: torch.nn.Module, _args: Any, output: Any) -> None:
            if module._forward_hooks and not torch.compiler.is_compiling():
                for tensor in tensors_of(output):
                    if tensor.grad_fn is not None:
                        note(tensor)

        def run(*args: Any, **kwargs: Any) -> Any:
            handle = torch.nn.modules.module.register_module_forward_hook(see)
            try:
                return forward(*args, **kwargs)
            finally:
                handle.remove()

        return run

    def _note(self, tensor: torch.Tensor) -> None:
        tensor.register_hook(self._refuse_other_ways)
        self._first.append(weakref.ref(tensor))

    def _note_again(self, tensor: torch.Tensor) -> None:
        self._second.append(tensor)

    def _refuse_other_ways(self, _gradient: torch.Tensor) -> None:
        engine = self._runtime.engine
        if engine.islands.count == 0 and not engine.calls:  # else the block itself asks for gradients
            raise RuntimeError(left_behind(self._runtime.label))

    def kept(self) -> list[torch.Tensor]:
        """Those of the first run that somebody still holds, and that can become a result."""
        alive = [(index, reference()) for index, reference in enumerate(self._first)]
        kept = [
            (index, tensor)
            for index, tensor in alive
            if tensor is not None and tensor.grad_fn is not None and not tensor._is_view()
        ]
        self._kept = [index for index, _ in kept]
        return [tensor for _, tensor in kept]

    def kept_again(self) -> list[torch.Tensor]:
        """The same of the second run."""
        if any(index >= len(self._second) for index in self._kept):
            return []  # another path, which the number of results tells
        return [self._second[index] for index in self._kept]

    def taken_out(self, outputs: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
        """What stands outside for the outputs: for those that hooks have kept, themselves, which leave their graph.

        Args:
            others: inner tensors that have to stay what they are.
        """
        kept = {id(tensor) for tensor in self.kept()} - {id(tensor) for tensor in others}
        return [output.detach_() if id(output) in kept else output.detach() for output in outputs]


def without_history(label: str) -> Any:
    """While it lasts, autograd saves tensors as they are, but without their place in the graph.

    One that leaves the graph would otherwise be held by the block's node, which it then holds itself.
    """

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return tensor.detach(), tensor._version

    def unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, version = saved
        if tensor._version != version:
            raise RuntimeError(
                f"{label}: a tensor of shape {tuple(tensor.shape)} needed for the gradient has been modified by an "
                f"inplace operation (version {tensor._version}, expected {version})"
            )
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
