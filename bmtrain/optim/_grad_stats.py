"""Norm, overflow and scaling of all gradients of a model, over all ranks.

[Note: Elements counted by a rank]
A norm adds every logical element once. Shards are disjoint, so each rank counts its own, also of tensor-parallel
parameters that are split. Elements that several ranks hold are counted by the first of them only: a tensor-parallel
parameter that is not split by tensor-parallel rank 0, a block's at level 0 and a plain parameter by rank 0. The search
for inf and NaN covers all elements of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from .._base.tensors import gradient_of
from .._C import ReduceOp, SentNumber
from .._engine.disk_shard import any_on_disk, gradients_in_memory, reading_gradients
from .._engine.engine import current_engine
from .._ranks import context as _context
from ..global_var import context
from ..parameter import DistributedParameter
from ._exact_norm import exact_norm
from .places.overlap.ahead import copies_of

_CORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# The operator of the core for each norm.
_POWER_SUMS = {2.0: "squared_sum", math.inf: "abs_max"}


def parameters_of(param_groups: Iterable[Any]) -> Iterator[Tensor]:
    """Returns the parameters of group dicts (or an iterable of parameters, or one of either), in order, each once."""
    seen: set[int] = set()
    for group in (param_groups,) if isinstance(param_groups, (Tensor, Mapping)) else param_groups:
        for p in group["params"] if isinstance(group, Mapping) else (group,):
            # On every rank alike: a rank that fails alone leaves the others waiting.
            if not isinstance(p, Tensor):
                raise TypeError(
                    f"param_groups: expected parameters or dicts of them, got {p!r:.80} ({type(p).__name__})"
                )
            if id(p) not in seen:
                seen.add(id(p))
                yield p


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    gradients = []
    for p in parameters:
        grad = gradient_of(p)
        if grad is not None and grad.numel():
            gradients.append(grad.detach())
    return gradients


def counted_here(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields the parameters that this rank counts, see [Note: Elements counted by a rank]."""
    topology = context("gradient clipping").topology
    for p in parameters:
        if not isinstance(p, DistributedParameter):
            counts = topology.rank == 0
        else:
            is_split = not p._tp_mode or p._tp_split_dim >= 0 or topology.tp_id == 0
            counts = is_split and p._spec.is_first_replica
        if counts:
            yield p


