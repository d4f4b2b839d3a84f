"""Schedules against the formulas of their definitions, written out independently here."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from bmtrain import lr_scheduler
from bmtrain._base import deprecate
from bmtrain.lr_scheduler import Cosine, Exponential, Linear, Noam, NoDecay, WarmupLRScheduler

BASE = 0.3


def sgd(num_groups: int = 1) -> torch.optim.SGD:
    return torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(num_groups)], lr=9.0
    )


def reference(name: str, n: int, w: int, e: int) -> float:
    if name == "Noam":
        return BASE / math.sqrt(w) * n / w if n < w else BASE / math.sqrt(max(n, 1))
    if n < w:
        return BASE * n / w
    if name == "Linear":
        return max(0, BASE * (e - n) / max(1, e - w))
    if name == "Cosine":
        return max(0, BASE * 0.5 * (1 + math.cos(math.pi * (n - w) / max(1, e - w))))
    if name == "Exponential":
        return BASE * 0.95 ** (n - w)
    return BASE


@pytest.mark.parametrize("warmup,end", [(0, 0), (0, 7), (4, 4), (4, 12), (1, 3)])
@pytest.mark.parametrize("name", ["Noam", "Linear", "Cosine", "Exponential", "NoDecay"])
def test_every_iteration_has_the_rate_of_the_table(name: str, warmup: int, end: int) -> None:
    optimizer = sgd(2)
    scheduler = getattr(lr_scheduler, name)(optimizer, BASE, warmup, end)
    for n in range(20):
        expected = reference(name, n, warmup, end)
        assert scheduler.num_iter == n
        assert scheduler.current_lr == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert scheduler.get_lr() == scheduler.current_lr
        assert [group["lr"] for group in optimizer.param_groups] == [scheduler.current_lr] * 2  # BC-49
        scheduler.step()


def test_first_noam_step_uses_rate_zero() -> None:  # BC-51
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = Noam(optimizer, 1.0, warmup_iter=4, end_iter=100, num_iter=0)
    assert optimizer.param_groups[0]["lr"] == 0
    for k in range(1, 7):
        p.grad = torch.ones(2)
        optimizer.step()
        scheduler.step()
        assert scheduler.current_lr == pytest.approx(reference("Noam", k, 4, 100) / BASE)


@pytest.mark.parametrize("cls", [Noam, NoDecay, Exponential])
@pytest.mark.parametrize("end", [None, -1])
def test_schedules_without_an_end_take_none(cls: type[WarmupLRScheduler], end: int | None) -> None:
    for scheduler in (cls(sgd(), BASE, 2, end), cls(sgd(), BASE, 2)):
        scheduler.step(50)
        assert scheduler.current_lr > 0


@pytest.mark.parametrize("cls", [Linear, Cosine])
def test_schedules_with_an_end_refuse_none_at_construction(cls: type[WarmupLRScheduler]) -> None:
    for end in ((None,), ()):
        with pytest.raises(ValueError, match=f"{cls.__name__} needs end_iter"):
            cls(sgd(), BASE, 2, *end)


def test_jump_and_start_in_the_middle() -> None:
    optimizer = sgd()
    scheduler = Linear(optimizer, BASE, 4, 12, num_iter=6)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(reference("Linear", 6, 4, 12))
    scheduler.step(2)
    assert (scheduler.num_iter, scheduler.current_lr) == (2, pytest.approx(reference("Linear", 2, 4, 12)))
    with pytest.raises(ValueError, match="num_iter"):
        scheduler.step(-1)


def test_an_object_without_groups_is_refused() -> None:
    with pytest.raises(TypeError, match="param_groups"):
        NoDecay(torch.nn.Linear(1, 1), BASE, 0, None)


@pytest.mark.parametrize("cls", [Noam, Linear, Cosine, Exponential, NoDecay])
def test_state_dict_restores_and_applies_the_rate(cls: type[WarmupLRScheduler]) -> None:
    first = cls(sgd(), BASE, 3, 20)
    for _ in range(9):
        first.step()
    state = first.state_dict()
    assert {"start_lr", "warmup_iter", "end_iter", "num_iter"} <= set(state)
    optimizer = sgd(2)
    second = cls(optimizer, 77.0, 1, 5)
    second.load_state_dict(state)
    assert second.current_lr == first.current_lr
    assert [group["lr"] for group in optimizer.param_groups] == [first.current_lr] * 2
    assert second.state_dict() == state


def test_exponential_goes_on_with_the_gamma_of_a_state() -> None:
    state = Exponential(sgd(), BASE, 0, -1, 2, 0.5).state_dict()
    scheduler = Exponential(sgd(), BASE, 0, -1)
    scheduler.load_state_dict(state)
    assert scheduler.current_lr == pytest.approx(BASE * 0.25)


def test_exponential_keeps_gamma_when_a_file_has_none() -> None:
    scheduler = Exponential(sgd(), BASE, 0, -1, 0, 0.5)
    state = scheduler.state_dict()
    assert state.pop("gamma") == 0.5
    state["num_iter"] = 2
    scheduler.load_state_dict(state)
    assert scheduler.current_lr == pytest.approx(BASE * 0.25)


def test_user_subclass_with_its_own_state() -> None:
    class Stairs(WarmupLRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer, width: int) -> None:
            self.width = width
            super().__init__(optimizer, BASE, 2, -1)

        def get_lr_warmup(self, num_iter: int) -> float:
            return self.start_lr / 10

        def get_lr_decay(self, num_iter: int) -> float:
            return self.start_lr / (1 + num_iter // self.width)

    scheduler = Stairs(sgd(), 4)
    assert scheduler.current_lr == BASE / 10
    scheduler.step(8)
    assert scheduler.current_lr == BASE / 3


def test_base_class_names_the_missing_method() -> None:
    with pytest.raises(NotImplementedError, match="get_lr_decay"):
        WarmupLRScheduler(sgd(), BASE, 0, None)


def test_misspelt_names_still_work_and_warn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecate, "_seen", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert lr_scheduler.WarmupLRSchduler is lr_scheduler.warmup.WarmupLRSchduler is WarmupLRScheduler

        class Old(lr_scheduler.WarmupLRSchduler):
            def get_lr_warmpup(self, num_iter: int) -> float:
                return 0.125

            def get_lr_decay(self, num_iter: int) -> float:
                return 0.5

        class Older(Old):
            def get_lr_warmpup(self, num_iter: int) -> float:
                return 0.25

        assert Old(sgd(), 1.0, 2, -1).current_lr == 0.125
        assert Older(sgd(), 1.0, 2, -1).current_lr == 0.25
    assert [w.category for w in caught] == [DeprecationWarning] * 2
    assert [w.filename for w in caught] == [__file__] * 2


def test_a_tensor_rate_is_written_in_place() -> None:
    rate = torch.tensor(3.0)
    optimizer = torch.optim.Adam(
        [torch.nn.Parameter(torch.zeros(1))], lr=rate, capturable=False, foreach=False
    )
    NoDecay(optimizer, 0.5, 0, None)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.5
