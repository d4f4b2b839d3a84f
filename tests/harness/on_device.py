"""Tensors that tests make without a device become the rank's GPU's, with the values that they have on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["MadeOn"]

FACTORIES = {
    *(
        torch.arange,
        torch.empty,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.ones,
        torch.tensor,
    ),
    *(
        torch.zeros,
        torch.tril_indices,
        torch.bernoulli,
        torch.multinomial,
        torch.normal,
        torch.rand,
        torch.randint,
    ),
    *(torch.randn, torch.randperm),
}


class MadeOn(TorchFunctionMode):
    """Inside it, factories of torch that are given no device make what they make on the host, then move it there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in FACTORIES or kwargs.get("device") is not None or "out" in kwargs:
            return func(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs).to(self.device)
        return made.requires_grad_() if requires_grad else made
