"""The part of a block call that keeps its activations on the host."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .._base.tree import tensors_of
from .call import BlockCall, Part, Run
from .host_activations import HostActivations, Mover, entrance
from .recompute import Unchanged


class Offload(Part):
    """Moves what backward needs to the host when the forward has ended. See [Note: Activations on the host].

    Args:
        call: the call, before its arguments are detached.
        mover: moves memory to the host.
        args, kwargs: the arguments.
    """

    def __init__(self, call: BlockCall, mover: Mover, args: Any, kwargs: dict[str, Any]) -> None:
        block = call.block
        others = (tensor for tensor in tensors_of((args, kwargs)) if not tensor.requires_grad)
        self._host = call.host = HostActivations(
            block.label, mover, block.owns_storage, chain(others, call.modules.buffers())
        )
        self._stack = call.engine.host_stack
        self._recomputes = block.recomputes
        self._unchanged = Unchanged(block.label)
        call.enter = self._enter

    def _enter(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf, inner = entrance(tensor)
        self._unchanged.note(leaf)
        return leaf, inner

    def first_run(self, call: BlockCall, run: Run, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._recomputes:
            return run(args, kwargs)  # saves nothing
        with self._host.saving():
            return run(args, kwargs)

    def after_forward(self, call: BlockCall, outer: dict[int, torch.Tensor]) -> None:
        """Drops references to device memory that backward will restore from the host."""
        if not call.outputs:
            return
        self._unchanged.check()  # the forward itself may have written to them
        call.outputs = [get_gradient_edge(x) if isinstance(x, torch.Tensor) else x for x in call.outputs]
        call.inner = []
        self._stack.push(self._host)

    def before_backward(self, call: BlockCall) -> None:
        if self._recomputes:
            self._unchanged.check()
        self._stack.bring_back(self._host)

    def drop(self, *, for_good: bool) -> None:
        self._host.drop(for_good=for_good)
        if for_good:
            self._stack.pop(self._host)
