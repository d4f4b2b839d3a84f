"""Blocks whose inner module is compiled by torch: they train as uncompiled ones do, with the same messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import nn

import bmtrain
from bmtrain._engine.engine import current_engine
from bmtrain._engine.observer import Observer
from bmtrain.global_var import context
from bmtrain.optim import AdamOffloadOptimizer, OptimManager
from bmtrain.parameter import full_value
from bmtrain.wrapper import model_wrapper_dispatch

# Without it inductor leaves processes of its own behind.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * torch.sigmoid(x)


class Counter(Observer):
    """Writes down which block was gathered or reduced."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def gathering(self, runtime: Any) -> None:
        self.events.append(f"gather {runtime.label}")

    def reducing(self, runtime: Any, groups: Any) -> None:
        self.events.append(f"reduce {runtime.label}")


def train(
    backend: str | None, recompute: bool, mode: str | None = None
) -> tuple[list[torch.Tensor], list[str], list[str]]:
    torch.manual_seed(0)
    blocks = []
    for _ in range(2):
        inner = model_wrapper_dispatch(Inner())
        if backend is not None:
            inner.compile(backend=backend, fullgraph=True, mode=mode)
        blocks.append(bmtrain.Block(inner, use_checkpoint=recompute))
    model = nn.Sequential(*blocks)
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=1e-2)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    engine, losses = current_engine(context()), []
    before, engine.observer = engine.observer, Counter()
    try:
        for step in range(4):
            manager.zero_grad()
            generator = torch.Generator().manual_seed(2 * step + bmtrain.rank())
            loss = (model(torch.randn(3, 16, generator=generator)) - 1).square().mean()
            manager.backward(loss)
            manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
            manager.step()
            losses.append(loss.detach())
        events = [event.split()[0] for event in engine.observer.events]
    finally:
        engine.observer = before
    weights = [full_value(p) for p in model.parameters()]
    return [*losses, *weights], events, sorted(model.state_dict())


def compare(backend: str, recompute: bool, mode: str | None = None) -> None:
    expected, messages, names = train(None, recompute)
    compiled, messages_compiled, names_compiled = train(backend, recompute, mode)
    for a, b in zip(compiled, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert messages_compiled == messages
    assert names_compiled == names


@pytest.mark.parametrize("recompute", (True, False))
def test_traced_and_differentiated_ahead(recompute: bool) -> None:
    """All of torch.compile but the code it generates."""
    run_ranks(2, compare, "aot_eager", recompute, environment=ENVIRONMENT, timeout=180)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])  # without CUDA graphs: these need a GPU
def test_compiled_code(mode: str | None) -> None:
    run_ranks(1, compare, "inductor", True, mode, environment=ENVIRONMENT, timeout=300)
