"""AdamOptimizer and AdamOffloadOptimizer against torch.optim.Adam(W), and what they promise beyond it."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from harness.adam_inputs import draw_gradients, parameters, step_with_nearest_roots, ulps_of_largest
from kernel_levels import same_bits
from torch import nn

from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, whole_matrix
from bmtrain.optim._updates import Update
from bmtrain.optim.formulas import Part
from bmtrain.optim.places.device import apply_by_torch

BOTH = (AdamOptimizer, AdamOffloadOptimizer)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


HYPER: tuple[dict[str, Any], ...] = (
    {"lr": 1},
    {"lr": 1e-3, "weight_decay": 0.01},
    {"lr": 0.1, "betas": (0.2, 0.5), "eps": 1e-3},
    {"lr": 0.1, "betas": (0.0, 0.0), "weight_decay": 2.0},
)


@pytest.mark.parametrize("maximize", (False, True))
@pytest.mark.parametrize("hyper", HYPER, ids=str)
@pytest.mark.parametrize("scale", (4, 3.7))
def test_fp32_is_torch_adam_bit_for_bit(scale: float, hyper: dict[str, Any], maximize: bool) -> None:
    """BC-47. Offload has torch's bits but for torch's square roots, and with those is within 4 ulp of max |w|.

    That is the largest of all weights: one that passes 0 has no ulp to compare the steps with that took it there.
    """
    ours, offload, theirs, nearest = (parameters() for _ in range(4))
    a = AdamOptimizer([{"params": ours, "maximize": maximize}], **hyper)
    b = AdamOffloadOptimizer([{"params": offload, "maximize": maximize}], **hyper)
    c = torch.optim.Adam(theirs, maximize=maximize, **hyper)
    d = torch.optim.Adam(nearest, maximize=maximize, foreach=False, **hyper)
    generator = torch.Generator().manual_seed(1)
    for _ in range(100 if scale == 4 and not maximize else 10):
        draw_gradients(ours, generator)
        for p, q, r, n in zip(ours, offload, theirs, nearest, strict=True):
            assert p.grad is not None
            q.grad, r.grad, n.grad = p.grad.clone(), p.grad / scale, p.grad / scale
        a.step(scale=scale)
        b.step(scale=scale)
        c.step()
        step_with_nearest_roots(d)
        for p, q, r, n in zip(ours, offload, theirs, nearest, strict=True):
            assert same_bits(p.data, r.data)
            assert same_bits(q.data, n.data)
        assert ulps_of_largest(_in_one(offload), _in_one(theirs)) <= 4
    for p, r in zip(ours, theirs, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert same_bits(a.state[p][name], c.state[r][name])


def _in_one(params: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in params])


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_threads_change_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    ours, theirs = parameters(shapes=((150_001,),)), parameters(shapes=((150_001,),))
    a, c = AdamOptimizer(ours, lr=0.1), torch.optim.Adam(theirs, lr=0.1)
    generator = torch.Generator().manual_seed(2)
    try:
        torch.set_num_threads(threads)
        for _ in range(5):
            draw_gradients(ours, generator)
            theirs[0].grad = ours[0].grad
            a.step()
            c.step()
    finally:
        torch.set_num_threads(before)
    assert same_bits(ours[0].data, theirs[0].data)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_16_bit_is_adamw_on_a_master(dtype: torch.dtype) -> None:
    """BC-47, BC-48: the classes agree, the master follows torch.optim.AdamW, the parameter is its rounding."""
    ours, offload = parameters(dtype), parameters(dtype)
    theirs = [nn.Parameter(p.detach().float()) for p in ours]
    hyper = {"lr": 0.01, "weight_decay": 0.1}
    a, b, c = (
        AdamOptimizer(ours, **hyper),
        AdamOffloadOptimizer(offload, **hyper),
        torch.optim.AdamW(theirs, **hyper),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(30):
        draw_gradients(ours, generator)
        for p, q, r in zip(ours, offload, theirs, strict=True):
            assert p.grad is not None
            q.grad, r.grad = p.grad.clone(), p.grad.float() / 8
        a.step(scale=8)
        b.step(scale=8)
        c.step()
        for p, q, r in zip(ours, offload, theirs, strict=True):
            master = a.state[p]["_param_fp32"]
            assert ulps_of_largest(master, r.data) <= 4
            assert same_bits(p.data, master.to(dtype))
            assert same_bits(q.data, p.data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", (True, False))
@pytest.mark.parametrize("cls", BOTH)
def test_either_weight_decay_for_every_dtype(cls: Any, decoupled: bool, dtype: torch.dtype) -> None:
    ours = parameters(dtype)
    theirs = [nn.Parameter(p.detach().float()) for p in ours]
    hyper = {"lr": 0.01, "weight_decay": 0.1}
    a = copy.deepcopy(cls(ours, **hyper, decoupled=decoupled))  # a copy keeps the choice
    ours = a.param_groups[0]["params"]
    b = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **hyper)
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        draw_gradients(ours, generator)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        value = p if dtype == torch.float32 else a.state[p]["_param_fp32"]
        exact = cls is AdamOptimizer and dtype == torch.float32
        assert ulps_of_largest(value.detach(), q.detach()) <= (0 if exact else 4)


@pytest.mark.parametrize("cls", BOTH)
def test_decoupled_is_none_or_a_bool(cls: Any) -> None:
    with pytest.raises(TypeError, match="decoupled: expected None, True or False, got 'yes'"):
        cls(parameters(), decoupled="yes")


@pytest.mark.parametrize("weight_decay", (0.0, 0.01))
@pytest.mark.parametrize("cls", BOTH)
def test_a_thousand_steps_of_a_toy_problem(cls: Any, weight_decay: float) -> None:
    def train(optimizer_class: Any, dtype: torch.dtype, steps: int) -> torch.Tensor:
        p = nn.Parameter(torch.linspace(-2, 2, 101).to(dtype))
        optimizer = optimizer_class([p], lr=1e-2, weight_decay=weight_decay)
        for i in range(steps):
            optimizer.zero_grad()
            # The gradient does not depend on p: rounding must not be amplified by the problem.
            (p * torch.sin(torch.arange(101.0) * (i + 1)).to(dtype)).sum().backward()
            optimizer.step()
        return optimizer.state[p].get("_param_fp32", p).detach()

    assert ulps_of_largest(train(cls, torch.float32, 1000), train(torch.optim.Adam, torch.float32, 1000)) <= 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cls", BOTH)
def test_lr_is_zero_for_exactly_the_held_steps_of_each_parameter(cls: Any, dtype: torch.dtype) -> None:
    first, late = parameters(dtype, ((5,), (5,)))
    optimizer = cls([first, late], lr=0.1, weight_decay=0.1, hold_steps=2)
    values = [first.detach().clone(), late.detach().clone()]
    moved = []
    for i in range(4):
        first.grad = torch.ones_like(first)
        late.grad = torch.ones_like(late) if i >= 1 else None
        optimizer.step()
        moved.append([not torch.equal(p.data, v) for p, v in zip((first, late), values, strict=True)])
        assert optimizer.state[first]["exp_avg"].abs().min() > 0
    assert moved == [[False, False], [False, False], [True, False], [True, True]]
    assert (optimizer.state[first]["step"], optimizer.state[late]["step"]) == (4, 3)


@pytest.mark.parametrize("cls", BOTH)
def test_groups_have_their_own_options(cls: Any) -> None:
    """BC-49."""
    params = parameters(shapes=((6,),) * 3)
    twins = parameters(shapes=((6,),) * 3)
    groups = [{"lr": 0.5}, {"weight_decay": 0.3}, {"betas": (0.5, 0.6), "eps": 0.1, "maximize": True}]
    a = cls([{"params": [p], **g} for p, g in zip(params, groups, strict=True)], lr=0.1)
    c = torch.optim.Adam([{"params": [p], **g} for p, g in zip(twins, groups, strict=True)], lr=0.1)
    generator = torch.Generator().manual_seed(3)
    for i in range(5):
        draw_gradients(params, generator)
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad
        for optimizer in (a, c):
            optimizer.param_groups[0]["lr"] = 0.5 / (i + 1)
            optimizer.step()
    for p, q in zip(params, twins, strict=True):
        assert ulps_of_largest(p.data, q.data) <= (0 if cls is AdamOptimizer else 4)


@pytest.mark.parametrize("cls", BOTH)
def test_parameters_may_come_in_any_form(cls: Any) -> None:
    """BC-50."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False))
    forms = (
        model.parameters(),
        list(model.parameters()),
        (p for p in model.parameters()),
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": list(model[1].parameters())}],
        model.named_parameters(),
    )
    for form in forms:
        optimizer = cls(form, lr=0.1)
        assert sum(len(g["params"]) for g in optimizer.param_groups) == 3
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert len(optimizer.state) == 3


