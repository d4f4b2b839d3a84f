"""Plain torch models and their sharded twins, and how to compare the two.

    plain, model = twins(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()))

Both hold the same values; `model` is made of distributed modules. Ranks see different batches (`batches`), and
a rank can compute on its own what all ranks together should get, because it can make every rank's batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

import bmtrain
from bmtrain.parameter import DistributedParameter, full_value, gather_flat

__all__ = [
    "Layer",
    "batches",
    "check_gradients",
    "check_values",
    "distribute",
    "full_gradient",
    "summed_reference",
    "twins",
]


class Layer(torch.nn.Module):
    """A small residual layer with parameters of sizes that no world size divides evenly."""

    def __init__(self, dim: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.up = torch.nn.Linear(dim, 2 * dim + 1)
        self.down = torch.nn.Linear(2 * dim + 1, dim)
        self.dropout = torch.nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.calls += 1
        for extra in rest:
            if extra is not None:
                x = x + extra
        change: torch.Tensor = self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return x + change


def _distributed_class(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    name = f"Distributed{kind.__name__}"
    known: type[torch.nn.Module] | None = globals().get(name)
    if known is None or not issubclass(known, kind):
        known = type(name, (bmtrain.DistributedModule, kind), {"__module__": __name__})
        globals()[name] = known  # where pickle looks for it
    return known


def distribute(module: torch.nn.Module) -> torch.nn.Module:
    """Makes a plain module tree distributed, in place; a parameter used twice stays one."""
    made: dict[int, DistributedParameter] = {}
    for part in module.modules():
        own = list(part._parameters.items())
        part.__class__ = _distributed_class(type(part))
        for name, param in own:
            if param is not None:
                if id(param) not in made:
                    made[id(param)] = DistributedParameter(param.detach(), requires_grad=param.requires_grad)
                part._parameters[name] = made[id(param)]
    return module


def twins(make: Callable[[], torch.nn.Module], seed: int = 0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A plain model, and the same one distributed."""
    torch.manual_seed(seed)
    plain = make()
    return plain, distribute(copy.deepcopy(plain))


def batches(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """One input for each rank, the same list on all ranks."""
    generator = torch.Generator().manual_seed(1234 + seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(bmtrain.world_size())]


def full_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """The gradient in full shape, from all ranks' shards. Collective."""
    if not isinstance(param, DistributedParameter):
        return param.grad
    if param.grad is None:
        return None
    assert param.grad.shape == param.shape
    return gather_flat(param, param.grad).view(param._original_shape)


def check_gradients(
    plain: torch.nn.Module | Iterable[torch.Tensor],
    model: torch.nn.Module | Iterable[torch.Tensor],
    *,
    tolerance: float = 1e-6,
    none_is_zero: bool = False,
) -> None:
    """Every gradient of ``model`` equals that of ``plain``, to ``tolerance`` of its maximum."""
    wanted = list(plain.parameters() if isinstance(plain, torch.nn.Module) else plain)
    got = list(model.parameters() if isinstance(model, torch.nn.Module) else model)
    assert len(wanted) == len(got)
    for index, (expected, param) in enumerate(zip(wanted, got, strict=True)):
        want, have = expected.grad, full_gradient(param)
        if want is None and none_is_zero:
            want = torch.zeros_like(expected)
        assert (want is None) == (have is None), f"parameter {index}: {want} and {have}"
        if want is not None and have is not None:
            limit = tolerance * max(want.abs().max().item(), 1e-3) if want.numel() else 0
            difference = (have - want).abs().max().item() if want.numel() else 0.0
            assert difference <= limit, f"parameter {index}: differs by {difference}, allowed {limit}"


def check_values(plain: torch.nn.Module, model: torch.nn.Module) -> None:
    """Every parameter of ``model`` has the value it has in ``plain``, bit for bit."""
    for expected, param in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(full_value(param), expected.detach())


def summed_reference(run: Callable[[int], torch.Tensor]) -> list[float]:
    """Runs ``run(rank).backward()`` for every rank, so that gradients add; returns the losses."""
    losses = []
    for rank in range(bmtrain.world_size()):
        loss = run(rank)
        loss.backward()
        losses.append(loss.item())
    return losses
