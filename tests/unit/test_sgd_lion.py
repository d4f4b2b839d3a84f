"""SGD and Lion on the engine of the Adam optimizers: against torch, and with everything around a step."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from harness import run_ranks
from kernel_levels import same_bits
from torch import nn

import bmtrain
from bmtrain.optim import (
    AdamOptimizer,
    LionOffloadOptimizer,
    LionOptimizer,
    OptimManager,
    SGDOffloadOptimizer,
    SGDOptimizer,
)
from bmtrain.optim._updates import Update
from bmtrain.optim.formulas import Part
from bmtrain.optim.places.device import apply_by_torch
from bmtrain.wrapper import model_wrapper_dispatch

SGD = (SGDOptimizer, SGDOffloadOptimizer)
LION = (LionOptimizer, LionOffloadOptimizer)
SHAPES = ((), (7,), (64, 33), (40_001,))
HYPER: tuple[dict[str, Any], ...] = (
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"lr": 0.01, "momentum": 0.9, "dampening": 0.2, "maximize": True},
    {"lr": 0.01, "momentum": 0.95, "nesterov": True, "weight_decay": 0.1},
)


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(*lists: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    """The same in each list; in all but the last times ``scale``."""
    for params in lists:
        generator = torch.Generator().manual_seed(seed)
        for p in params:
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = grad if params is lists[-1] else grad * scale


@pytest.mark.parametrize("hyper", HYPER, ids=str)
def test_fp32_is_torch_sgd_bit_for_bit(hyper: dict[str, Any]) -> None:
    """Momentum included, with a schedule, and a momentum that is switched off and on again."""
    ours, offload, theirs = parameters(), parameters(), parameters()
    optimizers = [
        cls(params, **hyper)
        for cls, params in zip((*SGD, torch.optim.SGD), (ours, offload, theirs), strict=True)
    ]
    for step in range(20):
        set_gradients(ours, offload, theirs, seed=step, scale=4)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = hyper["lr"] / (1 + step)
            if not hyper.get("nesterov"):
                optimizer.param_groups[0]["momentum"] = 0.0 if 5 <= step < 9 else hyper.get("momentum", 0.5)
            optimizer.step(**({} if optimizer is optimizers[-1] else {"scale": 4}))
        for p, q, r in zip(ours, offload, theirs, strict=True):
            assert same_bits(p.data, r.data)
            assert same_bits(q.data, r.data)
    for p, r in zip(ours, theirs, strict=True):
        momentum = optimizers[0].state[p].get("momentum_buffer")
        expected = optimizers[2].state[r].get("momentum_buffer")
        assert (momentum is None) == (expected is None)
        assert momentum is None or same_bits(momentum, expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_16_bit_sgd_is_torch_sgd_on_a_master(dtype: torch.dtype) -> None:
    ours, offload = parameters(dtype), parameters(dtype)
    theirs = [nn.Parameter(p.detach().float()) for p in ours]
    a, b = (cls(params, **HYPER[1]) for cls, params in zip(SGD, (ours, offload), strict=True))
    c = torch.optim.SGD(theirs, **HYPER[1])
    for step in range(20):
        set_gradients(ours, offload, seed=step)
        for p, r in zip(ours, theirs, strict=True):
            assert p.grad is not None
            r.grad = p.grad.float() / 8
        a.step(scale=8)
        b.step(scale=8)
        c.step()
        for p, q, r in zip(ours, offload, theirs, strict=True):
            assert same_bits(a.state[p]["_param_fp32"], r.data)
            assert same_bits(p.data, r.detach().to(dtype))
            assert same_bits(q.data, p.data)


def lion_reference(w: torch.Tensor, m: torch.Tensor, g: torch.Tensor, options: dict[str, Any]) -> None:
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2."""
    beta1, beta2 = options["betas"]
    w.mul_(1 - options["lr"] * options["weight_decay"])
    w.add_((beta1 * m).add(g, alpha=1 - beta1).sign(), alpha=-options["lr"])
    m.mul_(beta2).add_(g, alpha=1 - beta2)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("cls", LION)
