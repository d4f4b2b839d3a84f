"""Programs over blocks on a drive: the bits of the same programs in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.disk_tier import ALL, TIERS, small_chunks
from harness.offloaded import Layer, Model, values_of

import bmtrain as bmt

ADAM = bmt.optim.AdamOptimizer


def built(places: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    with bmt.default_policy(bmt.BlockPolicy(**places)):
        return Model().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + bmt.rank())
    return torch.randn(3, 40, generator=generator).to(dtype)


def steps(model: Any, manager: Any, numbers: range, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    losses = []
    for step in numbers:
        manager.zero_grad()
        losses.append(model(batch(step, dtype)).float().square().mean())
        manager.backward(losses[-1])
        manager.step()
    return [loss.detach() for loss in losses]


def managed(*optimizers: Any, **options: Any) -> Any:
    manager = bmt.optim.OptimManager(**options)
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    return manager


class LowRank(bmt.DistributedModule):
    """A linear layer that stays as it is, and a trained product of two small matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.base = bmt.DistributedParameter(torch.randn(40, 40) / 8, requires_grad=False)
        self.down = bmt.DistributedParameter(torch.randn(4, 40) / 8)
        self.up = bmt.DistributedParameter(torch.zeros(40, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        result: torch.Tensor = x + linear(x, self.base).tanh() + linear(linear(x, self.down), self.up)
        return result


def low_rank(places: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    with bmt.default_policy(bmt.BlockPolicy(**places)):
        model = bmt.TransformerBlockList([bmt.Block(LowRank()) for _ in range(3)])
    optimizer = ADAM([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = steps(model, managed(optimizer), range(3))
    return [*losses, *values_of(model, [optimizer])]


def frozen(places: dict[str, Any]) -> list[torch.Tensor]:
    model = built(places)
    for p in model.layers[1].parameters():
        p.requires_grad_(False)
    optimizer = ADAM(model.parameters(), lr=0.01)
    losses = steps(model, managed(optimizer), range(2))
    for number in (1, 2):  # the other way round, in mid-training
        for p in model.layers[number].parameters():
            p.requires_grad_(number == 1)
    losses += steps(model, managed(optimizer), range(2, 5))
    return [*losses, *values_of(model, [optimizer])]


def averaged(places: dict[str, Any]) -> list[torch.Tensor]:
    """Evaluates a running average, which takes the parameters' place meanwhile."""
    model = built(places)
    optimizer = ADAM(model.parameters(), lr=0.01)
    manager = managed(optimizer)
    average = [p.detach().clone() for p in model.parameters()]
    losses = []
    for step in range(4):
        losses += steps(model, manager, range(step, step + 1))
        with torch.no_grad():
            for own, p in zip(average, model.parameters(), strict=True):
                own.lerp_(p if step % 2 else p.data, 0.5)
        kept = [p.data.clone() for p in model.parameters()]
        for own, p in zip(average, model.parameters(), strict=True):
            if step % 2:
                p.data.copy_(own)
            else:
                p.data = own
        with torch.no_grad():
            losses.append(model(batch(50 + step)).square().mean())
        for own, p in zip(kept, model.parameters(), strict=True):
            p.data.copy_(own)
    return [*losses, *average, *values_of(model, [optimizer])]


def swapped(places: dict[str, Any]) -> list[torch.Tensor]:
    """As `averaged`, with tensors that change places."""
    model = built(places)
    optimizer = ADAM(model.parameters(), lr=0.01)
    other = [torch.full_like(p, 0.01) for p in model.parameters()]
    losses = []
    for step in range(3):
        losses += steps(model, managed(optimizer), range(step, step + 1))
        for _ in range(2):
            for number, p in enumerate(model.parameters()):
                p.data, other[number] = other[number], p.data
            with torch.no_grad():
                losses.append(model(batch(50 + step)).square().mean())
    return [*losses, *other, *values_of(model, [optimizer])]


def initialised_again(places: dict[str, Any]) -> list[torch.Tensor]:
    model = built(places)
    for p in model.parameters():
        p._init_method = torch.nn.init.normal_
    optimizer = ADAM(model.parameters(), lr=0.01)
    losses = steps(model, managed(optimizer), range(2))
    losses.append(model(batch(5)).sum().detach())
    bmt.init_parameters(model.layers[2])
    losses += steps(model, managed(optimizer), range(2, 4))
    return [*losses, *values_of(model, [optimizer])]


def accumulated(places: dict[str, Any]) -> list[torch.Tensor]:
    model = built(places)
    optimizer = ADAM(model.parameters(), lr=0.01)
    losses = steps(model, managed(optimizer, accumulate=3), range(7))
    return [*losses, *values_of(model, [optimizer])]


def scaled(places: dict[str, Any]) -> list[torch.Tensor]:
    """Steps that are skipped, since gradients overflow."""
    model = built(places, torch.float16)
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=0.01)
    manager = managed(optimizer, loss_scale=2.0**22, loss_scale_steps=2)
    losses = steps(model, manager, range(10), torch.float16)
    assert manager.loss_scale < 2**22
    scale = torch.tensor(manager.loss_scale)
    return [*losses, scale, *values_of(model, [optimizer])]


def changed(places: dict[str, Any]) -> list[torch.Tensor]:
    """Writes to parameters between steps, which the masters follow."""
    model = built(places, torch.bfloat16)
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=0.01)
    losses = []
    for step in range(4):
        losses += steps(model, managed(optimizer), range(step, step + 1), torch.bfloat16)
        for number, p in enumerate(model.parameters()):
            if number % 3 != step % 3:
                p.data.mul_(0.9)
    return [*losses, *values_of(model, [optimizer])]


def divided(places: dict[str, Any]) -> list[torch.Tensor]:
    """Two optimizers, each of them for a part of every block; one of them does not step each time."""
    model = built(places)
    named = list(model.named_parameters())
    optimizers = [
        kind([p for name, p in named if ("bias" in name) == is_bias], lr=0.01)
        for kind, is_bias in ((ADAM, True), (bmt.optim.LionOptimizer, False))
    ]
    losses = steps(model, managed(*optimizers), range(2))
    for step in range(2, 5):
        losses.append(model(batch(step)).square().mean())
        losses[-1].backward()
        optimizers[step % 2].step()
        optimizers[step % 2].zero_grad(set_to_none=bool(step % 3))
    return [*(loss.detach() for loss in losses), *values_of(model, optimizers)]


def half(places: dict[str, Any]) -> list[torch.Tensor]:
    model = built(places)
    optimizer = ADAM([p for layer in list(model.layers)[2:] for p in layer.parameters()], lr=0.01)
    losses = steps(model, managed(optimizer), range(3))
    gradients = [
        p.grad.clone() for layer in list(model.layers)[:2] for p in layer.parameters()
    ]  # which add up
    return [*losses, *gradients, *values_of(model, [optimizer])]


def evaluated(places: dict[str, Any]) -> list[torch.Tensor]:
    model = built(places)
    optimizer = ADAM(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        loss = model(batch(step)).square().mean()
        with torch.no_grad():  # between forward and backward
            losses.append(model.eval()(batch(20)).sum())
        model.train()
        optimizer.zero_grad()
        loss.backward()
        with torch.inference_mode():  # between backward and step
            losses.append(model(batch(21)).sum().clone())
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *values_of(model, [optimizer])]


def failed(places: dict[str, Any]) -> list[torch.Tensor]:
    """Exceptions in forward and backward of a block, and another try."""
    model = built(places)
    optimizer = ADAM(model.parameters(), lr=0.01)
    manager = managed(optimizer)
    losses = steps(model, manager, range(2))

    def fail(*_: Any) -> None:
        raise KeyError("stop")

    for step in range(2, 5):
        handle = model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            model(batch(step))
        handle.remove()
        x = model.layers(batch(step))
        x.register_hook(fail)
        with pytest.raises(KeyError):
            x.sum().backward()
        losses += steps(model, manager, range(step, step + 1))
    return [*losses, *values_of(model, [optimizer])]


class Mixed(bmt.DistributedModule):
    """Blocks in different places, some of which run twice or not at all; the head has two of their weights."""

    def __init__(self, kinds: list[dict[str, Any]]) -> None:
        super().__init__()
        self.first = bmt.DistributedParameter(torch.randn(40, 40))
        self.layers = bmt.TransformerBlockList(
            [bmt.Block(Layer(), policy=bmt.BlockPolicy(**places)) for places in kinds]
        )
        self.tied = self.layers[0]._module._parameters["weight"]
        self.other = self.layers[1]._module._parameters["weight"]

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        x = x @ self.first
        for number in order:
            x = self.layers[number](x)
        return x @ self.tied + x @ self.other.T


def mixed(places: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = Mixed([places, {}, *TIERS[1:]] if places else [{}] * 6)
    optimizer = ADAM(model.parameters(), lr=0.01)
    losses = []
    orders = [(0, 1, 2, 3, 4, 5), (5, 1, 1, 0, 0), (2, 3, 4), (0, 5, 0, 1, 5), (0, 1, 2, 3, 4, 5)]
    for step, order in enumerate(orders):
        for micro_batch in range(2):
            losses.append(model(batch(10 * step + micro_batch), order).square().mean())
            losses[-1].backward()
        losses.append(bmt.optim.clip_grad.clip_gradients(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
    return [*(loss.detach() for loss in losses), *values_of(model, [optimizer])]


def recurring(places: dict[str, Any]) -> list[torch.Tensor]:
    """Backwards that come back to a block whose gradients are being written."""
    model = built(places)
    optimizer = ADAM(model.parameters(), lr=0.01)
    losses = []
    for early in (False, True):
        manager = managed(optimizer, step_in_backward=early)
        for step, order in enumerate([(0, 1, 2, 0), (0, 1, 0), (4, 3, 2, 1, 0, 1, 2, 3, 4)]):
            manager.zero_grad()
            x = batch(step) @ model.first
            for number in order:
                x = model.layers[number](x)
            losses.append(x.square().mean())
            manager.backward(losses[-1])
            manager.step()
    return [*(loss.detach() for loss in losses), *values_of(model, [optimizer])]


PROGRAMS: list[Callable[[dict[str, Any]], list[torch.Tensor]]] = [
    low_rank,
    frozen,
    averaged,
    swapped,
    initialised_again,
    accumulated,
    scaled,
    changed,
    divided,
    half,
    evaluated,
    failed,
    mixed,
    recurring,
]


def compare(program: Callable[[dict[str, Any]], list[torch.Tensor]]) -> None:
    small_chunks()
    expected = program({})
    for places in (TIERS[1], ALL):
        found = program(places)
        assert len(found) == len(expected)
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(a, b), f"{places}: value {number} of {len(expected)} differs"


@pytest.mark.parametrize("program", PROGRAMS)
def test_same_bits(program: Any, drive: Path) -> None:
    environment = {"BMTRAIN_POISON_BUFFERS": "1"}
    run_ranks(2, compare, program, init={"tier_directories": [str(drive)]}, environment=environment)
