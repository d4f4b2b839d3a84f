"""The candidates of ``bench adam``: steps of this library's optimizers, of torch's and of others."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..optim import (
    AdamOffloadOptimizer,
    AdamOptimizer,
    LionOffloadOptimizer,
    LionOptimizer,
    SGDOffloadOptimizer,
    SGDOptimizer,
)
from ..optim._arrays import MASTER, MOMENTS

_SCALE = 1024.0
_MOVER = "ceiling: one pass that only moves"
_COPIER = "ceiling: copy"
_CODED = "16-bit: AdamOffload, 8-bit moments"
_CODED_MOVER = "ceiling: one pass that only moves, 8-bit moments"
_NARROW = ("16-bit: AdamOffload, bf16 moments", _CODED, "fp32: AdamOffload, 8-bit moments")


class Size(NamedTuple):
    """A number of tensors of 2^exponent elements."""

    num_tensors: int
    exponent: int

    @classmethod
    def read(cls, text: str) -> Size:
        """Parses ``26`` or ``100x16``."""
        count, _, exponent = text.rpartition("x")
        return cls(int(count or 1), int(exponent))

    @property
    def numel(self) -> int:
        return self.num_tensors << self.exponent

    def __str__(self) -> str:
        return f"{self.num_tensors} x 2^{self.exponent}" if self.num_tensors > 1 else f"2^{self.exponent}"


class Formula(NamedTuple):
    """A step, and the library that computes it."""

    name: str
    num_bytes: int  # that a step touches, per element
    ceiling: str
    ours: tuple[str, ...]
    candidates: Callable[[Size], dict[str, Callable[[], Any]]]
    own_ceilings: Mapping[str, str] = MappingProxyType({})  # of candidates that move other bytes


def _adam(size: Size) -> dict[str, Callable[[], Any]]:
    grads = _gradients(size)
    own = _own("Adam", AdamOptimizer, AdamOffloadOptimizer, size, grads)
    candidates = {_MOVER: _mover(own["16-bit: AdamOffload"]), _COPIER: _copier(28 * size.numel)}
    candidates |= _steppers(own)
    for name in _NARROW:
        dtype = torch.float32 if name.startswith("fp32") else torch.bfloat16
        moments = torch.bfloat16 if "bf16" in name else torch.int8
        narrow = AdamOffloadOptimizer(_parameters(size, dtype, grads), overlap=False, state_dtype=moments)
        candidates[name] = _stepper(narrow)
        if name == _CODED:
            candidates[_CODED_MOVER] = _mover(narrow)
    for kind in ("fused", "foreach"):
        candidates |= _peer(f"torch AdamW {kind}", size, grads, torch.optim.AdamW, **{kind: True})
    if (deepspeed := _imported("deepspeed.ops.adam", "DeepSpeedCPUAdam")) is not None:
        candidates |= _peer("DeepSpeedCPUAdam", size, grads, deepspeed, adamw_mode=True)
    if (in_8_bits := _imported("bitsandbytes.optim", "AdamW8bit")) is not None:
        candidates |= _peer("bitsandbytes AdamW8bit", size, grads, in_8_bits)
    return candidates


def _sgd(size: Size) -> dict[str, Callable[[], Any]]:
    grads = _gradients(size)
    candidates = {_COPIER: _copier(20 * size.numel)}
    candidates |= _steppers(_own("SGD", SGDOptimizer, SGDOffloadOptimizer, size, grads, momentum=0.9))
    for kind in ("fused", "foreach"):
        candidates |= _peer(f"torch SGD {kind}", size, grads, torch.optim.SGD, momentum=0.9, **{kind: True})
    return candidates


def _lion(size: Size) -> dict[str, Callable[[], Any]]:
    candidates = {_COPIER: _copier(20 * size.numel)}
    own = _own("Lion", LionOptimizer, LionOffloadOptimizer, size, _gradients(size))
    return candidates | _steppers(own)


def _titles(name: str, *more: str) -> tuple[str, ...]:
    kinds = (f"{name}Optimizer", f"{name}Offload")
    return (*(f"{title}: {kind}" for title in ("16-bit", "fp32") for kind in kinds), *more)


#: By the name that ``--formula`` takes.
FORMULAS = {
    "adam": Formula("Adam", 28, _MOVER, _titles("Adam", *_NARROW), _adam, {_CODED: _CODED_MOVER}),
    "sgd": Formula("SGD", 20, _COPIER, _titles("SGD"), _sgd),
    "lion": Formula("Lion", 20, _COPIER, _titles("Lion"), _lion),
}


# ---- candidates


def _own(
    name: str, on_device: Any, offloaded: Any, size: Size, grads: list[Tensor], **options: Any
) -> dict[str, Any]:
    """Both forms of an optimizer of this library, for both kinds of parameters."""
    optimizers = {}
    for dtype, title in ((torch.bfloat16, "16-bit"), (torch.float32, "fp32")):
        params = _parameters(size, dtype, grads)
        optimizers[f"{title}: {name}Optimizer"] = on_device(params, **options)
        params = _parameters(size, dtype, grads)
        optimizers[f"{title}: {name}Offload"] = offloaded(params, overlap=False, **options)
    return optimizers


def _peer(
    name: str, size: Size, grads: list[Tensor], make: Any, **options: Any
) -> dict[str, Callable[[], Any]]:
    """Another library's optimizer for fp32 parameters, alone and with the casts of 16-bit training."""
    params = _parameters(size, torch.float32, grads)
    optimizer = make(params, **options)
    return {
        f"fp32: {name}": optimizer.step,
        f"16-bit: casts, unscale, {name}": _by_casts(params, grads, optimizer),
    }


def _gradients(size: Size) -> list[Tensor]:
    return [torch.randn(1 << size.exponent).bfloat16() for _ in range(size.num_tensors)]


def _parameters(size: Size, dtype: torch.dtype, grads: list[Tensor]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(1 << size.exponent).to(dtype)) for _ in grads]
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad.to(dtype, copy=True)
    return params


def _steppers(optimizers: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    return {name: _stepper(optimizer) for name, optimizer in optimizers.items()}


def _stepper(optimizer: Any) -> Callable[[], Any]:
    return lambda: optimizer.step(scale=_SCALE)


def _imported(module: str, name: str) -> Any:
    """An optimizer of another library, where that is installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


def _by_casts(params: list[nn.Parameter], grads: list[Tensor], optimizer: Any) -> Callable[[], Any]:
    """The work of a 16-bit training loop around an optimizer that supports fp32 only."""
    rounded = [p.detach().bfloat16() for p in params]
    wide = [p.grad for p in params if p.grad is not None]

    def step() -> None:
        torch._foreach_copy_(wide, grads)
        torch._foreach_mul_(wide, 1 / _SCALE)
        optimizer.step()
        torch._foreach_copy_(rounded, [p.detach() for p in params])

    return step


def _mover(optimizer: Any) -> Callable[[], Any]:
    """The loads and stores of an optimizer's 16-bit step, over the same memory, in one pass."""
    optimizer.step(scale=_SCALE)  # so that there is a state
    params = optimizer.param_groups[0]["params"]
    weights, exp_avgs, exp_avg_sqs = (
        [optimizer.state[p][name] for p in params] for name in (MASTER, *MOMENTS)
    )
    rounded, grads = [p.detach() for p in params], [p.grad for p in params]
    return lambda: torch.ops.bmtrain.adam_move_(weights, rounded, grads, exp_avgs, exp_avg_sqs)


def _copier(num_bytes: int) -> Callable[[], Any]:
    """Copies bytes: half of them are read, half are written."""
    source = torch.ones(num_bytes // 2, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)
