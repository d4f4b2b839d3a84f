"""Blocks of a GPU with parameters and gradients on the host: the bits of other Blocks, and less device memory."""

from __future__ import annotations

import os
from functools import partial
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
    in_backward = options.pop("step_in_backward", False)
    model = build(dtype, places, **options)
    if moves:  # as scripts do, which keeps shards where they are
        model.to(bmt.config["device"])
    for number in frozen:
        model[number].requires_grad_(False)
    optimizer = kind(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=scale, accumulate=accumulate, step_in_backward=in_backward)
    manager.add_optimizer(optimizer)
    generator = torch.Generator().manual_seed(bmt.rank())
    found = []
    for _ in range(3):
        for _ in range(accumulate):
            manager.zero_grad(set_to_none=drops)
            x = torch.randn(8, WIDTH, generator=generator).to(bmt.config["device"], dtype)
            loss = model(x).float().square().mean()
            manager.backward(loss)
            found.append(loss.detach().cpu())
        if not in_backward:
            found.append(manager.clip_grad_norm(optimizer.param_groups, max_norm=0.05).cpu())
        manager.step()
    with torch.no_grad():
        found.append(model(torch.ones(2, WIDTH, device=bmt.config["device"], dtype=dtype)).cpu())
    for place, block in zip(places, model, strict=True):
        for p in block.parameters():
            assert p.device.type == ("cuda" if place == "device" else "cpu")
            # Updates inside the backward have consumed gradients on drives.
            assert in_backward or p.grad is None or p.grad.device == p.device
    found += [value.cpu() for value in model.state_dict().values()]
    for state in optimizer.state_dict(gather=True)["state"].values():
        found += [value.cpu() for value in state.values() if isinstance(value, Tensor)]
    return found


