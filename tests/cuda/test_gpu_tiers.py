"""Blocks of a GPU with parameters and gradients on the host: the bits of other Blocks, and less device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor

import bmtrain as bmt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

WIDTH, LAYERS = 64, 4
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"parameters": "host"},
    "state on a drive": {"parameters": "host", "optimizer": "disk"},
    "gradients on a drive": {"parameters": "host", "gradients": "disk", "optimizer": "disk"},
    "parameters on a drive": {"parameters": "disk", "optimizer": "disk"},
    "all on a drive": {"parameters": "disk", "gradients": "disk", "optimizer": "disk"},
}


class Layer(bmt.DistributedModule):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        ones = torch.nn.init.ones_
        self.weight = bmt.DistributedParameter(torch.randn(WIDTH, WIDTH).div(8).to(dtype), init_method=ones)
        self.bias = bmt.DistributedParameter(torch.randn(WIDTH).div(8).to(dtype), init_method=ones)
        self.scale = bmt.DistributedParameter(torch.ones(WIDTH, dtype=dtype), False, ones)

    def forward(self, x: Tensor) -> Tensor:
        return (
            x + torch.nn.functional.gelu(torch.nn.functional.linear(x, self.weight, self.bias)) * self.scale
        )


def build(dtype: torch.dtype, places: list[str], **policy: Any) -> bmt.TransformerBlockList:
    torch.manual_seed(3)
    return bmt.TransformerBlockList(
        [bmt.Block(Layer(dtype), policy=bmt.BlockPolicy(**PLACES[place], **policy)) for place in places]
    )


def trained(places: list[str], dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    """Losses, norms, weights and optimizer state of a few steps."""
    options = dict(options)
    accumulate, drops = options.pop("accumulate", 1), options.pop("set_to_none", False)
    kind, scale = options.pop("optimizer", bmt.optim.AdamOptimizer), options.pop("loss_scale", None)
    frozen, moves = options.pop("frozen", ()), options.pop("moves", False)
    model = build(dtype, places, **options)
    if moves:  # as scripts do, which keeps shards where they are
        model.to(bmt.config["device"])
    for number in frozen:
        model[number].requires_grad_(False)
    optimizer = kind(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=scale, accumulate=accumulate)
    manager.add_optimizer(optimizer)
    generator = torch.Generator().manual_seed(bmt.rank())
    found = []
    for step in range(3):
        for _ in range(accumulate):
            manager.zero_grad(set_to_none=drops)
            x = torch.randn(8, WIDTH, generator=generator).to(bmt.config["device"], dtype)
            loss = model(x).float().square().mean()
            manager.backward(loss)
            found.append(loss.detach().cpu())
            if step == accumulate:
                break
        found.append(manager.clip_grad_norm(optimizer.param_groups, max_norm=0.05).cpu())
        manager.step()
    with torch.no_grad():
        found.append(model(torch.ones(2, WIDTH, device=bmt.config["device"], dtype=dtype)).cpu())
    for place, block in zip(places, model, strict=True):
        for p in block.parameters():
            assert p.device.type == ("cuda" if place == "device" else "cpu")
            assert p.grad is None or p.grad.device == p.device
    found += [value.cpu() for value in model.state_dict().values()]
    for state in optimizer.state_dict(gather=True)["state"].values():
        found += [value.cpu() for value in state.values() if isinstance(value, Tensor)]
    return found


HOST, DEVICE = ["host"] * LAYERS, ["device"] * LAYERS
MIXED = ["host", "device", "device", "host"]
RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {"recompute": "off", "set_to_none": True}),
    "fp16 with a loss scale": (torch.float16, {"recompute": "selective", "loss_scale": 1024.0}),
    "level 2": (torch.bfloat16, {"level": 2}),
    "accumulation": (torch.bfloat16, {"accumulate": 2, "set_to_none": True}),
    "sent by each backward": (torch.float32, {"accumulate": 2, "keep_gradients": False}),
    "bf16 copies": (torch.float32, {"compute_dtype": torch.bfloat16}),
    "narrow messages": (torch.float32, {"gather_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}),
    "frozen Blocks": (torch.bfloat16, {"frozen": (0, 2)}),
    "offloaded": (torch.bfloat16, {"optimizer": bmt.optim.AdamOffloadOptimizer}),
    "moved": (torch.float32, {"moves": True}),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_no_bit_changes(name: str, world: int) -> None:
    dtype, options = RUNS[name]
    where = {"cuda": True, "environment": {"BMTRAIN_BACKEND": "gloo"} if world > 1 else {}}
    expected = run_ranks(world, trained, DEVICE, dtype, options, **where)
    for places in (HOST, MIXED):
        for found, wanted in zip(
            run_ranks(world, trained, places, dtype, options, **where), expected, strict=True
        ):
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["fp32", "bf16", "accumulation", "level 2", "frozen Blocks", "offloaded"])
@pytest.mark.parametrize("world", [1, 2])
def test_no_bit_changes_with_drives(world: int, name: str, tmp_path: Path) -> None:
    dtype, options = RUNS[name]
    where = {"cuda": True, "environment": {"BMTRAIN_BACKEND": "gloo"} if world > 1 else {}}
    places = list(PLACES)[2:]
    expected, found = (
        run_ranks(world, trained, kind, dtype, options, init={"tier_directories": [str(tmp_path)]}, **where)
        for kind in (["device"] * len(places), places)
    )
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


def peak(place: str, num_blocks: int) -> tuple[int, int]:
    """The most device memory of a step beyond what was there before the model, and the bytes of its parameters."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        model = build(torch.bfloat16, [place] * num_blocks)
    bmt.init_parameters(model)
    model(torch.ones(2, WIDTH, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    return torch.cuda.max_memory_allocated() - before, sum(
        block._storages[0].shards.shard.nbytes for block in model
    )


@pytest.mark.parametrize("world", [1, 2])
def test_the_device_holds_a_few_blocks(world: int) -> None:
    where = {"cuda": True, "environment": {"BMTRAIN_BACKEND": "gloo"} if world > 1 else {}}
    few, many = (run_ranks(world, peak, "host", number, **where) for number in (8, 32))
    on_device = run_ranks(world, peak, "device", 32, **where)
    for (least, _), (most, nbytes), (expected, _) in zip(few, many, on_device, strict=True):
        assert most - least <= 24 * 512  # the inputs of Blocks, for recomputation
        assert expected - most > nbytes  # parameters, and gradients of all blocks but these


def refused(policy: dict[str, object]) -> str:
    try:
        bmt.Block(Layer(torch.float32), policy=bmt.BlockPolicy(**policy))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"parameters": "host", "level": 1}, "expected level 2 or 3, got 1"),
        ({"gradients": "host"}, "(gradients='host') on a GPU: expected parameters='host' or 'disk' as well"),
        ({"optimizer": "disk"}, "expected init_distributed(tier_directories=[...]), got none"),
    ],
)
def test_refused_policies(policy: dict[str, object], words: str) -> None:
    assert words in run_ranks(1, refused, policy, cuda=True)[0]
