"""The gradient of a sharded parameter: access to the shard, hooks on the full gradient, the whole."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from sys import _getframe
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._base.opaque import opaque
from .._base.tensors import TORCH_GRAD, gradient_of
from .._ranks.agree import largest
from .._ranks.context import current
from ..global_var import context
from .at_rest import show, show_together, stored_shard_of, zero_consumed
from .block_ref import BlockRef
from .grad_readers import CHECKED_FILES, CHECKED_FUNCTIONS, is_shown
from .sharding import ShardSpec


class ParameterWithGradient(torch.nn.Parameter):
    """The part of :class:`bmtrain.DistributedParameter` that concerns its gradient, of which ``grad`` is a shard."""

    _spec: ShardSpec
    #: Name in collectives, so that ranks that use different parameters in one collective raise an error.
    _label: str
    _original_shape: torch.Size
    _block: BlockRef | None
    #: Weak reference to its shard on a drive, see `_engine/disk_shard.py`.
    _stored: weakref.ref[Any] | None = None
    _gradient_hooks: OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]] | None
    _accumulated_hooks: OrderedDict[int, Callable[[torch.Tensor], None]] | None
    #: A copy of the gradient, dropped when the gradient may have changed; see `optim/places/overlap/ahead.py`.
    _sent: Any = None

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's shard of the gradient, or None. See [Note: Readers of a shard's gradient]."""
        if torch.compiler.is_dynamo_compiling():
            known: torch.Tensor | None = _gradient_outside_of_graphs(self)
            return known
        reader = _getframe(1)
        gradient = gradient_of(self)
        code = reader.f_code
        if code.co_name == "zero_grad":  # torch's methods look whether there is a gradient
            self._forget_unsent()
        elif self._stored is not None and gradient is not None:
            if reader.f_code.co_name == "_apply":
                zero_consumed(self)
            show(self, gradient=True)
        if self._sent is not None:
            self._sent.drop()
        is_checked = code.co_filename in CHECKED_FILES or code.co_name in CHECKED_FUNCTIONS
        if is_checked and not is_shown(self, gradient, reader):
            return None
        return gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._sent is not None:
            self._sent.drop()
        if value is None:
            self._forget_unsent()
        if (stored := stored_shard_of(self)) is not None:
            stored.note_replaced_gradient(self)
        TORCH_GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _forget_unsent(self) -> None:
        """Drops the gradient that backwards in :func:`bmtrain.no_sync` left unsent: a script drops ``grad``."""
        if (present := current()) is not None:
            gradients: Any = present.engine.gradients
            gradients.unsent.forget((self,))

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> RemovableHandle:
        """Registers a hook on this rank's full gradient, before the sum over the ranks.

        A backward through several runs of a Block, or several forwards that read the parameter, calls it with the part
        of each. It does not receive gradients that reach the shard directly, as in ``(param ** 2).sum()``.

        Args:
            hook: gets the gradient in the parameter's full shape; returns another one, or None.

        Returns:
            A handle with ``remove()``.

        Raises:
            RuntimeError: the parameter is frozen, or torch counts nodes that a Block does not run.
        """
        if not self.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        name = getattr(hook, "__qualname__", "")  # of torch's hook, which is inside of the function
        if self._block is not None and name.startswith("register_multi_grad_hook."):
            raise RuntimeError(
                "torch.autograd.graph.register_multi_grad_hook(mode='all') was given parameters of a Block, whose "
                "backward runs no node that it counts: use mode='any', or register_post_accumulate_grad_hook of each"
            )
        if self._gradient_hooks is None:
            self._gradient_hooks = OrderedDict()
            block = self._block() if self._block is not None else None
            if block is not None and (place := block._place_of(self)) is not None:
                place[0].set_hooks(place[1], self._gradient_hooks)
        handle = RemovableHandle(self._gradient_hooks)
        self._gradient_hooks[handle.id] = hook
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Calls ``hook(param)`` once at the end of each backward that gave it a gradient, complete in ``.grad``."""
        if self._accumulated_hooks is None:
            super().register_post_accumulate_grad_hook(_note_accumulated)
            self._accumulated_hooks = OrderedDict()
        handle = RemovableHandle(self._accumulated_hooks)
        self._accumulated_hooks[handle.id] = hook
        return handle

    def _take_hooks(self, plain: torch.Tensor) -> None:
        """Takes over the hooks of the plain parameter that this one replaces, with the handles that remove them."""
        attributes: Any = plain
        self._gradient_hooks = attributes._backward_hooks or None
        if hooks := attributes._post_accumulate_grad_hooks:
            torch.Tensor.requires_grad_(self)  # which torch asks for
            self.register_post_accumulate_grad_hook(_note_accumulated)
            torch.Tensor.requires_grad_(self, plain.requires_grad)
            self._accumulated_hooks = hooks

    def _run_accumulated_hooks(self) -> None:
        for hook in list((self._accumulated_hooks or {}).values()):
            hook(self)

    @torch.no_grad()
    def gather_grad(self) -> torch.Tensor | None:
        """Returns the full gradient, of which ``grad`` is a shard; None if no rank has any. Collective.

        It is the sum over the ranks, times the loss scale if there is one. Before a step, and while none waits in
        :func:`bmtrain.no_sync`, it is what optimizers use.

        Returns:
            a new tensor of :attr:`full_shape`.
        """
        show_together(self, gradient=True)
        own = self.grad
        if not any(largest([own is not None], "gradient")):
            return None
        local = self.new_zeros(self._spec.local_part[1]) if own is None else own
        return self._spec.gather(local, self._label).view(self._original_shape)

    @torch.no_grad()
    def load_grad(self, full: torch.Tensor) -> None:
        """Copies this rank's part of ``full`` into the gradient. All ranks pass the same tensor.

        Args:
            full: of :attr:`full_shape`; any device and dtype.

        Raises:
            ValueError: it has another shape.
        """
        if full.shape != self._original_shape:
            raise ValueError(f"full: expected shape {tuple(self._original_shape)}, got {tuple(full.shape)}")
        part = self._spec.slice_of(full.reshape(-1))
        if self.grad is None:
            self.grad = torch.empty_like(self.detach())
        self.grad.copy_(part)


@opaque
def _gradient_outside_of_graphs(param: torch.Tensor) -> torch.Tensor | None:
    """Reads the gradient outside of compiled graphs, in functions such as an optimizer's step."""
    return gradient_of(param)


def _note_accumulated(param: torch.Tensor) -> None:
    context().engine.gradients.note_accumulated(param)