def test_lion_is_its_published_formula(cls: Any, dtype: torch.dtype) -> None:
    options = {"lr": 1e-2, "betas": (0.9, 0.98), "weight_decay": 0.1}
    params = parameters(dtype)
    weights = [p.detach().float() for p in params]
    momenta = [torch.zeros_like(w) for w in weights]
    optimizer = cls(params, **options)
    for step in range(20):
        set_gradients(params, seed=step)
        optimizer.step(scale=2)
        for p, w, m in zip(params, weights, momenta, strict=True):
            assert p.grad is not None
            lion_reference(w, m, p.grad.float() / 2, options)
            assert same_bits(p.data, w.to(dtype))
            assert same_bits(optimizer.state[p]["exp_avg"], m)


def make(kind: str, params: Any, **more: Any) -> Any:
    classes: dict[str, Any] = {"sgd": SGDOptimizer, "sgd offload": SGDOffloadOptimizer,
                               "lion": LionOptimizer, "lion offload": LionOffloadOptimizer}  # fmt: skip
    options = {"momentum": 0.9} if kind.startswith("sgd") else {}
    return classes[kind](params, **{"lr": 0.1, **options, **more})


KINDS = ("sgd", "sgd offload", "lion", "lion offload")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues_exactly_in_either_form(kind: str, dtype: torch.dtype) -> None:
    """Through a file that torch.load reads, to the offloaded form and back, gathered or not, copied or pickled."""
    params = parameters(dtype)
    optimizer = make(kind, [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}])
    for step in range(3):
        set_gradients(params, seed=step)
        optimizer.step()
    starts = [p.detach().clone() for p in params]
    others = []
    name = kind.split()[0]
    for other_kind, gather in ((name, False), (f"{name} offload", True)):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(gather=gather), file)
        file.seek(0)
        twins = [nn.Parameter(start.clone()) for start in starts]
        others.append(make(other_kind, [{"params": twins[:2]}, {"params": twins[2:]}], lr=7.0))
        others[-1].load_state_dict(torch.load(file))
    others += [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    for step in range(3, 6):
        for some in (optimizer, *others):
            members = [p for group in some.param_groups for p in group["params"]]
            set_gradients(members, seed=step)
            some.step()
    for other in others:
        twins = [p for group in other.param_groups for p in group["params"]]
        assert all(same_bits(p.data, q.data) for p, q in zip(params, twins, strict=True))


def test_a_state_of_torch_sgd_loads() -> None:
    params, theirs = parameters(), parameters()
    reference = torch.optim.SGD(theirs, **HYPER[1])
    set_gradients(params, theirs, seed=0)
    reference.step()
    optimizer = SGDOptimizer(params, lr=9.0)
    optimizer.load_state_dict(reference.state_dict())
    with torch.no_grad():
        for p, q in zip(params, theirs, strict=True):
            p.copy_(q)
    set_gradients(params, theirs, seed=1)
    reference.step()
    optimizer.step()
    assert all(same_bits(p.data, q.data) for p, q in zip(params, theirs, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("saved", "loading", "message"),
    (
        (LionOptimizer, SGDOptimizer, r"a state of SGDOptimizer, with \['momentum_buffer'.*exp_avg"),
        (LionOffloadOptimizer, SGDOptimizer, "a state of SGDOptimizer.*exp_avg"),
        (AdamOptimizer, SGDOffloadOptimizer, "a state of SGDOffloadOptimizer.*exp_avg_sq"),
        (AdamOptimizer, LionOptimizer, r"a state of LionOptimizer, with \['exp_avg', .*exp_avg_sq"),
    ),
)
def test_a_state_of_another_optimizer_is_refused(
    saved: Any, loading: Any, message: str, dtype: torch.dtype
) -> None:
    """Also where both have masters, or a moment of one name."""
    params = parameters(dtype)
    optimizer = saved(params)
    set_gradients(params, seed=0)
    optimizer.step()
    with pytest.raises(ValueError, match=f"parameter 0: expected {message}"):
        loading(params).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    (
        (SGDOptimizer, {"lr": -1}, "lr: expected 0 or more, got -1"),
        (SGDOffloadOptimizer, {"momentum": -0.1}, "momentum: expected 0 or more, got -0.1"),
        (SGDOptimizer, {"nesterov": True}, "nesterov: expected a momentum above 0 and no dampening"),
        (SGDOptimizer, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "and dampening 0.1"),
        (LionOptimizer, {"betas": (0.9, 1.0)}, "betas: expected two numbers from 0"),
        (LionOffloadOptimizer, {"weight_decay": -1}, "weight_decay: expected 0 or more, got -1"),
    ),
)
def test_options_out_of_range_are_named(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(parameters(), **options)
    with pytest.raises(ValueError, match=message):
        cls([{"params": parameters(), **options}])


def test_sgd_without_momentum_keeps_no_array() -> None:
    params = parameters(torch.bfloat16)
    optimizer = SGDOptimizer(params)
    set_gradients(params, seed=0)
    optimizer.step()
    assert all(sorted(state) == ["_param_fp32", "step"] for state in optimizer.state.values())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
@pytest.mark.parametrize("kind", ("sgd", "lion"))
def test_the_path_of_other_devices_gives_the_same(kind: str, dtype: torch.dtype) -> None:
    """Where we have no kernel, operations of torch do the work: tried here on CPU tensors."""
    fused, by_torch = parameters(dtype), parameters(dtype)
    a, b = make(kind, fused, weight_decay=0.1), make(kind, by_torch, weight_decay=0.1)
    for step in range(4):
        set_gradients(fused, by_torch, seed=step)
        a.step(scale=3)
        with torch.no_grad():
            fresh = {q for q in by_torch if q not in b.state}
            formula = b._formula
            b._create_state(dict.fromkeys(fresh, formula.arrays))
            for q in by_torch:
                b._prepare(q, b.state[q])
            updates = [Update(q, q.grad, b.state[q], q in fresh) for q in by_torch if q.grad is not None]
            numbers = formula.numbers_of(b.param_groups[0], is_low=False, scale=3.0)
            apply_by_torch([Part(updates, formula.arrays, numbers, formula)])
    assert all(same_bits(p.data, q.data) for p, q in zip(fused, by_torch, strict=True))


def train_under_manager(kind: str, loss_scale: float | None) -> list[torch.Tensor]:
    """Six steps with clipping; the fourth overflows, or without a scale is left out."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)]
    model = nn.Sequential(*(bmtrain.Block(model_wrapper_dispatch(layer)) for layer in layers))
    optimizer = make(kind, model.parameters(), lr=0.01)
    manager = OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(optimizer)
    for step in range(6):
        manager.zero_grad()
        manager.backward(model(torch.full((2, 8), float(step + bmtrain.rank()))).square().mean())
        if step == 3:
            if loss_scale is None:
                continue
            grad = next(model.parameters()).grad
            assert grad is not None
            grad[:1] = torch.inf
        manager.clip_grad_norm(optimizer.param_groups, max_norm=0.1)
        manager.step()
    assert loss_scale is None or manager.loss_scale == loss_scale / 2
    return [bmtrain.parameter.full_value(p).detach().clone() for p in model.parameters()]


def compare_scales(kind: str) -> None:
    for a, b in zip(train_under_manager(kind, 2.0**10), train_under_manager(kind, None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_under_a_manager_with_loss_scale_and_clipping(kind: str) -> None:
    """A manager's steps with a scale, one of which overflows, are those without, but for the skipped one."""
    run_ranks(2, compare_scales, kind)
