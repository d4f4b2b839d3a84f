"""Results of inner modules that forward hooks keep outside of the block."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._base.tree import tensors_of
from .runtime import BlockRuntime, unreturned_tensor_error

__all__ = ["HookedResults"]


class HookedResults:
    """Tensors that forward hooks of a block's inner modules received in one call.

    A hook may keep a tensor for a loss (transformers collects attentions and router logits like that). Such a tensor
    cannot be replaced, unlike a recorded one, so the tensor itself becomes a result of the block. It is matched by
    order when the forward runs again.
    """

    def __init__(self, runtime: BlockRuntime) -> None:
        self._runtime = runtime
        self._first: list[weakref.ref[torch.Tensor]] = []
        self._second: list[torch.Tensor] = []
        self._has_run = False
        self._kept: list[int] = []  # indices of the kept tensors among those of the first run

    def watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Runs ``forward`` and records the tensors that hooks receive; the first call is the first run."""
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
            raise RuntimeError(unreturned_tensor_error(self._runtime.label))

    def kept(self) -> list[torch.Tensor]:
        """Returns the tensors of the first run that are still referenced and can become results."""
        alive = [(index, reference()) for index, reference in enumerate(self._first)]
        kept = [
            (index, tensor)
            for index, tensor in alive
            if tensor is not None and tensor.grad_fn is not None and not tensor._is_view()
        ]
        self._kept = [index for index, _ in kept]
        return [tensor for _, tensor in kept]

    def kept_again(self) -> list[torch.Tensor]:
        """Returns the tensors of the second run that correspond to `kept`."""
        if any(index >= len(self._second) for index in self._kept):
            return []  # another path, detected by the number of results
        return [self._second[index] for index in self._kept]

    def taken_out(self, outputs: list[torch.Tensor], others: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the outer tensors of the outputs: a tensor kept by a hook is used itself, and leaves its graph.

        Args:
            others: inner tensors that must stay what they are.
        """
        kept = {id(tensor) for tensor in self.kept()} - {id(tensor) for tensor in others}
        return [output.detach_() if id(output) in kept else output.detach() for output in outputs]


def without_history(label: str) -> Any:
    """Context manager in which autograd saves tensors without their graph.

    A tensor that leaves the graph would otherwise form a reference cycle with the block's node.
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
