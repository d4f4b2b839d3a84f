"""A small model of every kind of parameter, with losses of single ranks and of all, and its manager."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import bmtrain as bmt
from bmtrain.optim import OptimManager
from bmtrain.parameter import gather_flat

WIDTH, BATCH = 6, 8


def _layer_class(base: Any) -> Any:
    class Layer(base):  # type: ignore[misc]
        def __init__(self, make: Any) -> None:
            super().__init__()
            self.weight = make(torch.randn(WIDTH, WIDTH) / 3)
            self.bias = make(torch.randn(WIDTH) / 3)
            self.gain = make(torch.tensor(1.5))  # empty on all ranks but the first

        def forward(self, x: Tensor) -> Tensor:
            inner: Tensor = torch.nn.functional.linear(x, self.weight, self.bias)
            output: Tensor = x + torch.tanh(inner) * self.gain
            return output

    return Layer


ShardedLayer, PlainLayer = _layer_class(bmt.DistributedModule), _layer_class(torch.nn.Module)


class Model(torch.nn.Module):
    """A layer outside blocks, two blocks, and a parameter that no loss uses."""

    def __init__(self, sharded: bool, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layer = ShardedLayer if sharded else PlainLayer
        make = bmt.DistributedParameter if sharded else torch.nn.Parameter
        self.first = layer(make)
        self.blocks = torch.nn.ModuleList(
            [bmt.Block(layer(make)) if sharded else layer(make) for _ in range(2)]
        )
        self.unused = make(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def batch(step: int = 0) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 + step))


def loss_of(model: Model, x: Tensor) -> Tensor:
    difference: Tensor = model(x) - x.flip(1)
    return (difference**2).mean()


def own_loss(model: Model, step: int = 0) -> Tensor:
    """This rank's loss over its part of the batch."""
    return loss_of(model, batch(step).chunk(bmt.world_size())[bmt.rank()])


def of_all_ranks(value: float) -> list[float]:
    """Every rank's value, in rank order."""
    gathered = torch.empty(bmt.world_size(), dtype=torch.float64)
    bmt.config["comm"].all_gather(gathered, torch.tensor([value], dtype=torch.float64)).wait()
    values: list[float] = gathered.tolist()
    return values


def whole(p: Tensor, local: Tensor | None) -> Tensor | None:
    """All ranks' parts of what is sharded like ``p``, flat."""
    return None if local is None else gather_flat(p, local.detach())


def assert_gradients(model: Model, reference: Model, factor: float = 1.0) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        grad = whole(p, p.grad)
        assert (grad is None) == (q.grad is None), name
        if grad is not None and q.grad is not None:
            expected = q.grad.reshape(-1)
            torch.testing.assert_close(
                grad * factor, expected, rtol=0, atol=1e-6 * float(expected.abs().max())
            )


def assert_weights(model: Model, reference: Model, **tolerance: float) -> None:
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        problem = f"{name}: {{}}".format
        torch.testing.assert_close(whole(p, p), q.detach().reshape(-1), msg=problem, **tolerance)  # type: ignore[arg-type]


def make_manager(optimizer: Any, scheduler: Any = None, **options: Any) -> OptimManager:
    manager = OptimManager(**options)
    manager.add_optimizer(optimizer, scheduler)
    return manager
