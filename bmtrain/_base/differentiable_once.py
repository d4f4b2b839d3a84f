"""Autograd functions whose gradient cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a backward whose gradient depends on saved tensors, not on the incoming gradient alone.

    torch's ``once_differentiable`` treats such a gradient as a constant when the incoming gradient is a constant (a
    loss has 1), and a gradient penalty would be silently wrong. With this one, differentiating the gradient raises.

    Example:
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...     @staticmethod
        ...     @differentiable_once
        ...     def backward(ctx, gradient):
        ...         return 2 * ctx.saved_tensors[0] * gradient
        >>> x = torch.tensor(3.0, requires_grad=True)
        >>> gradient, = torch.autograd.grad(Square.apply(x), x, create_graph=True)
        >>> gradient.backward()
        Traceback (most recent call last):
        ...
        RuntimeError: trying to differentiate twice a function that was marked with @once_differentiable
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            return once(ctx, *(None if g is None else g.detach().requires_grad_() for g in gradients))
        return once(ctx, *gradients)

    return wrapper
