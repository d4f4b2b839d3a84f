"""Gradients of weights of products, written straight into the buffer that is reduced: which are, and that no bit of
any gradient differs from plain torch's."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import bmtrain as bmt
from bmtrain._engine import call
from bmtrain._engine.engine import current_engine
from bmtrain.global_var import context
from bmtrain.wrapper import model_wrapper_dispatch

SIZE = 24


class Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)


class Weights(torch.nn.Module):
    """A square matrix, a row, and a bias; ``function(module, x)`` is its forward."""

    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(SIZE, SIZE))
        self.row = torch.nn.Parameter(torch.randn(1, SIZE))
        self.bias = torch.nn.Parameter(torch.randn(SIZE))
        self.inner = Product()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.function(self, x))


def train_twice(model: torch.nn.Module, loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def train_watched(model: torch.nn.Module, loss: torch.Tensor) -> None:
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    model.flops = counter.get_total_flops()  # type: ignore[assignment]


def train_hooked(model: torch.nn.Module, loss: torch.Tensor) -> None:
    next(p for n, p in model.named_parameters() if n.endswith("weight")).register_hook(lambda grad: 3 * grad)
    loss.backward()


def train_for_anomalies(model: torch.nn.Module, loss: torch.Tensor) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        loss.backward()


def train_under_autocast(model: torch.nn.Module, loss: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.float16):
        loss.backward()


def saved(module: Weights, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return F.linear(x, module.weight)


def checkpointed(module: Weights, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: F.linear(x, module.weight), x, use_reentrant=False)


def hooked(module: Weights, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, module.weight)
    y.register_hook(lambda grad: 2 * grad)
    return y


def watched(module: Weights, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, module.weight)
    y.grad_fn.register_prehook(lambda grads: (2 * grads[0],))
    return y


def watched_results(module: Weights, x: torch.Tensor) -> torch.Tensor:
    y = F.linear(x, module.weight)
    y.grad_fn.register_hook(lambda results, grads: tuple(r if r is None else 2 * r for r in results))
    return y


def hooked_transpose(module: Weights, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight.t()
    weight.register_hook(lambda grad: 2 * grad)
    return x @ weight


def watched_transpose(module: Weights, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight.t()
    weight.grad_fn.register_prehook(lambda grads: (2 * grads[0],))
    return x @ weight


def sparse(module: Weights, x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.detach().relu().to_sparse(), module.weight)


def sparse_with_bias(module: Weights, x: torch.Tensor) -> torch.Tensor:
    return torch.addmm(module.bias, x.detach().relu().to_sparse(), module.weight)


def inside(module: Weights, x: torch.Tensor) -> torch.Tensor:
    return module.inner(x, module.weight)


def look(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
    assert output.shape


kept: list[torch.Tensor] = []


def keep(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
    kept.append(output)


def train_with_kept(model: torch.nn.Module, loss: torch.Tensor) -> None:
    loss = loss + kept.pop().square().sum()
    loss.backward()
    kept.clear()


def kept_transpose(module: Weights, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight.t()
    weight.retain_grad()
    kept.append(weight)
    return x @ weight


def train_with_retained(model: torch.nn.Module, loss: torch.Tensor) -> None:
    loss.backward()
    (weight,) = (p for name, p in model.named_parameters() if name.endswith("weight"))
    assert torch.equal(kept.pop().grad.t().reshape(-1), weight.grad.reshape(-1))


def autocast(module: Weights, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16):
        return F.linear(x, module.weight).float()


@dataclasses.dataclass(frozen=True)
class Case:
    """``products``: how many are written in place, in one backward; ``hook``: of the inner module's forward."""

    forward: Callable[[Any, torch.Tensor], torch.Tensor]
    products: int
    train: Callable[[torch.nn.Module, torch.Tensor], None] = lambda model, loss: loss.backward()
    dims: tuple[int, ...] = (6, SIZE)
    policy: dict[str, Any] = dataclasses.field(default_factory=dict)
    hook: Callable[[torch.nn.Module, Any, torch.Tensor], None] | None = None


def linear(module: Weights, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, module.weight, module.bias)


