"""The loss scale, clipping and state dicts on one rank, with plain parameters and torch optimizers."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.managed import give_gradients, manager_of, parameters

import bmtrain as bmt
import bmtrain.backward
from bmtrain.lr_scheduler import NoDecay
from bmtrain.optim import OptimManager, clip_grad_norm
from bmtrain.optim.optim_manager import check_overflow, grad_rescale

# --- constructor and attributes


@pytest.mark.parametrize(
    "options",
    [
        {"loss_scale": 0},
        {"loss_scale": -2.0},
        {"loss_scale_factor": 0},
        {"grad_scale": 0},
        {"min_loss_scale": 0},
        {"min_loss_scale": 4, "max_loss_scale": 2},
    ],
)
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        OptimManager(**options)


def test_attributes() -> None:
    manager = OptimManager()
    assert (manager.loss_scale, manager.loss_scale_enabled) == (1, False)
    manager = OptimManager(2**20, 0.25, 7, 2, 2**21, 3)
    assert manager.loss_scale_factor == 4
    assert (manager.loss_scale, manager.loss_scale_enabled, manager.loss_scale_steps) == (2**20, True, 7)
    assert (manager.min_loss_scale, manager.max_loss_scale, manager.grad_scale) == (2, 2**21, 3)
    assert (manager.steps_since_last_scale, manager.optimizers, manager.lr_schedulers) == (0, [], [])
    assert int(manager.loss_scale) == 2**20  # BC-56
    manager.grad_scale = 5
    assert manager.scale_loss(torch.tensor(10.0)) == 2**21


FACTORS = ("loss_scale_factor", "loss_scale_steps", "min_loss_scale", "max_loss_scale")


@pytest.mark.parametrize("name", FACTORS)
def test_without_a_scale_its_factors_may_be_none(name: str) -> None:
    assert getattr(OptimManager(None, **{name: None}), name) == getattr(OptimManager(), name)
    with pytest.raises(TypeError, match=name):
        OptimManager(2.0, **{name: None})


def step_without_optimizers() -> None:
    for manager in (OptimManager(), OptimManager(loss_scale=2)):
        with pytest.raises(RuntimeError, match=r"add_optimizer\(\) first"):
            manager.step()


def test_a_step_needs_an_optimizer() -> None:
    run_ranks(1, step_without_optimizers)


def before_init() -> None:
    params = parameters()
    with pytest.raises(RuntimeError, match="not initialized"):
        clip_grad_norm([{"params": params}], 1.0, 1.0)
    with pytest.raises(RuntimeError, match="not initialized"):
        manager_of(params, loss_scale=2).step()
    give_gradients(params)
    manager_of(params).step()  # nothing collective without scaling
    double = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for value in (1.0, math.inf, math.nan):
        double.grad = torch.tensor([0, value, 1e300], dtype=torch.float64)
        assert check_overflow([{"params": [*params, double]}]) == (not math.isfinite(value))


def test_before_initialisation() -> None:
    run_ranks(1, before_init, init=False)


def test_a_scheduler_that_needs_a_number_is_refused() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    with pytest.raises(TypeError, match="lr_scheduler: ReduceLROnPlateau.step"):
        OptimManager().add_optimizer(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def test_an_optimizer_is_added_once() -> None:
    optimizer, manager = torch.optim.SGD(parameters(), lr=0.1), OptimManager()
    manager.add_optimizer(optimizer)
    with pytest.raises(ValueError, match="optimizer: this one has been added before"):
        manager.add_optimizer(optimizer)


class SlowWeights(torch.optim.Optimizer):
    """Wraps another optimizer without a call of `torch.optim.Optimizer.__init__`, as some forms of Lookahead do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def test_an_optimizer_that_wraps_another_one() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    manager = OptimManager()
    manager.add_optimizer(SlowWeights(torch.optim.SGD([p], lr=0.5, momentum=0.9)))
    p.grad = torch.ones(2)
    manager.step()
    assert p.tolist() == [0.5, 0.5]
    manager.load_state_dict(manager.state_dict())
    manager.zero_grad()
    manager.step()  # by the momentum
    assert p.tolist() == pytest.approx([0.05, 0.05])


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_wrapper_whose_zero_grad_has_no_argument(set_to_none: bool) -> None:
    class OldSlowWeights(SlowWeights):
        def zero_grad(self) -> None:  # type: ignore[override]
            self.optimizer.zero_grad()

    p = torch.nn.Parameter(torch.ones(2))
    manager = OptimManager()
    manager.add_optimizer(OldSlowWeights(torch.optim.SGD([p], lr=0.5)))
    p.grad = torch.ones(2)
    manager.zero_grad(set_to_none=set_to_none)
    assert p.grad is None