def _by_kind(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Returns lists of one device and dtype each, for torch's multi-tensor kernels."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        kinds.setdefault((t.device, t.dtype), []).append(t)
    yield from kinds.values()


def _power_sum(parameters: Sequence[Tensor], norm_type: float) -> Tensor:
    """Returns ``sum |g|^p`` or ``max |g|`` of this rank, (1,) in fp64; inf or NaN if an element is."""
    total = torch.zeros(1, dtype=torch.float64, device=context("gradient statistics").device)
    for part in _each_run(parameters, partial(power_sums, norm_type=norm_type)):
        part = part.to(total)
        total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    return total


def power_sums(gradients: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Returns numbers whose sum is ``sum |g|^p``, or whose maximum is ``max |g|``."""
    by_device, others = _split(gradients, _POWER_SUMS.get(norm_type, "abs_power_sum"))
    parts = [_core_power_sum(grads, norm_type) for grads in by_device]
    return parts + [_torch_power_sum(grads, norm_type) for grads in _by_kind(others)]


def _each_run(
    parameters: Sequence[Tensor], function: Callable[[Sequence[Tensor]], list[Tensor]]
) -> Iterator[Tensor]:
    """Yields the results of ``function`` for gradients: for all together, or where some are on a drive for each.

    Kernels add the sums over tensors in their order, so that the bits of the total do not depend on it.
    """
    runs = list(parameters)
    if not any_on_disk(runs):
        yield from function(_gradients(runs))
        return
    for members in gradients_in_memory(runs):
        for gradient in _gradients(members):
            yield from function([gradient])


def _split(gradients: Sequence[Tensor], op: str) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Returns the tensors for kernels of the core (one call per device over dtypes and sizes), and the others."""
    taken: dict[torch.device, list[Tensor]] = {}
    others = []
    for g in gradients:
        if g.dtype in _CORE_DTYPES and g.is_contiguous() and _ops.has_kernels(op, g.device.type):
            taken.setdefault(g.device, []).append(g)
        else:
            others.append(g)
    return list(taken.values()), others


def _core_power_sum(grads: list[Tensor], norm_type: float) -> Tensor:
    if norm_type == 2:
        return _ops.squared_sum(grads)
    return _ops.abs_max(grads) if math.isinf(norm_type) else _ops.abs_power_sum(grads, norm_type)


def _torch_power_sum(grads: list[Tensor], norm_type: float) -> Tensor:
    norms = torch.stack(torch._foreach_norm(grads, norm_type, dtype=torch.float64))
    return norms.max() if math.isinf(norm_type) else norms.pow_(norm_type).sum()


def _any_overflow(parameters: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns 1 if an element of a gradient is inf or NaN, else 0; (1,) in fp32 on ``device``."""
    overflow = torch.zeros(1, device=device)
    for part in _each_run(parameters, _largest_of):
        overflow = torch.maximum(overflow, part.to(device).isfinite().logical_not().to(overflow.dtype))
    return overflow


def _largest_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns numbers that are not finite if an element is not."""
    # Each in one pass: a GPU has the kernel of the norm, whose squares fp64 holds; magnitudes are faster on the CPU.
    by_device, others = _split(gradients, "squared_sum")
    return [(_ops.abs_max if grads[0].is_cpu else _ops.squared_sum)(grads) for grads in by_device] + [
        _torch_power_sum(grads, math.inf) for grads in _by_kind(others)
    ]


def _all_reduce(number: Tensor, op: Any, label: str) -> Tensor:
    """Reduces a number over the world, in place; the results are bit-identical on all ranks."""
    context(label).world.comm.all_reduce(number, op, label).wait()
    return number


def global_norm(parameters: Iterable[Tensor], norm_type: float) -> Tensor:
    """Returns the p-norm of the gradients of all ranks, each logical element once. Collective.

    On a GPU the host does not wait for it.

    Args:
        parameters: the parameters; one without a gradient counts as 0.
        norm_type: p > 0, ``math.inf`` for the largest magnitude.

    Returns:
        The norm, 0-dim in fp64 on the run device, the same on all ranks; inf or NaN if a counted element is.
    """
    parameters = list(parameters)
    counted = list(counted_here(parameters))
    if context("gradient norm").virtual_shards:
        return _norm_on_any_ranks(counted, norm_type)
    with reading_gradients(parameters):
        local = _power_sum(counted, norm_type)
    if math.isinf(norm_type):
        return _largest(local)
    return _all_reduce(local, ReduceOp.SUM, "gradient norm").pow_(1.0 / norm_type).squeeze(0)


def _largest(local: Tensor) -> Tensor:
    local.nan_to_num_(nan=math.inf, posinf=math.inf)  # a transport's max may drop a NaN, but not an inf
    return _all_reduce(local, ReduceOp.MAX, "gradient norm").squeeze(0)


def _norm_on_any_ranks(parameters: list[Tensor], norm_type: float) -> Tensor:
    """Returns the norm by exact sums, see [Note: Exact sums]. The host waits."""
    largest = _largest(_power_sum(parameters, math.inf))
    if math.isinf(norm_type):
        return largest

    def add_up(numbers: Tensor) -> Tensor:
        return _all_reduce(numbers, ReduceOp.SUM, "gradient norm")

    return largest.new_tensor(
        exact_norm(_gradients(parameters), norm_type, largest.item(), add_up, largest.device)
    )


def check_overflow(param_groups: Iterable[Any]) -> bool:
    """Returns whether any gradient of any rank has inf or NaN. Collective; the same result on all ranks.

    Before ``init_distributed`` it checks this process alone.

    Args:
        param_groups: group dicts as of ``optimizer.param_groups``.
    """
    parameters = list(parameters_of(param_groups))
    current = _context.current()
    if current is None:
        return _any_overflow(parameters, torch.device("cpu")).item() > 0
    with reading_gradients(parameters):
        found = _any_overflow(parameters, current.device)
    return _all_reduce(found, ReduceOp.MAX, "gradient overflow").item() > 0


def keep_unsent(is_kept: bool) -> None:
    """Notes whether gradients that wait for the last backward of a step are to stay in a ``zero_grad()``."""
    current = _context.current()
    if current is not None:
        current_engine(current).gradients.unsent.is_kept = is_kept


def forget_unsent(parameters: Iterable[Tensor]) -> None:
    """Drops the gradients of ``parameters`` that backwards in :func:`bmtrain.no_sync` left unsent."""
    current = _context.current()
    if current is not None:
        current_engine(current).gradients.unsent.forget(parameters)


def first_overflow(parameters: Sequence[Tensor]) -> int:
    """Finds the first parameter with inf or NaN in its gradient on any rank. Collective.

    Returns:
        Its index, the same on all ranks; ``len(parameters)`` if there is none.
    """
    device = context("gradient overflow").device
    flags = [_any_overflow([p], device) for p in parameters]
    flags.append(torch.ones(1, device=device))  # sentinel: the search ends here
    number = torch.cat(flags).argmax().view(1)  # of the first; the host reads a single number
    return int(_all_reduce(number, ReduceOp.MIN, "gradient overflow").item())


def name_in_groups(groups: list[dict[str, Any]], index: int) -> str:
    """Returns a parameter's position in the optimizers, with its name if they were given names."""
    names: dict[int, str] = {}
    for group in groups:
        for p, name in zip(group["params"], group.get("param_names", ()), strict=False):
            names[id(p)] = f" ({name})"
    parameters = list(parameters_of(groups))
    return f"parameter {index} of {len(parameters)}{names.get(id(parameters[index]), '')}"


def multiply_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies all gradients in place; 16-bit gradients are rounded once, ``factor`` is not rounded.

    Args:
        parameters: the parameters whose gradients are multiplied.
        factor: one number, fp32 or fp64, on any device.
    """
    parameters = list(parameters)
    if any_on_disk(parameters):
        with reading_gradients(parameters):
            for members in gradients_in_memory(parameters, changes=True) if factor.item() != 1 else ():
                _multiply(_gradients(members), factor)
        return
    sent = copies_of(parameters)
    if sent and _split(_gradients(parameters), "scale_")[1]:
        sent = []
    numbers: dict[int, SentNumber] = {}
    for copy in sent:
        copy.multiply_by(factor, numbers)
    _multiply(_gradients(parameters), factor)
    for copy in sent:
        copy.note_change()


def _multiply(gradients: Sequence[Tensor], factor: Tensor) -> None:
    taken, others = _split(gradients, "scale_")
    for grads in taken:
        _ops.scale_(grads, factor)
    if others:
        number = factor.item()  # the host waits, where there is no kernel
        for grad in others if number != 1 else ():
            grad.mul_(number)


def grad_rescale(param_groups: Iterable[Any], scale: float) -> None:
    """Divides all gradients in place.

    Args:
        param_groups: group dicts as of ``optimizer.param_groups``.
        scale: divisor, normally the loss scale.
    """
    parameters = list(parameters_of(param_groups))
    with reading_gradients(parameters):
        for members in gradients_in_memory(parameters, changes=True):
            for grads in _by_kind(_gradients(members)):
                torch._foreach_div_(grads, scale)