HOST, DEVICE = ["host"] * LAYERS, ["device"] * LAYERS
MIXED = ["host", "device", "device", "host"]
# Of fp32, a GPU and a processor round some operations of Adam differently: both compute on the host here.
ON_HOST = partial(bmt.optim.AdamOffloadOptimizer, fraction=0.0)
RUNS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {"optimizer": ON_HOST}),
    "bf16": (torch.bfloat16, {"recompute": "off", "set_to_none": True}),
    "fp16 with a loss scale": (torch.float16, {"recompute": "selective", "loss_scale": 1024.0}),
    "level 2": (torch.bfloat16, {"level": 2}),
    "accumulation": (torch.bfloat16, {"accumulate": 2, "set_to_none": True}),
    "sent by each backward": (torch.bfloat16, {"accumulate": 2, "keep_gradients": False}),
    "bf16 copies": (torch.float32, {"compute_dtype": torch.bfloat16, "optimizer": ON_HOST}),
    "narrow messages": (
        torch.float32,
        {"gather_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, "optimizer": ON_HOST},
    ),
    "frozen Blocks": (torch.bfloat16, {"frozen": (0, 2)}),
    "offloaded": (torch.bfloat16, {"optimizer": bmt.optim.AdamOffloadOptimizer}),
    "moved": (torch.bfloat16, {"moves": True}),
    "updates in the backward": (torch.bfloat16, {"step_in_backward": True}),
    "updates in the backward, frozen Blocks": (torch.bfloat16, {"step_in_backward": True, "frozen": (0, 2)}),
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


#: Runs whose ways with gradients and messages do not depend on drives.
WITHOUT_DRIVES = (
    "fp16 with a loss scale",
    "sent by each backward",
    "bf16 copies",
    "narrow messages",
    "moved",
)


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same for all tests, whose ranks are then the same too."""
    return str(tmp_path_factory.mktemp("drive"))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [name for name in RUNS if name not in WITHOUT_DRIVES])
def test_no_bit_changes_with_drives(name: str, world: int, drive: str) -> None:
    dtype, options = RUNS[name]
    where = {"cuda": True, "environment": {"BMTRAIN_BACKEND": "gloo"} if world > 1 else {}}
    places = list(PLACES)[2:]
    expected, found = (
        run_ranks(world, trained, kind, dtype, options, init={"tier_directories": [drive]}, **where)
        for kind in (["device"] * len(places), places)
    )
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


def late() -> None:
    """Keeps the device busy, so that copies end late; a simulated one has delays of its own."""
    if "SIMULATED_CUDA_OPERATORS" not in os.environ:
        torch.cuda._sleep(20_000_000)


def changed_after_use(place: str, through_data: bool) -> list[Tensor]:
    """Results of evaluations, each followed by changes of the parameters, also of ones that are copied for later."""
    model = build(torch.bfloat16, [place] * LAYERS)
    x = torch.ones(2, WIDTH, device="cuda", dtype=torch.bfloat16)
    found = []
    with torch.no_grad():
        for number in (LAYERS, LAYERS, LAYERS, 2, LAYERS):
            late()
            y = x
            for block in model[:number]:
                y = block(y)
            for p in model.parameters():
                (p.data if through_data else p).mul_(0.9)
            found.append(y)
    return [y.cpu() for y in found]


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_parameters_may_change_when_a_call_returns(world: int, through_data: bool) -> None:
    where = {"cuda": True, "environment": {"BMTRAIN_BACKEND": "gloo"} if world > 1 else {}}
    expected, found = (
        run_ranks(world, changed_after_use, place, through_data, **where) for place in ("device", "host")
    )
    assert all(map(torch.equal, found[0], expected[0]))


def gradients_at_once(place: str) -> list[list[float]]:
    """Gradients that the host reads when backward returns, and in hooks."""
    model = build(torch.float32, [place] * LAYERS)
    seen: list[list[float]] = []
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    for _ in range(3):
        late()
        model(torch.ones(2, WIDTH, device="cuda")).square().mean().backward()
        seen += [p.grad.tolist() for p in model.parameters() if p.requires_grad]
    return seen


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_there_when_they_are_seen(world: int) -> None:
    where = {"cuda": True, "environment": {"BMTRAIN_BACKEND": "gloo"} if world > 1 else {}}
    expected, found = (run_ranks(world, gradients_at_once, place, **where) for place in ("device", "host"))
    assert found == expected


def continued(folder: str) -> list[Tensor]:
    """Steps of Blocks on the device and on the host, each from a checkpoint of the other kind or of its own."""
    x = torch.ones(2, WIDTH, device="cuda", dtype=torch.bfloat16)
    found: list[list[Tensor]] = []
    for first in ("device", "host"):
        for second in ("device", "host"):
            path = f"{folder}/{first}-{second}"
            for place in (first, second):
                model = build(torch.bfloat16, [place] * LAYERS)
                optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
                if found_before := os.path.exists(path):
                    bmt.distributed.checkpoint.load(path, model, optimizer)
                for _ in range(2):
                    optimizer.zero_grad()
                    model(x).float().square().mean().backward()
                    optimizer.step()
                if not found_before:
                    bmt.distributed.checkpoint.save(path, 2, model, optimizer)
                    bmt.save(model, f"{path}.pt")
            other = build(torch.bfloat16, [second] * LAYERS)
            bmt.load(other, f"{path}.pt")
            found.append([value.cpu() for m in (model, other) for value in m.state_dict().values()])
    for values in found[1:]:
        assert all(map(torch.equal, values, found[0]))
    return found[0]


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_do_not_depend_on_the_place(world: int, tmp_path: Path) -> None:
    where = {"cuda": True, "environment": {"BMTRAIN_BACKEND": "gloo"} if world > 1 else {}}
    first, *others = run_ranks(world, continued, str(tmp_path), **where)
    assert all(all(map(torch.equal, first, other)) for other in others)


def peak(place: str, num_blocks: int) -> tuple[int, int]:
    """The most device memory of a step beyond what was there before the model, and the bytes of its parameters."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("meta"):
        model = build(torch.float32, [place] * num_blocks).bfloat16()
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


def captured(place: str) -> tuple[str, bool]:
    """The error of a capture over Blocks in use, and whether they compute afterwards as before."""
    model = build(torch.float32, [place] * LAYERS)
    x = torch.ones(2, WIDTH, device="cuda")

    def step() -> list[Tensor]:
        for p in model.parameters():
            p.grad = None
        loss = model(x).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = [step() for _ in range(3)][-1]
    with pytest.raises(RuntimeError) as caught, torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()
    return str(caught.value), all(map(torch.equal, step(), expected))


@pytest.mark.parametrize("place", ["host", "all on a drive"])
def test_graphs_over_blocks_on_the_host_are_refused(place: str, drive: str) -> None:
    error, goes_on = run_ranks(1, captured, place, init={"tier_directories": [drive]}, cuda=True)[0]
    assert error.startswith("BlockPolicy(parameters=): expected 'device' for Blocks in a CUDA graph")
    assert goes_on


def rows() -> tuple[bmt.MemoryReport, int]:
    """The report of a model whose Blocks are in all places, after a step, and the number of ranks."""
    model = build(torch.float32, list(PLACES))
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    model(torch.ones(2, WIDTH, device="cuda")).square().mean().backward()
    optimizer.step()
    return bmt.memory_report(model, optimizer), bmt.world_size()


@pytest.mark.parametrize("world", [1, 2])
def test_the_report_has_rows_for_each_tier(world: int, drive: str) -> None:
    where = {"cuda": True, "environment": {"BMTRAIN_BACKEND": "gloo"} if world > 1 else {}}
    for report, _ in run_ranks(world, rows, init={"tier_directories": [drive]}, fresh=True, **where):
        trained = (4 * WIDTH * WIDTH + 512) // world  # each parameter begins at a multiple of 512 bytes
        frozen = 512 // world
        pages, page = -(-trained // 4096) * 4096, 4096  # of the file
        on_device, on_host, stored = report.parameters, report.host_parameters, report.disk_parameters
        assert (on_device, on_host) == (trained + frozen, 3 * (trained + frozen))
        assert stored == 2 * (pages + page)
        on_device, on_host, stored = report.gradients, report.host_gradients, report.disk_gradients
        assert (on_device, on_host, stored) == (trained, 3 * trained, 2 * pages)
        for found, number in (
            (report.optimizer, 1),
            (report.host_optimizer, 1),
            (report.disk_optimizer, 4),
        ):
            # Ranges start apart, and a shard ends at the last parameter.
            assert 2 * number * (4 * WIDTH * WIDTH // world) <= found <= 2 * number * trained + 64 * 1024


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
