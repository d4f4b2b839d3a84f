"""torch.compile around a whole model: what lies outside blocks is compiled, and what gathers or communicates is left as
it is; nothing that a model learns depends on it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import nn

import bmtrain
from bmtrain.optim import AdamOptimizer, OptimManager
from bmtrain.parameter import full_value
from bmtrain.wrapper import model_wrapper_dispatch

BACKENDS = ("eager", "aot_eager")


def shifted(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return x + by


class Model(bmtrain.DistributedModule):
    """Reads of parameters outside blocks: large, small, of a plain module, in Blocks, for a function, tied."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.embedding = bmtrain.DistributedParameter(torch.randn(300, 256) / 16)
        self.shift = bmtrain.DistributedParameter(torch.zeros(256))
        self.norm = model_wrapper_dispatch(nn.LayerNorm(256))
        self.linear = bmtrain.nn.Linear(256, 256)
        bmtrain.init_parameters(self)
        inner = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(2)]
        self.layers = nn.ModuleList(
            [bmtrain.Block(model_wrapper_dispatch(module), use_checkpoint=recompute) for module in inner]
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = shifted(self.linear(torch.nn.functional.embedding(ids, self.embedding)), self.shift)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        hidden = torch.nn.functional.linear(hidden, self.layers[0][0].weight, self.layers[1][0].bias)
        logits: torch.Tensor = self.norm(hidden) @ self.embedding.t()
        return logits


def train(recompute: bool, backend: str | None) -> list[torch.Tensor]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(recompute)
    call: Any = model if backend is None else torch.compile(model, backend=backend)
    optimizer = AdamOptimizer(model.parameters(), lr=1e-2)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    losses = []
    for step in range(3):
        manager.zero_grad()
        generator = torch.Generator().manual_seed(2 * step + bmtrain.rank())
        ids = torch.randint(300, (4, 5 + step), generator=generator)  # a new length compiles anew
        logits = call(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        manager.backward(loss)
        manager.step()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(call(ids))
    return [*losses, *(full_value(p) for p in model.parameters())]


def compare() -> None:
    for recompute, backend in zip((True, False), BACKENDS, strict=True):
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "a parameter was read outside of Blocks")
            torch.compile(Model(recompute), backend=backend)(
                torch.zeros(2, 3, dtype=torch.long)
            ).sum().backward()
        for x, y in zip(train(recompute, backend), train(recompute, None), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        Exception, match=r"bmtrain gathers and communicates here; compile what is inside blocks"
    ):
        torch.compile(Model(False), backend="eager", fullgraph=True)(torch.zeros(2, 3, dtype=torch.long))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_model_trains_as_it_does_without(world_size: int) -> None:
    run_ranks(world_size, compare, timeout=180)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(x).tanh()
        return result


def compile_anew() -> None:
    torch.manual_seed(0)
    inner: Any = model_wrapper_dispatch(Inner())
    block = bmtrain.Block(inner, use_checkpoint=False)
    x = torch.randn(3, 6)
    expected = block(x)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in block.parameters()]
    for backend in BACKENDS:
        torch._dynamo.reset()
        inner.compile(backend=backend, fullgraph=True)
        for number in (2, 3):  # gradients are there already
            block(torch.randn(number, 6))
        torch.testing.assert_close(block(x), expected)
    for p, gradient in zip(block.parameters(), gradients, strict=True):
        assert torch.equal(p.grad, gradient)


def test_blocks_are_compiled_while_gradients_of_shards_are_there() -> None:
    run_ranks(2, compile_anew, timeout=120)


class Parallel(bmtrain.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.up = bmtrain.nn.ColumnParallelLinear(16, 32)
        self.down = bmtrain.nn.RowParallelLinear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.up(x).tanh())
        return result


def mean_of_ranks(x: torch.Tensor) -> torch.Tensor:
    return bmtrain.distributed.all_reduce(x.sin(), "avg").cos()


def communicate() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 16, requires_grad=True)
    module = Parallel()
    bmtrain.init_parameters(module)
    block = bmtrain.Block(module)
    found = []
    for backend in (None, *BACKENDS):
        x.grad = None
        if backend is not None:
            torch._dynamo.reset()
            module.compile(backend=backend)
        function: Any = mean_of_ranks if backend is None else torch.compile(mean_of_ranks, backend=backend)
        y, z = block(x), function(x)
        (y.sum() + z.sum()).backward()
        assert x.grad is not None
        found.append((y.detach(), z.detach(), x.grad))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b)


def test_collectives_and_divided_layers_break_the_graph() -> None:
    run_ranks(2, communicate, init={"tp_size": 2}, timeout=120)


def stepped(compiles: bool, in_block: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)  # an optimizer of it is looked at as well, once something was wrapped
    model: nn.Module = bmtrain.BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model = bmtrain.Block(model) if in_block else model
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    steps = [torch.compile(o.step, backend="eager") if compiles else o.step for o in optimizers]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(model(torch.ones(2, 4))).square().sum().backward()
        for step in steps:
            step()
    return [*(full_value(p) for p in model.parameters()), *(p.detach() for p in plain.parameters())]


def compare_steps() -> None:
    for in_block in (False, True):
        for x, y in zip(stepped(True, in_block), stepped(False, in_block), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    early = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(early.parameters(), lr=0.1)
    bmtrain.BMTrainModelWrapper(early)
    with pytest.raises(Exception, match="no longer the model's"):
        torch.compile(optimizer.step, backend="eager")()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_optimizer_step_is_the_step(world_size: int) -> None:
    run_ranks(world_size, compare_steps)


def compiled_steps(cls: Any, compiles: str) -> list[torch.Tensor]:
    """Trains with the parts in ``compiles`` compiled: the model, the optimizer's step, or a step with all its calls."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inner = bmtrain.Block(model_wrapper_dispatch(nn.Linear(4, 4)))
    model = bmtrain.BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 4), inner))
    optimizer = cls(model.parameters(), lr=0.1)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    call: Any = torch.compile(model, backend="eager") if "model" in compiles else model
    step: Any = torch.compile(optimizer.step, backend="eager") if "optimizer" in compiles else manager.step

    def whole_step(x: torch.Tensor) -> torch.Tensor:
        manager.zero_grad()
        loss = call(x).square().mean()
        manager.backward(loss)
        if cls is not torch.optim.SGD:
            manager.clip_grad_norm(optimizer.param_groups, 0.5)
        step()
        return loss.detach()

    run: Any = torch.compile(whole_step, backend="eager") if "all" in compiles else whole_step
    losses = [run(torch.linspace(-1, 1, 8).view(2, 4) + bmtrain.rank()) for _ in range(2)]
    return [*losses, *(full_value(p) for p in model.parameters())]


def compare_whole_steps() -> None:
    for cls, compiles in (
        (torch.optim.SGD, "model and optimizer"),
        (bmtrain.optim.SGDOffloadOptimizer, "all"),
    ):
        for x, y in zip(compiled_steps(cls, compiles), compiled_steps(cls, ""), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_compiled_steps_train_as_they_do_without() -> None:
    run_ranks(2, compare_whole_steps, timeout=180)