def test_an_owned_scale_gives_way_and_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bmt._base.deprecate, "_seen", set())
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    optimizer._owned_scale = 2.0  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            OptimManager().add_optimizer(optimizer)
    assert [w.category for w in caught] == [UserWarning]
    assert caught[0].filename == __file__


# --- the state machine


def grows_after_exactly_n_good_steps() -> None:  # BC-45
    params = parameters()
    manager = manager_of(params, loss_scale=4, loss_scale_factor=2, loss_scale_steps=3, max_loss_scale=12)
    scales = []
    for step in range(14):
        give_gradients(params, manager.loss_scale * 1e-3)
        if step == 4:
            params[0].grad[0, 0] = math.inf
        manager.step()
        scales.append((manager.loss_scale, manager.steps_since_last_scale))
    assert scales == [
        *[(4, 1), (4, 2), (8, 0), (8, 1)],
        (4, 0),  # the overflow restarts the count
        *[(4, 1), (4, 2), (8, 0), (8, 1), (8, 2), (12, 0)],
        *[(12, 1), (12, 2), (12, 3)],  # at the maximum: it only counts
    ]


def falls_to_its_floor() -> None:
    params = parameters()
    manager = manager_of(params, loss_scale=2**10, loss_scale_factor=0.125, min_loss_scale=4)
    scales = []
    for _ in range(4):
        give_gradients(params)
        params[-1].grad[-1, -1] = math.nan
        manager.step()
        scales.append(manager.loss_scale)
    assert scales == [128, 16, 4, 4]


def overflow_changes_nothing_else(dtype: torch.dtype, value: float) -> None:  # BC-44
    params = parameters(torch.float32, dtype)
    optimizer = torch.optim.Adam(params, lr=0.1)
    manager = OptimManager(loss_scale=1024.0)
    scheduler = NoDecay(optimizer, 0.1, 10, None, num_iter=5)
    manager.add_optimizer(optimizer, scheduler)
    give_gradients(params)
    manager.step()
    before = copy.deepcopy((params, optimizer.state_dict(), scheduler.state_dict()))
    give_gradients(params)
    params[1].grad[2, 3] = value
    manager.step()
    assert manager.loss_scale == 512.0
    assert manager.steps_since_last_scale == 0
    for p, old in zip(params, before[0], strict=True):
        assert torch.equal(p, old)
        assert torch.equal(p.grad, torch.zeros_like(p))
    assert scheduler.state_dict() == before[2]
    torch.testing.assert_close(optimizer.state_dict(), before[1], rtol=0, atol=0)


def report_names_the_parameter() -> None:
    params = parameters()
    for names, expected in [(False, "parameter 1 of 3:"), (True, "parameter 1 of 3 (second):")]:
        manager = OptimManager(loss_scale=8)
        if names and bmt.utils.check_torch_version("2.6.0") < 0:
            continue
        given = list(zip(["first", "second", "third"], params, strict=True)) if names else params
        manager.add_optimizer(torch.optim.SGD(given, lr=0.1))
        give_gradients(params)
        params[1].grad[0, 0] = math.inf
        params[2].grad[0, 0] = math.nan
        with contextlib.redirect_stdout(io.StringIO()) as out:
            manager.step()
        assert expected in out.getvalue()
        assert "8 -> 4" in out.getvalue()


def without_scaling_nothing_is_checked() -> None:
    params = parameters()
    manager = manager_of(params)
    give_gradients(params)
    params[0].grad[0, 0] = math.inf
    manager.step()
    assert params[0].isinf().any()
    assert (manager.loss_scale, manager.steps_since_last_scale) == (1, 0)


