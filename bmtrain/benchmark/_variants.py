"""The training steps that ``bench step`` compares: one model and one batch, sharded in different ways or not at all."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .._engine.policy import BlockPolicy
from ..global_var import context, world_size
from ..optim import AdamOptimizer
from ._training import sharded, silence, stepping

#: Trains on a batch of ids and returns the loss.
Step: TypeAlias = Callable[[Tensor], float]
_Build: TypeAlias = Callable[[], nn.Module]


def reference_of(variant: str) -> str:
    """The variant without communication that does the same work.

    >>> reference_of("fsdp2-recompute"), reference_of("bmtrain-3-bf16")
    ('alone-recompute', 'alone-bf16')
    """
    return "alone" + "".join(f"-{mark}" for mark in ("recompute", "bf16") if mark in variant.split("-"))


def peer_of(variant: str) -> str | None:
    """FSDP2 with the same optimizer and precision, of one of ours with torch's optimizer.

    >>> peer_of("bmtrain-3-torch-recompute"), peer_of("bmtrain-3")
    ('fsdp2-recompute', None)
    """
    name = variant.removeprefix("bmtrain-3-torch")
    return None if name == variant else f"fsdp2{name}"


def import_all_modules() -> None:
    """Imports the modules of all variants, so that each has the same modules in memory."""
    for module in (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "torch.distributed.device_mesh",
        "torch.distributed.fsdp",
    ):
        import_module(module)


def _training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _seeded(build: _Build, bf16: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    return model.bfloat16() if bf16 else model


def _alone(recompute: bool = False, bf16: bool = False) -> Callable[[_Build], Step]:
    def variant(build: _Build) -> Step:
        model = _seeded(build, bf16)
        if recompute:
            _checkpoint_layers(model)
        if bf16:  # torch's Adam keeps no fp32 master
            return _training(model, AdamOptimizer(model.parameters()))
        return _training(model, torch.optim.Adam(model.parameters(), fused=True))

    return variant


def _ddp(build: _Build) -> Step:
    model = nn.parallel.DistributedDataParallel(_seeded(build))
    return _training(model, torch.optim.Adam(model.parameters(), fused=True))


def _fsdp2(
    recompute: bool = False, reshard: bool = True, per_layer: bool = True, bf16: bool = False
) -> Callable[[_Build], Step]:
    def variant(build: _Build) -> Step:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(context("fsdp2").device.type, (world_size(),))
        precision = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            if bf16
            else MixedPrecisionPolicy()
        )
        model: Any = _seeded(build)
        if recompute:
            _checkpoint_layers(model)
        for layer in model.layers if per_layer else []:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=precision)
        return _training(model, torch.optim.Adam(model.parameters(), fused=True))

    return variant


def _checkpoint_layers(model: Any) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)


def _ours_with_torch(recompute: bool = False, bf16: bool = False) -> Callable[[_Build], Step]:
    """The same work as `_fsdp2`: torch's optimizer over fp32 shards, with the same dtypes of compute and reduction."""

    def variant(build: _Build) -> Step:
        policy = BlockPolicy(
            level=3,
            recompute="whole" if recompute else "off",
            compute_dtype=torch.bfloat16 if bf16 else None,
            reduce_dtype=torch.float32 if bf16 else None,
        )
        model = sharded(_seeded(build), policy)
        return _training(model, torch.optim.Adam(model.parameters(), fused=True))

    return variant


def _ours(level: int, recompute: bool = False, bf16: bool = False) -> Callable[[_Build], Step]:
    def variant(build: _Build) -> Step:
        policy = BlockPolicy(level=level, recompute="whole" if recompute else "off")
        model = sharded(_seeded(build, bf16), policy)
        # As torch's optimizers drop gradients.
        step = stepping(model, AdamOptimizer(model.parameters()), set_to_none=True)
        return lambda batch: float(step(batch))

    return variant


def _without_communication(build_variant: Callable[[_Build], Step]) -> Callable[[_Build], Step]:
    def variant(build: _Build) -> Step:
        with silence():
            return build_variant(build)

    return variant


#: Name -> what builds it. Names of ours begin with ``bmtrain-`` and the ZeRO level, those of FSDP2 with ``fsdp2``.
#: ``bmtrain-3-torch``: with the optimizer of FSDP2's.
#: ``silent-``: ours with communicators that move nothing (and so with other losses).
VARIANTS: dict[str, Callable[[_Build], Step]] = {
    "alone": _alone(),
    "ddp": _ddp,
    "fsdp2": _fsdp2(),
    "fsdp2-no-reshard": _fsdp2(reshard=False),
    "fsdp2-whole": _fsdp2(per_layer=False),
    "bmtrain-3": _ours(level=3),
    "silent-3": _without_communication(_ours(level=3)),
    "bmtrain-2": _ours(level=2),
    "bmtrain-1": _ours(level=1),
    "bmtrain-0": _ours(level=0),
    "silent-2": _without_communication(_ours(level=2)),
    "alone-recompute": _alone(recompute=True),
    "fsdp2-recompute": _fsdp2(recompute=True),
    "fsdp2-no-reshard-recompute": _fsdp2(recompute=True, reshard=False),
    "bmtrain-3-recompute": _ours(level=3, recompute=True),
    "bmtrain-3-torch": _ours_with_torch(),
    "bmtrain-3-torch-recompute": _ours_with_torch(recompute=True),
    "alone-bf16": _alone(bf16=True),
    "fsdp2-bf16": _fsdp2(bf16=True),
    "fsdp2-no-reshard-bf16": _fsdp2(bf16=True, reshard=False),
    "bmtrain-3-bf16": _ours(level=3, bf16=True),
    "alone-recompute-bf16": _alone(recompute=True, bf16=True),
    "fsdp2-recompute-bf16": _fsdp2(recompute=True, bf16=True),
    "bmtrain-3-recompute-bf16": _ours(level=3, recompute=True, bf16=True),
    "bmtrain-3-torch-bf16": _ours_with_torch(bf16=True),
    "bmtrain-3-torch-recompute-bf16": _ours_with_torch(recompute=True, bf16=True),
}
