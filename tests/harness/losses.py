"""A cross-entropy and its gradient against torch's in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["assert_cross_entropy"]


def assert_cross_entropy(
    loss: Tensor,
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None,
    smoothing: float,
    factor: float,
    rtol: float,
    atol: float,
) -> None:
    """Compares a loss and the gradient that it left.

    Args:
        loss: of ``logits``, after its backward.
        logits: ``(N, C)``, a leaf with a gradient.
        target: ``(N,)``, -100 where ignored.
        weight: of the classes, or None.
        smoothing: of the labels.
        factor: what the loss was multiplied by before backward.
        rtol, atol: of the gradient.
    """
    reference = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(
        reference, target, None if weight is None else weight.double(), label_smoothing=smoothing
    )
    (expected * factor).backward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-5, atol=2e-6)
    assert logits.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=rtol, atol=atol)
