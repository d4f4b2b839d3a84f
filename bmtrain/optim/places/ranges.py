"""Contiguous ranges of parameters, gradients and states for kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._base.tensors import data_of
from .._arrays import MASTER
from .._updates import Ranges, Update
from ..formulas import Part


def ranges_of(updates: Sequence[Update], names: Sequence[str]) -> Ranges:
    """Returns the ranges of updates of either fp32 or 16-bit parameters, with all tensors on one device."""
    states = [u.state for u in updates]
    return Ranges(
        weights=[u.state.get(MASTER, u.param) for u in updates],
        rounded=[u.param for u in updates if u.param.dtype is not torch.float32],
        grads=[u.grad for u in updates],
        arrays=[[state[name] for state in states] for name in names],
        steps=[state["step"] for state in states],
        fresh=[u.is_fresh for u in updates],
    )


def split(
    parts: Sequence[Part], belongs: Callable[[Part, Update], bool]
) -> tuple[Sequence[Part], Sequence[Part]]:
    """Splits updates by a predicate; no part is empty."""
    kinds: tuple[list[Part], list[Part]] = [], []
    for part in parts:
        truths = [belongs(part, update) for update in part.updates]
        if len(set(truths)) == 1:
            kinds[not truths[0]].append(part)
            continue
        for kind, truth in zip(kinds, (True, False), strict=True):
            updates = [u for u, is_one in zip(part.updates, truths, strict=True) if is_one is truth]
            kind.append(part._replace(updates=updates))
    return kinds


def compute_alike(parts: Iterable[Part], *, as_torch: bool = False) -> None:
    """Computes parts that are contiguous on their parameters' devices by kernels, in as few calls as possible.

    ``as_torch``: see `Formula.compute`.
    """
    kinds: dict[Any, list[Part]] = {}
    for part in parts:
        if part.updates:
            param = part.updates[0].param
            kind = id(part.formula), param.device, param.dtype is torch.float32, part.names
            kinds.setdefault(kind, []).append(part)
    for alike in kinds.values():
        updates = [update for part in alike for update in part.updates]
        alike[0].formula.compute(ranges_of(updates, alike[0].names), alike, as_torch=as_torch)


def compute_on_host(parts: Iterable[Part], *, as_torch: bool = False) -> None:
    """Computes parts whose states are in host memory; other tensors are copied by `host_ranges`."""
    direct = []
    for part in parts:
        if all(_is_on_host(u.param) and _is_on_host(u.grad) for u in part.updates):
            direct.append(part)
        else:
            with host_ranges(part.updates, part.names) as ranges:
                part.formula.compute(ranges, [part], as_torch=as_torch)
    compute_alike(direct, as_torch=as_torch)


@contextmanager
def host_ranges(updates: Sequence[Update], names: Sequence[str]) -> Iterator[Ranges]:
    """Yields ranges of updates of either fp32 or 16-bit parameters, whose states are in host memory.

    Contiguous host tensors are used directly. Others (parameters on a device, transposed ones) are copied; when the
    block ends, the copies of parameters are written back. Copies of GPU tensors are pinned and asynchronous: the host
    waits once for all of them, and not for copies back to the GPU.
    """
    rounds = updates[0].param.dtype != torch.float32
    written: list[tuple[Tensor, Tensor, bool]] = []  # the last: whether the copy need not be waited for
    states = [u.state for u in updates]
    ranges = Ranges(
        weights=[],
        rounded=[],
        grads=[_on_host(u.grad) for u in updates],
        arrays=[[state[name] for state in states] for name in names],
        steps=[state["step"] for state in states],
        fresh=[u.is_fresh for u in updates],
    )
    for param, _, state, *_ in updates:
        separate = MASTER in state and state[MASTER].data_ptr() != param.data_ptr()
        if rounds or not separate:
            value = _on_host(param, empty=rounds)
            if value is not param:
                written.append((param, value, True))
            (ranges.rounded if rounds else ranges.weights).append(value)
        if rounds or separate:
            ranges.weights.append(state[MASTER])
        if separate and not rounds:
            # A later change of a state would not wait for a pending copy.
            written.append((param, state[MASTER], False))
    for device in {u.grad.device for u in updates if u.grad.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    yield ranges
    for param, value, is_free in written:
        # Through an alias with a version counter of its own: the step counts the change, once.
        data_of(param).copy_(value, non_blocking=is_free)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.is_contiguous()


def _on_host(tensor: Tensor, empty: bool = False) -> Tensor:
    """Returns the tensor if it is contiguous in host memory, else a copy (with ``empty``, uninitialised)."""
    if _is_on_host(tensor):
        return tensor
    if empty and not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if not tensor.is_cuda:
        return tensor.detach().to("cpu").contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host if empty else host.copy_(tensor.detach(), non_blocking=True)
