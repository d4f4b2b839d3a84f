"""From parameters, gradients and states to the contiguous host memory that the CPU kernel updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .._ops import AdamRanges
from ._adam_base import Update
from ._adam_state import MASTER

__all__ = ["host_ranges"]


@contextmanager
def host_ranges(updates: Sequence[Update]) -> Iterator[AdamRanges]:
    """Ranges of updates, all of fp32 or all of 16-bit parameters, whose states are in host memory.

    Contiguous host tensors are used as they are. Others (parameters of a device, transposed ones) go through
    copies; when the block ends, the copies of parameters are written back. Copies of a GPU's are pinned, so that all of
    them are under way together and the host waits once; those back to it are not waited for.
    """
    rounds = updates[0].param.dtype != torch.float32
    written: list[tuple[Tensor, Tensor, bool]] = []  # the last: whether the copy need not be waited for
    ranges = AdamRanges([], [], [], [], [], [])
    for param, grad, state in updates:
        separate = MASTER in state and state[MASTER].data_ptr() != param.data_ptr()
        if rounds or not separate:
            value = _on_host(param, empty=rounds)
            if value is not param:
                written.append((param, value, True))
            (ranges.rounded if rounds else ranges.weights).append(value)
        if rounds or separate:
            ranges.weights.append(state[MASTER])
        if separate and not rounds:
            # Whoever changes a state next would not know of a copy under way.
            written.append((param, state[MASTER], False))
        ranges.grads.append(_on_host(grad))
        ranges.exp_avgs.append(state["exp_avg"])
        ranges.exp_avg_sqs.append(state["exp_avg_sq"])
        ranges.steps.append(state["step"])
    for device in {u.grad.device for u in updates if u.grad.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    yield ranges
    for param, value, is_free in written:
        param.copy_(value, non_blocking=is_free)


def _on_host(tensor: Tensor, empty: bool = False) -> Tensor:
    """The tensor itself if it is contiguous in host memory, else such a copy (with ``empty``, its space only)."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    if empty and not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    if not tensor.is_cuda:
        return tensor.detach().to("cpu").contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host if empty else host.copy_(tensor.detach(), non_blocking=True)