CASES = {
    "linear": Case(linear, 1),
    "linear, 3 dimensions": Case(linear, 1, dims=(2, 3, SIZE)),
    "linear without bias": Case(lambda m, x: F.linear(x, m.weight), 1),
    "linear without bias, 3 dimensions": Case(lambda m, x: F.linear(x, m.weight), 1, dims=(2, 3, SIZE)),
    "product": Case(lambda m, x: x @ m.weight, 1),
    "addmm": Case(lambda m, x: torch.addmm(m.bias, x, m.weight), 1),
    "addmm with a factor": Case(lambda m, x: torch.addmm(m.bias, x, m.weight, alpha=2), 0),
    "weight from the left": Case(lambda m, x: (m.weight @ x.T).T, 0),
    "one row": Case(lambda m, x: F.linear(x, m.row) + F.linear(x, m.weight), 1),
    "weight used twice": Case(lambda m, x: F.linear(F.linear(x, m.weight), m.weight), 0),
    "transposed once, used twice": Case(lambda m, x: (lambda t: x @ t + x.tanh() @ t)(m.weight.t()), 0),
    "weight in a sum too": Case(lambda m, x: F.linear(x, m.weight) + m.weight.sum(), 0),
    "tensors packed by hooks": Case(saved, 0),
    "result with a hook": Case(hooked, 1),
    "node with a hook": Case(watched, 0),
    "node whose results have a hook": Case(watched_results, 0),
    "transpose with a hook": Case(hooked_transpose, 0),
    "transpose's node with a hook": Case(watched_transpose, 0),
    "transpose that keeps its gradient": Case(kept_transpose, 0, train_with_retained),
    "sparse from the left": Case(sparse, 0),
    "sparse from the left, with a bias": Case(sparse_with_bias, 0),
    "under autocast": Case(autocast, 0),
    "backward under autocast": Case(linear, 0, train_under_autocast),
    "recomputed": Case(linear, 1, policy={"recompute": "whole"}),
    "recomputed selectively": Case(linear, 1, policy={"recompute": "selective"}),
    "recomputed, packed by hooks": Case(saved, 1, policy={"recompute": "whole"}),
    "recomputed, recomputed within": Case(checkpointed, 1, policy={"recompute": "whole"}),
    "recomputed within": Case(checkpointed, 0),
    "recomputed, backward twice": Case(linear, 1, train_twice, policy={"recompute": "whole"}),
    "recomputed, parameter with a hook": Case(linear, 1, train_hooked, policy={"recompute": "whole"}),
    "recomputed, result with a hook": Case(hooked, 1, policy={"recompute": "whole"}),
    "module with a hook": Case(inside, 1, hook=look),
    "recomputed, module with a hook": Case(inside, 1, policy={"recompute": "whole"}, hook=look),
    "module with a hook that keeps": Case(inside, 1, train_with_kept, hook=keep),
    "recomputed, module with a hook that keeps": Case(
        inside, 1, train_with_kept, policy={"recompute": "whole"}, hook=keep
    ),
    "backward twice": Case(linear, 1, train_twice),
    "parameter with a hook": Case(linear, 1, train_hooked),
    "operations watched": Case(linear, 0, train_watched),
    "anomalies looked for": Case(linear, 0, train_for_anomalies),
}


@contextlib.contextmanager
def searches() -> Iterator[list[int]]:
    """Gives the number of products that each search of a graph has found."""
    found: list[int] = []
    original = call.write_products_in_place

    def counting(roots: Any, packed: bool, later: Any) -> int:
        found.append(original(roots, packed, later))
        return found[-1]

    call.write_products_in_place = counting
    try:
        yield found
    finally:
        call.write_products_in_place = original


def gradients(model: torch.nn.Module, case: Case, dtype: torch.dtype) -> dict[str, Any]:
    x = torch.linspace(-1, 1, 6 * SIZE, dtype=dtype).reshape(case.dims).requires_grad_()
    with searches() as found:
        case.train(model, model(x).square().sum())
    grads = {
        name.rpartition(".")[2]: None if p.grad is None else p.grad.reshape(-1)
        for name, p in model.named_parameters()
    }
    return {"x": x.grad, **grads, "flops": getattr(model, "flops", 0), "products": sum(found)}


def compare(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    plain = Weights(case.forward).to(dtype)
    torch.manual_seed(1)
    block = bmt.Block(
        model_wrapper_dispatch(Weights(case.forward).to(dtype)),
        policy=bmt.BlockPolicy(**{"recompute": "off", **case.policy}),
    )
    if case.hook is not None:
        for model in (plain, block):
            model.inner.register_forward_hook(case.hook)
    expected, found = gradients(plain, case, dtype), gradients(block, case, dtype)
    assert expected.pop("products") == 0
    assert found.pop("products") == case.products
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key
        else:
            assert key == "flops" or found[key] is None or not found[key].any()
    assert found["flops"] == expected["flops"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_plain_torch(name: str, dtype: torch.dtype) -> None:
    run_ranks(1, compare, name, dtype)


def accumulate() -> None:
    """Two micro-batches are summed before they are reduced: the second is added to what the first has written."""
    torch.manual_seed(1)
    plain = Weights(linear)
    torch.manual_seed(1)
    block = bmt.Block(model_wrapper_dispatch(Weights(linear)), use_checkpoint=False)
    batches = [torch.linspace(-1, 1, 6 * SIZE).reshape(6, SIZE).roll(i, 0) for i in range(2)]
    for x in batches:
        plain(x).square().sum().backward()
    with bmt.no_sync():
        block(batches[0]).square().sum().backward()
    block(batches[1]).square().sum().backward()
    grads = {name.rpartition(".")[2]: p.grad for name, p in block.named_parameters()}
    for name, p in plain.named_parameters():
        if p.grad is not None:
            assert torch.equal(grads[name].reshape(-1), p.grad.reshape(-1)), name


def test_micro_batches_are_added() -> None:
    run_ranks(1, accumulate)


def train_on(kind: str) -> int:
    """Searches of a backward whose device is of this kind, as far as Python sees it."""
    block = bmt.Block(model_wrapper_dispatch(Weights(linear)), use_checkpoint=False)
    loss = block(torch.ones(2, SIZE)).sum()
    engine = current_engine(context())
    own, engine.device = engine.device, torch.device(kind)
    with searches() as found:
        loss.backward()
    engine.device = own
    return len(found)


@pytest.mark.parametrize(("kind", "expected"), [("cpu", 1), ("cuda", 0)])
def test_graphs_are_searched_where_products_can_be_found(kind: str, expected: int) -> None:
    """On GPUs a backward makes none in place, and its host has the least time to spare."""
    assert run_ranks(1, train_on, kind) == [expected]
