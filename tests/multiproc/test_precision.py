"""Blocks that compute and send in other dtypes than their parameters': held to plain torch that converts alike."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain.global_var import context

LAYERS, DIM, MICROS = 3, 13, 2
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(DIM, DIM) / DIM**0.5)
        self.bias = bmt.DistributedParameter(torch.randn(DIM))
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x, pair, scale=None):
        self.seen.append((x.dtype, self.weight.dtype, pair[0].dtype, pair[1].dtype, scale.dtype))
        return torch.tanh(torch.nn.functional.linear(x, self.weight, self.bias)) * scale + x


def plain(
    values: dict[str, torch.Tensor], x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor
) -> torch.Tensor:
    for index in range(LAYERS):
        x = x.to(dtype)
        weight, bias = (values[f"{index}.{name}"].to(dtype) for name in ("weight", "bias"))
        x = torch.tanh(torch.nn.functional.linear(x, weight, bias)) * scale.to(dtype) + x
    return x.float().square().sum()


def trained(policy: dict[str, Any], accumulates: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        layers = bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(LAYERS)])
    pair = torch.ones(2), torch.arange(2)
    optimizer = bmt.optim.AdamOptimizer(layers.parameters(), lr=0.01)
    group = context().world
    for step in range(3):
        # What a forward sees: on every rank, and on one alone, what has travelled.
        exact = {name: param.gather().detach() for name, param in layers.named_parameters()}
        values = {n: value.to(policy["gather_dtype"]).float() for n, value in exact.items()}
        for value in values.values():
            value.requires_grad_()
        optimizer.zero_grad()
        wanted = torch.zeros(())
        group.comm.reset_traffic()
        group.reduce_comm.reset_traffic()
        for micro in range(MICROS):
            generator = torch.Generator().manual_seed(10 * step + 2 * micro + bmt.rank())
            x, scale = torch.randn(4, DIM, generator=generator), torch.full((1,), 0.5, requires_grad=True)
            ours = x.clone().requires_grad_()
            with bmt.no_sync() if accumulates and micro < MICROS - 1 else nullcontext():
                loss = layers(ours, pair, scale=scale).float().square().sum()
                loss.backward()
            theirs = x.clone().requires_grad_()
            expected = plain(values, theirs, policy["compute_dtype"] or torch.float32, scale)
            expected.backward()
            assert torch.equal(loss, expected)
            assert ours.grad.dtype == torch.float32
            assert torch.equal(ours.grad, theirs.grad)
            wanted = wanted + loss.detach()
        traffic = {**dict(group.comm.traffic()), **dict(group.reduce_comm.traffic())}
        for name, param in layers.named_parameters():
            full = bmt.distributed.all_reduce(values[name].grad).flatten()
            part = full[param._start_partition : param._end_partition]
            assert param.dtype == param.grad.dtype == torch.float32
            waits_narrow = accumulates and policy["compute_dtype"] and policy["reduce_dtype"] is None
            tolerance = 0.05 if waits_narrow else 1e-6
            torch.testing.assert_close(param.grad, part, rtol=tolerance, atol=tolerance)
        with torch.no_grad():  # evaluation computes alike
            assert torch.equal(layers(x, pair, scale=scale).float().square().sum(), loss)
        optimizer.step()
    for name, value in layers.state_dict().items():  # exact, whatever travels
        assert value.dtype == torch.float32
        assert not torch.equal(value.bfloat16().float(), value)
        assert torch.equal(value, dict(layers.named_parameters())[name].gather())
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())
    assert [row["name"] for row in bmt.inspect.inspect_model(layers, "*weight")] == [
        f"{index}.weight" for index in range(LAYERS)
    ]
    shards = layers[0]._storages[0].shards
    return {
        "seen": set(layers[0]._module.seen),
        "gathered": traffic.get("all_gather", (0, 0)),
        "reduced": traffic.get("all_to_all", traffic.get("all_reduce", (0, 0))),
        "numel": shards.layout.partition,
        "in_use": current_engine(context()).pool.stats()["buffers_in_use"],
    }


# level, dtypes of gather, compute and reduce, recompute, accumulating: bytes of an element in gathers, in reductions.
CASES = {
    "bf16": (3, None, "bf16", None, "whole", False, 2, 2),
    "fp16, activations kept": (3, None, "fp16", None, "off", False, 2, 2),
    "bf16, selective, level 2": (2, "bf16", "bf16", None, "selective", False, 2, 2),
    "bf16, accumulating": (3, None, "bf16", None, "whole", True, 2, 2),
    "bf16, accumulating in fp32": (3, None, "bf16", "fp32", "whole", True, 2, 4),
    "bf16, level 1": (1, None, "bf16", "fp32", "whole", False, 2, 4),
    "bf16, level 0": (0, None, "bf16", None, "whole", False, 0, 4),
    "fp32": (3, None, None, None, "whole", False, 4, 4),
    "fp32 through bf16": (3, "bf16", None, None, "whole", False, 2, 4),
    "fp32 through fp16, activations kept": (3, "fp16", None, None, "off", True, 2, 4),
    "fp32 through bf16, selective, level 2": (2, "bf16", None, None, "selective", False, 2, 4),
    "fp32 through bf16, level 1": (1, "bf16", None, None, "whole", True, 2, 4),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_dtypes_on_the_wire_and_in_the_sum(case, world):
    level, gather, compute, reduce, recompute, accumulates, gather_bytes, reduce_bytes = CASES[case]
    policy = {
        "level": level,
        "gather_dtype": DTYPES.get(gather),
        "compute_dtype": DTYPES.get(compute),
        "reduce_dtype": DTYPES.get(reduce),
        "recompute": recompute,
    }
    for outcome in run_ranks(world, trained, policy, accumulates):
        dtype = DTYPES.get(compute, torch.float32)
        assert outcome["seen"] == {(dtype, dtype, dtype, torch.int64, dtype)}
        assert outcome["in_use"] == (LAYERS if level == 1 and (world > 1 or compute or gather) else 0)
        if world > 1:
            messages, nbytes = outcome["gathered"]
            assert nbytes == messages * outcome["numel"] * gather_bytes
            messages, nbytes = outcome["reduced"]
            assert messages == (LAYERS if accumulates else LAYERS * MICROS)
            assert nbytes == messages * outcome["numel"] * reduce_bytes


def summed(reduce_dtype: torch.dtype | None) -> float:
    policy = bmt.BlockPolicy(compute_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    block = bmt.Block(Layer(), policy=policy)
    block._module.forward = lambda x: (block._module.weight * x).sum()
    with bmt.no_sync():
        (block(torch.ones(1, DIM)).float() * 256).backward()
    block(torch.ones(1, DIM)).float().backward()
    return bmt.inspect.inspect_model(block, "weight")[0]["grad_mean"]


def test_what_waits_in_16_bits_is_rounded_and_what_waits_in_32_is_not():
    # Each of two ranks adds 1 to 256, which bf16 rounds to 256; fp32 sums the ranks.
    assert run_ranks(2, summed, None) == [512.0, 512.0]
    assert run_ranks(2, summed, torch.float32) == [514.0, 514.0]


def what_a_forward_sees(dtype: torch.dtype) -> None:
    """Ties go to even, what is not finite stays so, and what the dtype cannot hold becomes infinite."""
    values = [
        1.0,
        1 + 2**-9,
        1 + 3 * 2**-9,
        -(2**-9) - 1,
        1 + 2**-12,
        1e-30,
        7e4,
        3.4e38,
        float("inf"),
        float("nan"),
    ]
    stored = torch.tensor(values).to(dtype)
    seen = []

    class Looks(bmt.DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = bmt.DistributedParameter(stored.clone())

        def forward(self, x):
            seen.append(self.weight.detach().clone())
            return x * self.weight.sum()

    for wire in (torch.bfloat16, torch.float16):
        block = bmt.Block(Looks(), policy=bmt.BlockPolicy(gather_dtype=wire))
        for _ in range(2):
            seen.clear()
            block(torch.ones(1, requires_grad=True)).sum().backward()
            # Others travel as they are.
            wanted = stored.to(wire).float() if dtype == torch.float32 else stored
            assert len(seen) == 2  # the forward, and that of backward
            for value in seen:
                assert value.dtype == dtype
                torch.testing.assert_close(value, wanted, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(block.weight.gather(), stored, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("world", [1, 3])
def test_what_travels_is_what_every_rank_sees(world):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        run_ranks(world, what_a_forward_sees, dtype)


def test_dtype_arguments():
    with pytest.raises(ValueError, match=r"compute_dtype: expected None, .*, got torch\.float32"):
        bmt.BlockPolicy(compute_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"gather_dtype: expected None, .*, got torch\.float32"):
        bmt.BlockPolicy(gather_dtype=torch.float32)
    with pytest.raises(
        ValueError,
        match=r"gather_dtype: expected None or the compute_dtype, torch\.bfloat16, .*, got torch\.float16",
    ):
        bmt.BlockPolicy(gather_dtype=torch.float16, compute_dtype=torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"gather_dtype: at level 0 nothing is gathered, got torch\.bfloat16"
    ):
        bmt.BlockPolicy(level=0, gather_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"reduce_dtype: expected None, .*, got torch\.int8"):
        bmt.BlockPolicy(reduce_dtype=torch.int8)
