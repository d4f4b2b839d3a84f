"""Results of inner modules that forward hooks keep outside of the block."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .._base.tree import detached, tensors_of
from .._C import GraphRoots
from .block_state import unreturned_tensor_error
from .call import BlockCall, Graph, Part, Run
from .hidden_inputs import is_used_for


class HookedResults(Part):
    """Tensors that forward hooks of a block's inner modules received in one call.

    A hook may keep a tensor for a loss (transformers collects attentions and router logits like that). Such a tensor
    cannot be replaced, unlike a recorded one, so the tensor itself becomes a result of the block. It is matched by
    order when the forward runs again.
    """

    packs_saved = True

    def __init__(self, call: BlockCall) -> None:
        self._block = call.block
        self._first: list[weakref.ref[torch.Tensor]] = []
        self._second: list[torch.Tensor] = []
        self._has_run = False
        self._kept: list[int] = []  # indices of the kept tensors among those of the first run
        call.forward = self._watched(call.forward)
        call.take_out = self._taken_out

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Runs ``forward`` and records the tensors that hooks receive; the first call is the first run."""

        def see(module: torch.nn.Module, _args: Any, output: Any) -> None:
            if module._forward_hooks and not torch.compiler.is_compiling():
                for tensor in tensors_of(output):
                    if tensor.grad_fn is not None:
                        self._note(tensor)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._second = []
            handle = torch.nn.modules.module.register_module_forward_hook(see)
            try:
                return forward(*args, **kwargs)
            finally:
                handle.remove()
                self._has_run = True

        return run

    def _note(self, tensor: torch.Tensor) -> None:
        if self._has_run:
            self._second.append(tensor)
            return
        tensor.register_hook(self._refuse_other_ways)
        self._first.append(weakref.ref(tensor))

    def _refuse_other_ways(self, _gradient: torch.Tensor) -> None:
        engine = self._block.engine
        if engine.islands.count == 0 and not engine.calls:  # else the block itself asks for gradients
            raise RuntimeError(unreturned_tensor_error(self._block.label))

    def first_run(self, call: BlockCall, run: Run, args: Any, kwargs: dict[str, Any]) -> Any:
        with _without_history(self._block.label):  # inner parts pack saved tensors in their own ways
            return run(args, kwargs)

    def results(self, again: bool) -> list[torch.Tensor]:
        return self._kept_again() if again else self._kept_first()

    def _kept_first(self) -> list[torch.Tensor]:
        """Returns the tensors of the first run that are still referenced and can become results."""
        alive = [(index, reference()) for index, reference in enumerate(self._first)]
        kept = [
            (index, tensor)
            for index, tensor in alive
            if tensor is not None and tensor.grad_fn is not None and not tensor._is_view()
        ]
        self._kept = [index for index, _ in kept]
        return [tensor for _, tensor in kept]

    def _kept_again(self) -> list[torch.Tensor]:
        if any(index >= len(self._second) for index in self._kept):
            return []  # another path, detected by the number of results
        return [self._second[index] for index in self._kept]

    def _taken_out(self, call: BlockCall) -> list[torch.Tensor]:
        """Returns the outer tensors of the outputs: a tensor kept by a hook is used itself, and leaves its graph."""
        outputs, call.outputs = call.outputs, [get_gradient_edge(output) for output in call.outputs]
        call.roots = GraphRoots(outputs)
        must_stay = [
            *call.inner,
            *(t for part in call.parts if part is not self for t in part.results(False)),
        ]
        kept = {id(tensor) for tensor in self._kept_first()} - {id(tensor) for tensor in must_stay}
        return [output.detach_() if id(output) in kept else detached(output) for output in outputs]


#: Names of the nodes that `attach_island` gives to results.
_NODES = ("bmtrain::Island", "torch::autograd::Identity")


class SeveralResults(Part):
    """Refuses hooks of a result that the forward used for another: they would get the gradient from outside alone."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        self._outer: list[tuple[int, dict[int, Any], int, weakref.ref[torch.Tensor]]] = []
        for index, tensor in enumerate(results):
            known = tensor._backward_hooks or {}
            if (
                tensor.grad_fn is None
                or tensor.grad_fn.name() not in _NODES
                or any(map(_gives_total, known.values()))
            ):
                continue  # a view of another result, or recorded
            hooks: dict[int, Any] = OrderedDict()
            if not known:  # else kept by a hook: further ones are of its node inside
                # As register_hook() does; the tensor itself may be gone when its node runs.
                tensor._backward_hooks = hooks
                tensor.grad_fn._register_hook_dict(tensor)
            self._outer.append((index, hooks, tensor._version, weakref.ref(tensor)))

    def graph(self, call: BlockCall, outputs: list[Any], leaves: list[torch.Tensor]) -> Graph:
        """Looks at the hooks, when the graph is known."""
        for index, hooks, version, reference in self._outer:
            outer = reference()  # its .grad is that of a new value if it was written to
            retains = outer is not None and outer.retains_grad and outer._version == version
            if not hooks and not retains:
                continue
            others = [outputs[other] for other, *_ in self._outer if other != index]
            if is_used_for(outputs[index], others):
                raise RuntimeError(
                    f"{call.block.label}: a hook or retain_grad() on result {index} of those with gradients, with "
                    "which its forward computes another result, would get only the gradient from outside the Block; "
                    "call register_hook() in the forward, or bmtrain.inspect.record_tensor() there"
                )
        return outputs, leaves


def _gives_total(hook: Any) -> bool:
    return hasattr(getattr(hook, "__self__", None), "gives_total")


def _without_history(label: str) -> Any:
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
