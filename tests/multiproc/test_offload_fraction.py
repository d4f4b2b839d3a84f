"""AdamOffloadOptimizer(fraction=): where the state of a block lies changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.optim import AdamOffloadOptimizer, OptimManager
from bmtrain.optim.places.residence import choose_residents

LAYERS = 3


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(16, 16) / 4)
        self.bias = bmt.DistributedParameter(torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.linear(x, self.weight, self.bias).tanh()


class Model(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = bmt.DistributedParameter(torch.randn(16, 16) / 4)
        self.layers = bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x @ self.first)
        return result


def train(dtype: torch.dtype, fraction: float | None, state: Any = None) -> tuple[list[torch.Tensor], Any]:
    """Six steps, or the last three of them from a state of the first three."""
    torch.manual_seed(5)
    model = Model().to(dtype)
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=1e-2, weight_decay=0.1, fraction=fraction)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    x = torch.randn(6, 4, 16)[:, bmt.rank() : bmt.rank() + 3].to(dtype)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    saved: Any = None
    for number in range(0 if state is None else 3, 6):
        if number == 3:
            saved = ({n: p.clone() for n, p in model.state_dict().items()}, optimizer.state_dict(gather=True))
        manager.zero_grad()
        manager.backward(model(x[number]).float().square().mean())
        manager.clip_grad_norm(optimizer.param_groups, max_norm=0.5)
        manager.step()
        pending = sum("_pending" in p.__dict__ for p in model.parameters())
        if fraction == 1:
            assert pending == 0
        elif fraction:  # of 3 blocks 2 stay; the other, and what is outside, are computed by workers
            assert 0 < pending <= 3
    assert optimizer.resident_fraction == pytest.approx({None: 0, 0: 0, 0.5: 2 / 3, 1: 1}[fraction])
    entries = optimizer.state_dict(gather=True)["state"].values()
    arrays = [value for entry in entries for value in entry.values() if torch.is_tensor(value)]
    return [*(p.detach().clone() for p in model.parameters()), *arrays], saved


def compare(dtype: torch.dtype) -> None:
    expected, state = train(dtype, 0)
    for fraction in (None, 0.5, 1):
        found, _ = train(dtype, fraction)
        again, _ = train(dtype, fraction, state)  # loaded before it is decided what stays
        for x, y, z in zip(expected, found, again, strict=True):
            assert torch.equal(x, y)
            assert torch.equal(x, z)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_no_bit_depends_on_it(dtype: torch.dtype) -> None:
    run_ranks(2, compare, dtype)


def choose() -> None:
    model = Model()
    everything: list[Any] = list(model.parameters())
    blocks = [[layer.weight, layer.bias] for layer in model.layers]
    block = sum(p.numel() for p in blocks[0])

    def numel(p: torch.Tensor) -> int:
        return p.numel()

    chosen, share = choose_residents(everything, None, numel, 2 * block)
    assert chosen == {id(p) for layer in blocks[:2] for p in layer}
    assert share == pytest.approx(2 / 3)
    assert choose_residents(everything, None, numel, 3 * block) == (
        {id(p) for layer in blocks for p in layer},
        1,
    )
    assert choose_residents(everything, None, numel, 3 * block + 256) == ({id(p) for p in everything}, 1)
    assert choose_residents(everything, None, numel, 0) == (set(), 0)
    assert choose_residents(everything, 0.1, numel, 0)[1] == pytest.approx(1 / 3)


def test_the_first_blocks_that_fit_stay() -> None:
    run_ranks(1, choose)


@pytest.mark.parametrize(("fraction", "error"), [(-0.1, ValueError), (1.1, ValueError), ("half", TypeError)])
def test_fractions_are_checked(fraction: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="fraction: expected a number"):
        AdamOffloadOptimizer([torch.nn.Parameter(torch.zeros(1))], fraction=fraction)