def torch_optimizers_get_unscaled_gradients() -> None:
    scaled, plain = parameters(), parameters()
    manager = OptimManager(loss_scale=2**16, grad_scale=1)
    manager.add_optimizer(torch.optim.AdamW(scaled[:2], lr=0.1))
    manager.add_optimizer(
        torch.optim.SGD(scaled[2:], lr=0.1, momentum=0.9), NoDecay(manager.optimizers[0], 0.1, 0, -1)
    )
    references = [torch.optim.AdamW(plain[:2], lr=0.1), torch.optim.SGD(plain[2:], lr=0.1, momentum=0.9)]
    for step in range(3):
        manager.zero_grad()
        for params, backward in ((scaled, manager.backward), (plain, torch.Tensor.backward)):
            backward(sum((p**2).sum() * (step + 1) for p in params))
        manager.step()
        for optimizer in references:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(scaled, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def accumulation_and_skipped_backward() -> None:  # BC-43
    params = parameters()
    manager = manager_of(params, loss_scale=4)
    manager.step()  # no gradient anywhere
    manager.backward((params[0] ** 2).sum())
    manager.backward((params[0] ** 2).sum())
    torch.testing.assert_close(params[0].grad, params[0].detach() * 4 * 4)
    manager.clip_grad_norm(manager.optimizers[0].param_groups, 0.1)
    manager.clip_grad_norm(manager.optimizers[0].param_groups, 0.1)
    manager.step()
    manager.zero_grad()
    manager.backward((params[0] ** 2).sum() * 0)
    manager.step()
    assert all(p.isfinite().all() for p in params)
    assert params[1].grad is None
    assert manager.steps_since_last_scale == 3


STEP_CASES: list[tuple[Any, ...]] = [
    (grows_after_exactly_n_good_steps,),
    (falls_to_its_floor,),
    (report_names_the_parameter,),
    (without_scaling_nothing_is_checked,),
    (torch_optimizers_get_unscaled_gradients,),
    (accumulation_and_skipped_backward,),
    *[
        (overflow_changes_nothing_else, dtype, value)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for value in (math.inf, -math.inf, math.nan)
    ],
]


@pytest.mark.parametrize(
    "case", STEP_CASES, ids=lambda case: "-".join(getattr(c, "__name__", str(c)) for c in case)
)
def test_step(case: tuple[Any, ...]) -> None:
    run_ranks(1, *case)


# --- clipping


def clip_equals_torch(dtype: torch.dtype, norm_type: Any, max_norm: float, scale: float) -> None:  # BC-46
    ours, theirs = parameters(dtype, dtype, dtype), parameters(dtype, dtype, dtype)
    give_gradients(ours, scale)
    give_gradients(theirs)
    norm = clip_grad_norm([{"params": ours[:1]}, {"params": ours[1:]}], max_norm, scale, norm_type)
    wide = [torch.nn.Parameter(p.float()) for p in theirs]
    for p, w in zip(theirs, wide, strict=True):
        w.grad = p.grad.float()
    expected = torch.nn.utils.clip_grad_norm_(wide, max_norm, float(norm_type))
    assert norm.dtype == torch.float32
    assert norm.shape == ()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
    for p, w in zip(ours, wide, strict=True):
        torch.testing.assert_close(p.grad.float() / scale, w.grad, rtol=rounding, atol=1e-7)
    assert "{:.4f}".format(norm) == f"{norm.item():.4f}"  # noqa: UP032 (BC-56)
    assert norm.data.detach().float() == norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [2, 1, 3.5, 0.5, "inf", math.inf])
def test_clip_equals_torch(dtype: torch.dtype, norm_type: Any) -> None:
    for max_norm, scale in [(0.5, 1.0), (0.5, 1024.0), (1e6, 64.0)]:
        run_ranks(1, clip_equals_torch, dtype, norm_type, max_norm, scale)


def clip_corner_cases() -> None:
    assert clip_grad_norm([], 1.0, 1.0) == 0
    params = parameters()
    assert clip_grad_norm([{"params": params}], 1.0, 1.0) == 0
    params[0].grad = torch.zeros_like(params[0])
    assert clip_grad_norm([{"params": params}], 0.0, 1.0, eps=0.0) == 0
    assert params[0].grad.count_nonzero() == 0
    params[0].grad = torch.full_like(params[0], 1e25)  # its square does not fit fp32
    norm = clip_grad_norm([{"params": params}, {"params": params}], 1.0, 1.0)
    assert norm == pytest.approx(1e25 * math.sqrt(12))
    assert params[0].grad.norm() == pytest.approx(1.0, rel=1e-5)
    params[0].grad = torch.ones_like(params[0])
    for value in (math.inf, math.nan):
        for norm_type in (2, 3, "inf"):
            params[0].grad[0, 0] = value
            norm = clip_grad_norm([{"params": params}], 1.0, 1.0, norm_type)
            assert not norm.isfinite()
            assert not params[0].grad.isfinite().all()
            assert check_overflow([{"params": params}])
    tiny = torch.nn.Parameter(torch.zeros(8, dtype=torch.float16))
    tiny.grad = torch.full((8,), 6e4, dtype=torch.float16)  # a coefficient of 3e-6 is no fp16 number
    clip_grad_norm(iter([{"params": [tiny]}]), 0.5, 1.0)
    torch.testing.assert_close(tiny.grad.float().norm(), torch.tensor(0.5), rtol=2e-2, atol=0)
    for bad in (
        {"norm_type": 0},
        {"norm_type": -1},
        {"max_norm": -1.0},
        {"max_norm": math.nan},
        {"scale": 0.0},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            clip_grad_norm(**{"param_groups": [{"params": params}], "max_norm": 1.0, "scale": 1.0, **bad})


def test_clip_corner_cases() -> None:
    run_ranks(1, clip_corner_cases)


def test_grad_rescale_divides_in_place() -> None:
    params = parameters(torch.float32, torch.float16)
    give_gradients(params, 8.0)
    kept = [(p.grad, p.grad.clone()) for p in params]
    grad_rescale([{"params": params}], 8.0)
    for p, (grad, old) in zip(params, kept, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, old / 8)
