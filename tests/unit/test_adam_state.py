"""Saving and loading the state of the Adam optimizers in one process."""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_levels import same_bits
from torch import nn

from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer
from bmtrain.optim._arrays import allocate

BOTH = (AdamOptimizer, AdamOffloadOptimizer)
SHAPES = ((3, 5), (7,), (64, 33))


def trained(cls: Any, dtype: torch.dtype, steps: int = 3, **options: Any) -> tuple[list[nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer = cls([{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}], lr=0.1, **options)
    for i in range(steps):
        train_step(params, optimizer, i)
    return params, optimizer


def train_step(params: list[nn.Parameter], optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    optimizer.step(scale=2)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # weights_only


@pytest.mark.parametrize("gather", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("source", BOTH)
@pytest.mark.parametrize("target", BOTH)
def test_a_loaded_optimizer_continues_exactly(
    target: Any, source: Any, dtype: torch.dtype, gather: bool
) -> None:
    params, optimizer = trained(source, dtype)
    saved = through_a_file(optimizer.state_dict(gather=gather))
    twins, other = [nn.Parameter(p.detach().clone()) for p in params], None
    other = target([{"params": twins[:2]}, {"params": twins[2:]}], lr=7, eps=1)
    before = copy.deepcopy(saved)
    other.load_state_dict(saved)
    assert [(g["lr"], g["eps"], g["weight_decay"]) for g in other.param_groups] == [
        (0.1, 1e-8, 0.1),
        (0.1, 1e-8, 0),
    ]
    mirror = source([{"params": params[:2]}, {"params": params[2:]}])
    mirror.load_state_dict(optimizer.state_dict())
    for number in range(3, 6):
        train_step(params, mirror, number)
        train_step(twins, other, number)
    exact = source is target or dtype != torch.float32
    for p, q in zip(params, twins, strict=True):
        assert same_bits(p.data, q.data) if exact else torch.allclose(p, q, rtol=0, atol=1e-6)
        assert optimizer.state[p]["step"] == 3
    assert str(saved) == str(before)  # the caller's dict is its own


@pytest.mark.parametrize("dtypes", ((torch.float32, torch.bfloat16), (torch.float16, torch.float32)), ids=str)
@pytest.mark.parametrize("cls", BOTH)
def test_a_converted_model_goes_on_as_from_its_saved_state(
    cls: Any, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """`module.bfloat16()` and `.float()` in the middle of training: masters come and go with 16-bit values."""
    params, optimizer = trained(cls, dtypes[0])
    saved = copy.deepcopy(optimizer.state_dict())
    for p, entry in zip(params, saved["state"].values(), strict=True):
        p.data = p.data.to(dtypes[1])
        if dtypes[1] == torch.float32:
            del entry["_param_fp32"]  # what the user sees counts, not what it was rounded from
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    other = cls([{"params": twins[:2]}, {"params": twins[2:]}])
    other.load_state_dict(saved)
    for number in range(3, 6):
        train_step(params, optimizer, number)
        train_step(twins, other, number)
    for p, q in zip(params, twins, strict=True):
        assert p.dtype == dtypes[1] and same_bits(p.data, q.data)
        assert optimizer.state[p].keys() == other.state[q].keys()


def test_what_a_state_dict_holds() -> None:
    params, optimizer = trained(AdamOffloadOptimizer, torch.bfloat16)
    local, whole = optimizer.state_dict(), optimizer.state_dict(True)
    assert (local["is_whole"], whole["is_whole"]) == (False, True)
    for number, p in enumerate(params):
        assert sorted(local["state"][number]) == ["_param_fp32", "exp_avg", "exp_avg_sq", "step"]
        assert local["state"][number]["exp_avg"].shape == p.shape
        for name, value in whole["state"][number].items():
            assert name == "step" or (value.shape, value.dtype) == ((p.numel(),), torch.float32)
            assert name == "step" or torch.equal(value, local["state"][number][name].reshape(-1))
    kept = whole["state"][0]["exp_avg"].clone()
    train_step(params, optimizer, 9)
    assert torch.equal(whole["state"][0]["exp_avg"], kept)


@pytest.mark.parametrize("cls", BOTH)
def test_parameters_without_state_have_no_entry(cls: Any) -> None:
    params, optimizer = trained(cls, torch.float32, steps=0)
    assert optimizer.state_dict()["state"] == optimizer.state_dict(gather=True)["state"] == {}
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert list(optimizer.state_dict(gather=True)["state"]) == [1]
    _, other = trained(cls, torch.float32, steps=2)
    other.load_state_dict(optimizer.state_dict(gather=True))
    assert list(other.state) == [other.param_groups[0]["params"][1]]


@pytest.mark.parametrize("cls", BOTH)
def test_a_state_without_master_takes_the_parameter(cls: Any) -> None:
    params, optimizer = trained(cls, torch.bfloat16)
    saved = optimizer.state_dict(gather=True)
    for entry in saved["state"].values():
        del entry["_param_fp32"]
    optimizer.load_state_dict(saved)
    for p in params:
        assert torch.equal(optimizer.state[p]["_param_fp32"], p.detach().float())


@pytest.mark.parametrize("order", ("model first", "optimizer first"))
@pytest.mark.parametrize("cls", BOTH)
def test_both_load_orders_resume_exactly(cls: Any, order: str) -> None:
    params, optimizer = trained(cls, torch.bfloat16)
    saved = through_a_file(optimizer.state_dict())
    weights = [p.detach().clone() for p in params]
    twins, other = trained(cls, torch.bfloat16, steps=1)

    def load_model() -> None:
        with torch.no_grad():
            for p, w in zip(twins, weights, strict=True):
                p.copy_(w)

    loads = [load_model, lambda: other.load_state_dict(saved)]
    for load in loads if order == "model first" else loads[::-1]:
        load()
    train_step(params, optimizer, 3)
    train_step(twins, other, 3)
    for p, q in zip(params, twins, strict=True):
        assert same_bits(optimizer.state[p]["_param_fp32"], other.state[q]["_param_fp32"])


def test_a_state_dict_of_torch_adam_loads() -> None:
    p = nn.Parameter(torch.ones(4))
    q = nn.Parameter(torch.ones(4))
    theirs, ours = torch.optim.Adam([p], lr=0.1), AdamOptimizer([q])
    p.grad = torch.arange(4.0)
    theirs.step()
    q.data.copy_(p.data)
    ours.load_state_dict(theirs.state_dict())
    q.grad = p.grad.clone()
    theirs.step()
    ours.step()
    assert same_bits(p.data, q.data)


def test_bad_states_are_refused_and_change_nothing() -> None:
    params, optimizer = trained(AdamOptimizer, torch.float32)
    before = {p: optimizer.state[p]["exp_avg"].clone() for p in params}
    one_group = AdamOptimizer(params).state_dict()
    with pytest.raises(
        ValueError, match=r"expected 2 parameter groups of sizes \[2, 1\], got 1 of sizes \[3\]"
    ):
        optimizer.load_state_dict(one_group)
    short = copy.deepcopy(optimizer.state_dict())
    short["state"][2]["exp_avg_sq"] = torch.zeros(5)
    with pytest.raises(
        ValueError, match="exp_avg_sq of parameter 2: expected 2112 elements on this rank, got 5"
    ):
        optimizer.load_state_dict(short)
    lacking = copy.deepcopy(optimizer.state_dict())
    del lacking["state"][1]["exp_avg"]
    with pytest.raises(ValueError, match=r"parameter 1: expected exp_avg, got only \['exp_avg_sq'\]"):
        optimizer.load_state_dict(lacking)
    for p, value in before.items():
        assert torch.equal(optimizer.state[p]["exp_avg"], value)


def test_float16_moments_warn() -> None:
    params, optimizer = trained(AdamOptimizer, torch.float16)
    saved = copy.deepcopy(optimizer.state_dict())
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"].half()
    with pytest.warns(UserWarning, match="units of the loss scale"):
        optimizer.load_state_dict(saved)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32


def test_hooks_of_torch_are_called() -> None:
    _, optimizer = trained(AdamOptimizer, torch.float32)
    calls: list[str] = []
    optimizer.register_load_state_dict_pre_hook(lambda o, sd: calls.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda o, sd: calls.append("saved"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saved", "pre", "post"]


def test_a_hook_of_torch_replaces_the_state() -> None:
    params, optimizer = trained(AdamOptimizer, torch.float32)
    saved = copy.deepcopy(optimizer.state_dict())

    def renamed(found: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        assert found is optimizer
        return state["optimizer"]

    optimizer.state[params[0]]["exp_avg"].zero_()
    optimizer.register_load_state_dict_pre_hook(renamed)
    optimizer.load_state_dict({"optimizer": saved})
    assert torch.equal(optimizer.state[params[0]]["exp_avg"], saved["state"][0]["exp_avg"])


@pytest.mark.parametrize("gather", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("moments", "kept_in"), (("bfloat16", torch.bfloat16), ("int8", torch.uint8)))
@pytest.mark.parametrize(("source", "target"), (BOTH, BOTH[::-1]))
def test_narrow_moments_are_saved_loaded_and_copied(
    source: Any, target: Any, moments: str, kept_in: torch.dtype, dtype: torch.dtype, gather: bool
) -> None:
    params, optimizer = trained(source, dtype, state_dtype=moments)
    state = optimizer.state[params[0]]
    assert [state[name].dtype for name in ("exp_avg", "exp_avg_sq")] == [kept_in] * 2
    saved = through_a_file(optimizer.state_dict(gather=gather))
    assert saved["state"][0]["exp_avg"].dtype == (torch.float32 if gather else torch.bfloat16)
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    other = target([{"params": twins[:2]}, {"params": twins[2:]}], state_dtype=moments)
    other.load_state_dict(saved)
    third = copy.deepcopy(other)
    for number in range(3, 6):
        train_step(params, optimizer, number)
        train_step(twins, other, number)
        train_step([p for g in third.param_groups for p in g["params"]], third, number)
    copies = [p for g in third.param_groups for p in g["params"]]
    for p, q, r in zip(params, twins, copies, strict=True):
        assert same_bits(p.data, q.data)
        assert same_bits(p.data, r.data)


def test_moments_of_any_dtype_load_into_any_other() -> None:
    kinds = ("float32", "bfloat16", "int8")
    for source in kinds:
        params, optimizer = trained(AdamOptimizer, torch.bfloat16, state_dtype=source)
        for target in kinds:
            _, other = trained(AdamOffloadOptimizer, torch.bfloat16, state_dtype=target)
            other.load_state_dict(optimizer.state_dict())
            for name in ("exp_avg", "exp_avg_sq"):
                expected = optimizer.state_dict()["state"][2][name].float()
                found = other.state_dict()["state"][2][name].float()
                exact = kinds.index(source) >= kinds.index(target)
                torch.testing.assert_close(
                    found, expected, rtol=0 if exact else 1 / 16, atol=1e-6 * (not exact)
                )
    assert len(params) == len(SHAPES)


@pytest.mark.parametrize("cls", BOTH)
def test_state_dtype_is_one_of_three(cls: Any) -> None:
    for wrong in (torch.float16, "fp8", 8):
        with pytest.raises(
            TypeError, match=r"state_dtype: expected torch.float32, torch.bfloat16 or torch.int8"
        ):
            cls([nn.Parameter(torch.ones(2))], state_dtype=wrong)
    with pytest.raises(ValueError, match="record_delta: expected False with moments in 8 bits"):
        AdamOffloadOptimizer([nn.Parameter(torch.ones(2))], record_delta=True, state_dtype="int8")


def faults_by_thread() -> dict[str, int]:
    """Pages that each thread of this process was the first to touch."""
    tasks = Path("/proc/self/task").glob("*/stat")
    return {task.parent.name: int(task.read_text().rpartition(")")[2].split()[7]) for task in tasks}


PR_SET_THP_DISABLE = 41  # linux/prctl.h


@pytest.fixture
def small_pages() -> Iterator[None]:
    """A fault is a page of 4 KiB each time: whether the kernel has a huge one at hand is chance."""
    library = ctypes.CDLL(None)
    assert library.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    yield
    assert library.prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0) == 0


@pytest.mark.usefixtures("small_pages")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts page faults of threads")
def test_new_state_is_touched_by_the_threads_that_will_update_it() -> None:
    """Each of two threads half of every array: with fewer pages than that, one of them would have helped."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trained(AdamOffloadOptimizer, torch.float32)
        allocate([torch.Size([1 << 16])], [torch.float32], torch.device("cpu"))  # both threads exist
        old = faults_by_thread()
        arrays = allocate([torch.Size([1 << 23])], [torch.float32] * 3, torch.device("cpu"))
        new = {name: count - old.get(name, 0) for name, count in faults_by_thread().items()}
    finally:
        torch.set_num_threads(before)
    assert not any(array[0].any() for array in arrays)
    first, second = sorted(new.values())[-2:]
    assert 0.4 * (first + second) <= first, new
