"""Containers among the arguments of a Block with a compute_dtype: held to plain torch that converts alike."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt

DIM = 8
NARROW = torch.bfloat16


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    ids: torch.Tensor


@dataclass
class Data:
    x: torch.Tensor
    y: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    ids: torch.Tensor


@dataclass
class Output(OrderedDict[str, Any]):
    """A mapping and a dataclass with the same entries, as the outputs of transformers are."""

    x: torch.Tensor
    y: torch.Tensor
    ids: torch.Tensor

    def __post_init__(self) -> None:
        for field in fields(self):
            self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Cache:
    """An object of its own kind, which decides itself in which dtype it keeps what."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, ids: torch.Tensor) -> None:
        self.x, self.y, self.ids = x, y, ids


KINDS: dict[str, Any] = {
    "list": lambda x, y, ids: [x, y, ids],
    "dict": lambda x, y, ids: {"x": x, "y": y, "ids": ids},
    "user dict": lambda x, y, ids: UserDict(x=x, y=y, ids=ids),
    "named tuple": Named,
    "dataclass": Data,
    "frozen dataclass": Frozen,
    "model output": Output,
    "nested": lambda x, y, ids: {"x": [(x,)], "y": Data(y, y, ids), "ids": ids},
}


def entries(given: Any) -> list[torch.Tensor]:
    """x, y and ids."""
    if isinstance(given, (list, tuple)):
        return list(given)
    if isinstance(given, dict) and isinstance(given["x"], list):
        return [given["x"][0][0], given["y"].x, given["ids"]]
    if isinstance(given, (dict, UserDict)):
        return [given["x"], given["y"], given["ids"]]
    return [given.x, given.y, given.ids]


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(DIM, DIM))
        self.seen: set[tuple[torch.dtype, ...]] = set()

    def forward(self, given: Any) -> torch.Tensor:
        x, y, ids = entries(given)
        self.seen.add((x.dtype, y.dtype, ids.dtype))
        return torch.tanh(x @ self.weight[:, ids]) * y


def trained(kind: str, recompute: str) -> None:
    torch.manual_seed(0)
    block = bmt.Block(Layer(), policy=bmt.BlockPolicy(recompute=recompute, compute_dtype=NARROW))
    weight = block._module.weight.gather().detach().requires_grad_()
    torch.manual_seed(bmt.rank())
    x, y, ids = torch.randn(4, DIM, requires_grad=True), torch.randn(4, DIM), torch.arange(DIM)
    theirs = x.detach().clone().requires_grad_()
    given = KINDS[kind](x, y, ids)
    result = block(given)
    assert all(after is before for after, before in zip(entries(given), (x, y, ids), strict=True))
    expected = torch.tanh(theirs.to(NARROW) @ weight.to(NARROW)) * y.to(NARROW)
    assert torch.equal(result, expected)
    result.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert all(after is before for after, before in zip(entries(given), (x, y, ids), strict=True))
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad, theirs.grad)
    full = bmt.distributed.all_reduce(weight.grad).flatten()
    param = next(block.parameters())
    torch.testing.assert_close(
        param.grad, full[param._start_partition : param._end_partition], rtol=1e-6, atol=1e-6
    )
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(block(given), expected)
        assert all(after is before for after, before in zip(entries(given), (x, y, ids), strict=True))
    assert block._module.seen == {(NARROW, NARROW, torch.int64)}


@pytest.mark.parametrize("recompute", ["off", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_containers_are_converted_for_the_call(kind: str, recompute: str) -> None:
    run_ranks(2, trained, kind, recompute)


class Caching(bmt.DistributedModule):
    """Writes to what it is given: in place to `slots`, and another tensor in the place of `state`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        kept = cache["opaque"].x.dtype
        assert (cache["slots"].dtype, cache["state"].dtype, kept) == (NARROW, x.dtype, torch.float32)
        cache["slots"][:, 1] = x[0].detach() * 2
        cache["state"] = cache["state"] + x * self.weight
        cache["new"] = x
        return cache["state"] * 1


def cached(mode: str) -> None:
    block = bmt.Block(Caching(), policy=bmt.BlockPolicy(recompute="off", compute_dtype=NARROW))
    x = torch.full((1, DIM), 1 / 3)
    with {"grad": torch.enable_grad, "no grad": torch.no_grad, "inference": torch.inference_mode}[mode]():
        slots, state = torch.full((DIM, 3), 1 / 3), torch.full((1, DIM), 1 / 3, requires_grad=mode == "grad")
        opaque = Cache(torch.ones(1), slots, slots)
        cache = {"slots": slots, "state": state, "opaque": opaque}
        result = block(x, cache)
    assert cache["slots"] is slots
    assert cache["opaque"] is opaque
    assert torch.equal(slots[:, 1], (x[0].to(NARROW) * 2).float())  # written by the forward
    assert torch.equal(
        slots[:, ::2], torch.full((DIM, 2), 1 / 3)
    )  # what it did not write keeps its fp32 bits
    assert cache["new"] is x
    assert cache["state"].dtype == NARROW
    assert torch.equal(cache["state"], (2 * x).to(NARROW))
    if mode == "grad":
        (result.float().sum() + cache["state"].float().sum()).backward()
        assert torch.equal(state.grad, torch.full((1, DIM), 2.0))


@pytest.mark.parametrize("mode", ["grad", "no grad", "inference"])
def test_what_a_forward_writes_into_a_container_reaches_the_caller(mode: str) -> None:
    run_ranks(2, cached, mode)


def failing() -> None:
    block = bmt.Block(Layer(), policy=bmt.BlockPolicy(compute_dtype=NARROW))
    block._module.forward = lambda given: given[0] @ given[1]
    x, y = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
    given = [x, y]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        block(given)
    assert given[0] is x
    assert given[1] is y


def test_an_error_leaves_the_containers_as_they_were() -> None:
    run_ranks(1, failing)
