"""Ways of summing gradients over the ranks: straight to their owners, around a ring, or host by host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.kits import TanhLinear

import bmtrain as bmt
from bmtrain import _C
from bmtrain.global_var import context

DIM, LAYERS = 16, 2


@contextmanager
def pretended_hosts(names: str) -> Iterator[None]:
    """This job's ranks are on hosts of these names."""
    real = context().places
    object.__setattr__(context(), "places", tuple(names))
    try:
        yield
    finally:
        object.__setattr__(context(), "places", real)  # the ranks go on to other tests


def gradients(
    names: str, policy: dict[str, Any], dtype: torch.dtype, accumulates: bool = True
) -> dict[str, Any]:
    """Each rank's gradients, whole and summed; and what was sent for them, by communicator."""
    with pretended_hosts(names):
        return _gradients(policy, dtype, accumulates)


def _gradients(policy: dict[str, Any], dtype: torch.dtype, accumulates: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        model = bmt.TransformerBlockList([bmt.Block(TanhLinear(DIM)) for _ in range(LAYERS)])
    model.to(dtype)
    values = {name: p.gather().detach().requires_grad_() for name, p in model.named_parameters()}
    comms = context().communicators()
    for accumulated in range(2 if accumulates else 1):
        for comm in comms:
            comm.reset_traffic()
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(7 * accumulated + bmt.rank()))
        model(x.to(dtype)).float().square().sum().backward()
        plain_loss(values, x.to(dtype)).backward()
    sent = {comm.name: comm.traffic() for comm in comms if "reduce" in comm.name}
    own = {name: p.grad.clone() for name, p in model.named_parameters()}
    mine = {name: value.grad.flatten() for name, value in values.items()}
    return {"own": own, "mine": mine, "sent": {name: of for name, of in sent.items() if of}}


def plain_loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for index in range(LAYERS):
        x = torch.tanh(torch.nn.functional.linear(x, values[f"{index}.weight"], values[f"{index}.bias"]))
    return x.float().square().sum()


def total(results: list[dict[str, Any]], name: str) -> torch.Tensor:
    return torch.cat([of_rank["own"][name] for of_rank in results]).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduce", [None, "hosts", "ring"])
def test_sums_are_those_of_direct_slices(reduce: str | None, dtype: torch.dtype) -> None:
    direct = run_ranks(4, gradients, "aabb", {"reduce": "direct"}, dtype)
    found = run_ranks(4, gradients, "aabb", {"reduce": reduce}, dtype)
    for name in direct[0]["own"]:
        expected, actual = total(direct, name), total(found, name)
        tolerance = (1e-6 if dtype == torch.float32 else 2**-7) * float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)
    again = run_ranks(4, gradients, "aabb", {"reduce": reduce}, dtype)
    assert all(torch.equal(total(found, name), total(again, name)) for name in direct[0]["own"])


def test_the_order_of_the_sum_of_hosts() -> None:
    """To the bit: over the ranks of each host, then over the hosts."""
    found = run_ranks(4, gradients, "aabb", {}, torch.float32, accumulates=False)
    for name in found[0]["own"]:
        of_ranks = [of_rank["mine"][name] for of_rank in found]
        expected = (of_ranks[0] + of_ranks[1]) + (of_ranks[2] + of_ranks[3])
        assert torch.equal(total(found, name), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_each_way_sends(dtype: torch.dtype) -> None:
    slices = _slices(dtype)
    sent = run_ranks(4, gradients, "aabb", {"reduce": "direct"}, dtype)[1]["sent"]
    assert sent == {"zero.reduce": {"all_to_all": (LAYERS, 3 * slices)}}
    sent = run_ranks(4, gradients, "aabb", {"reduce": "ring"}, dtype)[1]["sent"]
    assert sent == {"zero.reduce": {"reduce_scatter": (LAYERS, 3 * slices)}}
    sent = run_ranks(4, gradients, "aabb", {}, dtype)[1]["sent"]
    # Within a host a slice for each host; then, between the two hosts, one slice: of direct slices it is two.
    assert sent == {
        "zero/2.reduce": {"all_to_all": (LAYERS, 2 * slices)},
        "zero/2.replicas.reduce": {"all_to_all": (LAYERS, slices)},
    }


def _slices(dtype: torch.dtype) -> int:
    """Bytes of one rank's slices of all layers."""
    layout = _C.FlatLayout([DIM * DIM, DIM], dtype.itemsize, 4)
    return LAYERS * layout.partition * dtype.itemsize


@pytest.mark.parametrize("names", ["aaaa", "abcd", "abab", "aaab"])
def test_direct_where_hosts_are_one_or_differ(names: str) -> None:
    sent = run_ranks(4, gradients, names, {"reduce": "hosts"}, torch.float32)[0]["sent"]
    assert list(sent) == ["zero.reduce"]


def alone_and_then_direct() -> tuple[list[str], dict[str, Any]]:
    """Names of all communicators, and what ranks send that had a Block of level 0 before."""
    with bmt.default_policy(bmt.BlockPolicy(level=0)):
        model = bmt.Block(TanhLinear(DIM))
    model(torch.ones(4, DIM)).sum().backward()
    sent = gradients("aaaa", {"reduce": "direct"}, torch.float32)["sent"]
    return [comm.name for comm in context().communicators()], sent


def test_communicators_have_names_of_their_own() -> None:
    names, sent = run_ranks(4, alone_and_then_direct)[0]
    assert len(set(names)) == len(names), names
    assert list(sent) == ["zero.reduce"]


def with_virtual_shards(reduce: str) -> None:
    bmt.Block(TanhLinear(DIM), policy=bmt.BlockPolicy(reduce=reduce))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="reduce: expected None, 'direct', 'ring' or 'hosts', got 'tree'"):
        bmt.BlockPolicy(reduce="tree")
    run_ranks(2, with_virtual_shards, "hosts", init={"virtual_shards": 2})
    with pytest.raises(Exception, match="reduce: virtual shards sum the gradients of each rank"):
        run_ranks(2, with_virtual_shards, "ring", init={"virtual_shards": 2})