@pytest.mark.parametrize("cls", [*BOTH, partial(whole_matrix, torch.optim.AdamW)])
@pytest.mark.parametrize(
    ("params", "got"),
    [
        (nn.Linear(2, 2), "Linear"),
        (nn.Sequential(nn.Linear(2, 2)), "Sequential"),
        ([nn.Linear(2, 2)], "a list with Linear"),
        ([{"params": nn.Sequential(nn.Linear(2, 2))}], "Sequential"),
        (nn.Linear(2, 2).state_dict(), "OrderedDict"),
        (nn.Parameter(torch.ones(2)), "Parameter"),
        (None, "NoneType"),
    ],
)
def test_a_model_is_no_list_of_parameters(cls: Any, params: Any, got: str) -> None:
    with pytest.raises(TypeError, match=rf"as of model.parameters\(\), got {got}$"):
        cls(params)


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -1), ("lr", math.nan), ("eps", -1e-8), ("weight_decay", -1), ("betas", (1.0, 0.9)), ("betas", (0.9, -0.1)),
     ("hold_steps", -1), ("scale", 0), ("scale", math.inf)],
)  # fmt: skip
def test_bad_options_are_named(cls: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected .*, got "):
        cls(parameters(), **{name: value})
    if name not in ("hold_steps", "scale"):
        with pytest.raises(ValueError, match=f"{name}: expected .*, got "):
            cls([{"params": parameters(), name: value}])


@pytest.mark.parametrize("cls", BOTH)
def test_what_is_skipped_and_what_is_refused(cls: Any) -> None:
    good, without, frozen, empty = parameters(shapes=((4,), (4,), (4,), (0,)))
    good.grad, frozen.grad, empty.grad = torch.ones(4), torch.ones(4), torch.ones(0)
    frozen.requires_grad_(False)
    optimizer = cls([good, without, frozen, empty])
    optimizer.step()
    assert [*map(id, optimizer.state)] == [id(good), id(empty)]

    double = nn.Parameter(torch.ones(2).double())
    sparse = nn.Parameter(torch.ones(3, 2))
    for bad, message in ((double, "bfloat16 parameters, got torch.float64; torch.optim takes others"),
                         (sparse, "expected dense gradients, got one of layout torch.sparse_coo")):  # fmt: skip
        optimizer = cls([good, bad])
        optimizer.step()  # without a gradient it does not matter
        value = good.detach().clone()
        bad.grad = torch.ones_like(bad) if bad is double else torch.ones(3, 2).to_sparse()
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert torch.equal(good.data, value)
        assert optimizer.state[good]["step"] == 1
    with pytest.raises(ValueError, match="scale: expected a finite number above 0, got 0"):
        cls([good]).step(scale=0)


@pytest.mark.parametrize("cls", BOTH)
def test_closure_and_zero_grad(cls: Any) -> None:
    (p,) = parameters(shapes=((4,),))
    optimizer = cls([p])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() > 0
    assert optimizer.step() is None
    grad = p.grad
    optimizer.zero_grad()
    assert p.grad is grad
    assert not p.grad.any()
    optimizer.zero_grad(set_to_none=True)
    assert p.grad is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_path_of_other_devices_gives_the_same(dtype: torch.dtype) -> None:
    """Where we have no kernel, torch's own Adam does the work: tried here on CPU tensors."""
    fused, by_torch = parameters(dtype), parameters(dtype)
    hyper = {"lr": 0.1, "weight_decay": 0.1, "hold_steps": 1}
    a, b = AdamOptimizer(fused, **hyper), AdamOptimizer(by_torch, **hyper)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        draw_gradients(fused, generator)
        for p, q in zip(fused, by_torch, strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
        a.step(scale=3)
        with torch.no_grad():
            adam = b._formula
            b._create_state({q: adam.arrays for q in by_torch if q not in b.state})
            updates = [Update(q, q.grad, b.state[q]) for q in by_torch if q.grad is not None]
            for q in by_torch:
                b._prepare(q, b.state[q])
            numbers = adam.numbers_of(b.param_groups[0], is_low=dtype != torch.float32, scale=3.0)
            apply_by_torch([Part(updates, adam.arrays, numbers, adam)])
    for p, q in zip(fused, by_torch, strict=True):
        if dtype == torch.float32:
            assert same_bits(p.data, q.data)
        else:
            assert ulps_of_largest(a.state[p]["_param_fp32"], b.state[q]["_param_fp32"]) <= 4
