"""Value, gradient and optimizer state of one whole parameter: read and set, in Blocks and outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt

MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = {
    "adam": lambda params: bmt.optim.AdamOptimizer(params, lr=0.1),
    "offload": lambda params: bmt.optim.AdamOffloadOptimizer(params, lr=0.1),
    "torch": lambda params: torch.optim.Adam(params, lr=0.1),
}


def net(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 5, dtype=dtype),
        torch.nn.ModuleList([torch.nn.Linear(5, 5, dtype=dtype)]),
        torch.nn.Linear(5, 1, bias=False, dtype=dtype),
    )


def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model[2](torch.tanh(model[1][0](torch.tanh(model[0](x))))).square().sum()


def gradient_and_state(kind: str, dtype: torch.dtype) -> None:
    model, reference = bmt.BMTrainModelWrapper(net(dtype)), net(dtype)
    params, twins = list(model.parameters()), list(reference.parameters())
    optimizer, twin = OPTIMIZERS[kind](params), torch.optim.Adam(twins, lr=0.1)
    x = torch.randn(4, 6, dtype=dtype)
    assert all(p.gather_grad() is None for p in params)
    with pytest.raises(KeyError, match="first step"):
        bmt.optim.gather_state(optimizer, params[0], "exp_avg")
    close: dict[str, Any] = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.02}
    )
    for _ in range(2):
        (forward(model, x) / bmt.world_size()).backward()
        forward(reference, x).backward()
        for p, twin_p in zip(params, twins, strict=True):
            gradient = p.gather_grad()
            torch.testing.assert_close(gradient, twin_p.grad, **close)
            p.load_grad(-3 * twin_p.grad.double())
            assert torch.equal(p.gather_grad(), -3 * twin_p.grad)
            twin_p.grad.mul_(-3)
            with pytest.raises(ValueError, match="expected shape"):
                p.load_grad(gradient.reshape(-1, 1, 1))
        optimizer.step()
        twin.step()
        for p, twin_p in zip(params, twins, strict=True):
            momentum = bmt.optim.gather_state(optimizer, p, "exp_avg")
            torch.testing.assert_close(momentum, twin.state[twin_p]["exp_avg"].to(momentum.dtype), **close)
            bmt.optim.load_state(optimizer, p, "exp_avg", momentum * 2)
            assert torch.equal(bmt.optim.gather_state(optimizer, p, "exp_avg"), momentum * 2)
            twin.state[twin_p]["exp_avg"].mul_(2)
        optimizer.zero_grad(set_to_none=True)
        twin.zero_grad()
    for p, twin_p in zip(params, twins, strict=True):
        torch.testing.assert_close(p.gather().detach(), twin_p.detach(), **close)
    if dtype is torch.bfloat16:
        master = bmt.optim.gather_state(optimizer, params[0], "_param_fp32")
        assert master.dtype is torch.float32 and torch.equal(master.bfloat16(), params[0].gather())
    for p, name, error in ((params[0], "nothing", KeyError), (params[2], "step", (KeyError, ValueError))):
        with pytest.raises(error):
            bmt.optim.gather_state(optimizer, p, name)
    with pytest.raises(ValueError, match="expected shape"):
        bmt.optim.load_state(optimizer, params[0], "exp_avg", torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "torch"])
@pytest.mark.parametrize("world", [1, 3])
def test_gradient_and_state(world: int, kind: str, dtype: torch.dtype) -> None:
    run_ranks(world, gradient_and_state, kind, dtype)


def test_with_an_optimizer_of_torch() -> None:
    run_ranks(2, gradient_and_state, "torch", torch.float32)


def value() -> None:
    model = bmt.BMTrainModelWrapper(net(torch.bfloat16))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.0)
    forward(model, torch.ones(1, 6, dtype=torch.bfloat16)).backward()
    optimizer.step()
    for p in model.parameters():
        p.load(torch.arange(float(p.full_numel)).view(p.full_shape))
        with pytest.raises(ValueError, match="expected shape"):
            p.load(torch.zeros(7, 7))
    optimizer.step()
    for p in model.parameters():
        assert p.gather().flatten().tolist() == list(range(p.full_numel))


def test_value() -> None:
    run_ranks(2, value)


def state_by_parameter(kind: str, dtype: torch.dtype) -> set[tuple[bool, ...]]:
    """Which parameters have elements here; a script reads the state of all."""
    model = bmt.BMTrainModelWrapper(
        torch.nn.ModuleList([torch.nn.Linear(6, 3, dtype=dtype) for _ in range(2)])
    )
    params = list(model.parameters())
    optimizer = OPTIMIZERS[kind](params)
    for number in range(1, 4):
        sum(layer(torch.ones(2, 6, dtype=dtype)).sum() for layer in model).backward()
        optimizer.step()
        saved = optimizer.state_dict()["state"]
        for index, p in enumerate(params):
            state = optimizer.state[p]
            assert {"step", "exp_avg", "exp_avg_sq"} <= state.keys() == saved[index].keys()
            assert int(state["step"]) == number
            assert all(state[name].shape == p.shape == saved[index][name].shape for name in MOMENTS)
        optimizer.load_state_dict(optimizer.state_dict())
    return {tuple(p.numel() > 0 for p in params)}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_empty_shards_have_a_state_too(kind: str, dtype: torch.dtype) -> None:
    assert len(set.union(*run_ranks(2, state_by_parameter, kind, dtype))) == 2
