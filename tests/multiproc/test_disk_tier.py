"""Optimizer state on a drive: the bits of training without, on any number of ranks, whatever reads the state."""

from __future__ import annotations

import copy
import io
import itertools
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_process, run_ranks
from harness.disk_tier import ALL, MIXED, TIERS, kernel_bytes, make, small_chunks, small_drive, train
from harness.offloaded import Model

import bmtrain as bmt
from bmtrain import _C
from bmtrain._engine.disk_shard import stored_shard_of
from bmtrain._engine.engine import current_engine
from bmtrain._ranks.context import context
from bmtrain.plan import MACHINES, TrainingPolicy, describe_module, estimate
from bmtrain.plan.policy import DISK

STEPS = 4
MUON = ["MuonOptimizer", "MuonOffloadOptimizer"]
KINDS = ["AdamOptimizer", "AdamOffloadOptimizer", "LionOptimizer", "SGDOptimizer", "SGDOffloadOptimizer"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tiers(path: Path, **init: Any) -> dict[str, Any]:
    return {"tier_directories": [str(path)], **init}


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        assert torch.equal(a, b), f"value {number} of {len(left)} differs"


def compare(
    kind: str, dtype: torch.dtype, options: dict[str, Any], places: Sequence[Any] = TIERS[1:2], **run: Any
) -> list[int]:
    small_chunks()
    if kind.startswith("SGD"):
        options = {"momentum": 0.9, **options}
    plain = train(*make(kind, dtype, False, **options), range(STEPS), **run)
    counts = []
    for place in places:
        model, optimizer = make(kind, dtype, place, **options)
        assert_equal(train(model, optimizer, range(STEPS), **run), plain)
        counts.append(sum(optimizer.is_on_disk(p) for p in model.parameters()))
    return counts


def compare_all(kind: str) -> list[int]:
    return [count for dtype in DTYPES for count in compare(kind, dtype, {}, TIERS[1:])]


@pytest.mark.parametrize("kind", [*KINDS[:2], *MUON])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_same_bits(world: int, kind: str, drive: Path) -> None:
    for counts in run_ranks(world, compare_all, kind, init=tiers(drive)):
        assert len(counts) == 12 and min(counts) >= 5
    assert not any(drive.iterdir())


@pytest.mark.parametrize("kind", KINDS[2:])
def test_same_bits_of_other_formulas(kind: str, drive: Path) -> None:
    run_ranks(2, compare, kind, torch.bfloat16, {}, init=tiers(drive))


@pytest.mark.parametrize("back_end", ["io_uring", "threads"])
def test_same_bits_with_each_back_end_and_slow_transfers(back_end: str, drive: Path) -> None:
    environment = {"BMTRAIN_DISK_IO": back_end}
    run_ranks(2, compare_disturbed, init=tiers(drive), environment=environment)


def compare_whole() -> None:
    small_chunks()
    results = [
        train(*make("whole_matrix", dtype, places), range(STEPS)) for dtype in DTYPES for places in TIERS
    ]
    for number, result in enumerate(results):
        assert_equal(result, results[number - number % len(TIERS)])


@pytest.mark.parametrize("world", [1, 2])
def test_whole_parameters(world: int, drive: Path) -> None:
    run_ranks(world, compare_whole, init=tiers(drive))


def compare_disturbed() -> None:
    _C.disturb_transfers(2000)
    try:
        compare("AdamOptimizer", torch.bfloat16, {})
    finally:
        _C.disturb_transfers(0)


@pytest.mark.parametrize("kind", ["AdamOffloadOptimizer", *MUON])
def test_bf16_moments(kind: str, drive: Path) -> None:
    run_ranks(2, compare, kind, torch.float32, {"state_dtype": "bfloat16"}, TIERS[1:], init=tiers(drive))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_steps_in_backward(kind: str, drive: Path) -> None:
    run_ranks(2, compare, kind, torch.bfloat16, {}, clips=False, in_backward=True, init=tiers(drive))


# ---- whatever reads or writes the state


def use_everything(dtype: torch.dtype, kind: str) -> None:
    small_chunks()
    results = []
    for places in (*TIERS[:2], ALL):
        model, optimizer = make(kind, dtype, places)
        train(model, optimizer, range(2))
        seen = [copy.deepcopy(optimizer.state_dict(gather=gather)) for gather in (False, True)]
        train(model, optimizer, range(2, 3))
        for state in optimizer.state.values():  # a user's write
            state["momentum_buffer" if "momentum_buffer" in state else "exp_avg"].mul_(0.5)
        train(model, optimizer, range(3, 4))
        optimizer.load_state_dict(seen[1])
        train(model, optimizer, range(4, 5))
        for p in model.parameters():  # the master follows
            p.data.mul_(0.9)
        train(model, optimizer, range(5, 6))
        states = {
            p: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()}
            for p, s in optimizer.state.items()
        }
        optimizer.state.clear()  # tensors of the user's own
        optimizer.state.update(states)
        results.append([*train(model, optimizer, range(6, 8)), *flat(seen)])
    for result in results[1:]:
        assert_equal(result, results[0])


def use_parameters_and_gradients(policy: dict[str, Any]) -> None:
    small_chunks()
    results = []
    for places in (TIERS[0], ALL):
        model, optimizer = make("AdamOptimizer", torch.float32, {**policy, **places})
        results.append([*play(model, optimizer), *train(model, optimizer, range(2))])
    assert_equal(*results)


def play(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Everything that programs do with parameters and gradients between the passes of a model."""
    seen: list[Any] = []
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(bmt.rank()))

    def loss() -> torch.Tensor:
        result: torch.Tensor = model(x).square().mean()
        return result

    def note() -> None:
        for p in model.parameters():
            seen.append([p.detach().clone(), None if p.grad is None else p.grad.clone()])
        optimizer.step()

    for reset in (True, False, True):
        for _ in range(2):  # gradients add up
            loss().backward()
        note()
        optimizer.zero_grad(set_to_none=reset)
    with bmt.no_sync():
        loss().backward()
        loss().backward()
    loss().backward()
    for number, p in enumerate(model.parameters()):
        if number % 3 == 0:
            p.grad.mul_(0.5)
        elif number % 3 == 1:
            p.grad.data.clamp_(-0.01, 0.01)
        else:
            p.grad = p.grad.clone()
    seen.append(bmt.optim.clip_grad.clip_gradients(model.parameters(), 0.1, norm_type=3))
    note()
    loss().backward()  # to which others' gradients add
    for p in model.layers.parameters():
        p.grad.zero_()
    note()
    optimizer.zero_grad()
    average = [p.data.clone() for p in model.parameters()]
    seen.append(loss().detach())  # a forward without backward, and writes after it
    with torch.no_grad():
        for number, (p, other) in enumerate(zip(model.parameters(), average, strict=True)):
            if number % 3 == 0:
                p.mul_(0.9)
            elif number % 3 == 1:
                p.data.lerp_(other, 0.5)
            else:
                p.data = p.data + 0.01
    with torch.no_grad():
        seen.append(loss())
    seen.append([p.gather() for p in model.parameters()])
    model.load_state_dict({name: value * 0.99 for name, value in model.state_dict().items()})
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2)) for p in model.layers.parameters()
    ]
    loss().backward()
    for handle in handles:
        handle.remove()
    note()
    return flat(seen)


@pytest.mark.parametrize(
    ("world", "policy"),
    [
        (1, {}),
        (2, {}),
        (1, {"level": 2}),
        (2, {"level": 2, "recompute": "off"}),
        (4, {"zero_size": 2}),
        (2, {"compute_dtype": torch.bfloat16}),
        (2, {"keep_gradients": False, "gather_dtype": torch.bfloat16}),
    ],
)
def test_parameters_and_gradients_are_read_and_written_as_ever(
    world: int, policy: dict[str, Any], drive: Path
) -> None:
    environment = {"BMTRAIN_POISON_BUFFERS": "1"}
    run_ranks(world, use_parameters_and_gradients, policy, init=tiers(drive), environment=environment)


def flat(value: Any) -> list[torch.Tensor]:
    leaves: list[Any] = torch.utils._pytree.tree_leaves(value)
    return [leaf for leaf in leaves if torch.is_tensor(leaf)]


@pytest.mark.parametrize("kind", ["AdamOptimizer", *MUON])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_state_is_read_and_written_as_ever(world: int, dtype: torch.dtype, kind: str, drive: Path) -> None:
    run_ranks(world, use_everything, dtype, kind, init=tiers(drive))


def save_here(kind: str, folder: str, on_disk: bool, resumes: bool, steps: range) -> list[torch.Tensor]:
    small_chunks()
    model, optimizer = make(kind, torch.bfloat16, ALL if on_disk else False)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    if resumes:
        bmt.distributed.checkpoint.load(folder, model=model, optim=manager)
    train_alike(model, manager, optimizer, steps)
    bmt.distributed.checkpoint.save(folder, steps.stop, model=model, optim=manager)
    return [p.gather().detach() for p in model.parameters()] + flat(
        optimizer.state_dict(gather=True)["state"]
    )


def train_alike(model: Any, manager: Any, optimizer: Any, steps: range) -> None:
    """As `train`, with one batch for all ranks together: the mean of the ranks' losses does not depend on them."""
    for step in steps:
        x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step)).bfloat16()
        manager.zero_grad()
        manager.backward(model(x).float().square().mean())
        manager.step()


@pytest.mark.parametrize("kind", ["AdamOptimizer", "MuonOptimizer"])
@pytest.mark.parametrize("worlds", [(2, 1), (2, 4), (1, 2), (4, 2)])
@pytest.mark.parametrize("from_disk", [True, False])
def test_checkpoints_go_between_sizes_and_tiers(
    worlds: tuple[int, int], from_disk: bool, kind: str, drive: Path, tmp_path: Path
) -> None:
    init = tiers(drive)
    values = []
    for tiered in (True, False):  # the second without tiers at all
        folder = str(tmp_path / str(tiered))
        first, then = (tiered and from_disk, tiered and not from_disk)
        run_ranks(worlds[0], save_here, kind, folder, first, False, range(2), init=init if first else {})
        values += run_ranks(
            worlds[1], save_here, kind, folder, then, True, range(2, 4), init=init if then else {}
        )[:1]
    assert_equal(*values)


def pickled(kind: str) -> None:
    small_chunks()
    model, optimizer = make(kind, torch.float32, True)
    train(model, optimizer, range(2))
    other = copy.deepcopy((model, optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 12 * sum(p.numel() for p in model.parameters()) + 100_000
    assert_equal(train(*other, range(2, 4)), train(model, optimizer, range(2, 4)))


@pytest.mark.parametrize("kind", ["AdamOptimizer", "MuonOptimizer"])
def test_copies_have_a_state_of_their_own(kind: str, drive: Path) -> None:
    run_ranks(1, pickled, kind, init=tiers(drive))


def use_groups(places: dict[str, Any]) -> list[torch.Tensor]:
    """Gives Muon the vectors of blocks before their matrices, and other matrices after a step."""
    torch.manual_seed(3)
    with bmt.default_policy(bmt.BlockPolicy(**places)):
        model = Model()
    vectors, matrices = [], []
    for layer in model.layers:
        vectors.append(layer.bias)
        matrices.append(layer.weight)
    optimizer: Any = bmt.optim.MuonOptimizer([{"params": vectors}, {"params": matrices[:3]}], lr=0.01)
    train(model, optimizer, range(2))
    optimizer.add_param_group({"params": matrices[3:]})
    return train(model, optimizer, range(2, 5))


def compare_groups() -> None:
    small_chunks()
    results = [use_groups(places) for places in (*TIERS, MIXED)]
    for result in results[1:]:
        assert_equal(result, results[0])


def test_groups_of_muon_in_any_order(drive: Path) -> None:
    run_ranks(2, compare_groups, init=tiers(drive))


# ---- bytes


def count_bytes(dtype: torch.dtype) -> tuple[int, int, int]:
    torch.manual_seed(0)
    policy = bmt.BlockPolicy(optimizer="disk")
    model = bmt.Block(bmt.nn.Linear(2000, 2000, dtype=dtype), policy=policy)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    train_block(model, optimizer)  # the masters are made in the first step
    optimizer._place.finish()
    before = kernel_bytes()
    for _ in range(3):
        train_block(model, optimizer)
        optimizer._place.finish()
    read, written = ((now - old) // 3 for now, old in zip(kernel_bytes(), before, strict=True))
    return read, written, sum(p.numel() for p in model.parameters())


def train_block(model: Any, optimizer: Any) -> None:
    model(torch.ones(1, 2000, dtype=next(model.parameters()).dtype)).float().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(("dtype", "state"), [(torch.float32, 8), (torch.bfloat16, 12)])
@pytest.mark.parametrize("world", [1, 2])
def test_state_passes_once_in_each_direction(
    world: int, dtype: torch.dtype, state: int, tmp_path: Path
) -> None:
    for read, written, numel in run_ranks(world, count_bytes, dtype, init=tiers(tmp_path)):
        assert read == pytest.approx(state * numel, rel=0.02)
        assert written == pytest.approx(state * numel, rel=0.02)


#: Layers, backwards of a step, level.
RUNS = [(4, 1, 3), (12, 1, 3), (4, 3, 3), (4, 1, 2)]


def count_memory_and_bytes(
    kind: str, runs: list[tuple[int, int, int]], share: float = 1.0
) -> list[list[float]]:
    results = []
    places = ALL if share == 1 else {name: {"disk": share, "device": 1 - share} for name in ALL}
    for num_layers, num_backwards, level in runs:
        with bmt.default_policy(bmt.BlockPolicy(level=level, **places)):
            blocks = [bmt.Block(bmt.nn.Linear(600, 600, bias=False)) for _ in range(num_layers)]
        model = bmt.TransformerBlockList(blocks)
        # without iterations: products in bf16 take minutes on a processor without instructions for them
        options = {"ns_steps": 0} if kind == "MuonOptimizer" else {}
        optimizer = getattr(bmt.optim, kind)(model.parameters(), **options)
        before: tuple[int, int] = (0, 0)
        for _ in range(3):
            before = kernel_bytes()
            optimizer.zero_grad(set_to_none=True)
            for _ in range(num_backwards):
                model(torch.ones(1, 600)).sum().backward()
            optimizer.step()
            optimizer._place.finish()
        moved = [now - old for now, old in zip(kernel_bytes(), before, strict=True)]
        block = sum(p.numel() * 4 for p in blocks[0].parameters())
        report = bmt.memory_report(model, optimizer)
        in_memory = round((1 - share) * num_layers) * block
        assert [report.parameters, report.gradients] == pytest.approx(2 * [in_memory], rel=0.02)
        arrays, rule = (3, "muon") if kind == "MuonOptimizer" else (4, "adam")
        assert report.on_disk == pytest.approx(arrays * (num_layers * block - in_memory), rel=0.02)
        policy = TrainingPolicy(  # type: ignore[arg-type]
            disk=DISK, disk_share=share, accumulate=num_backwards, level=level, optimizer=rule
        )
        machine = MACHINES["a100-80gb"].with_devices(bmt.world_size())
        planned = estimate(describe_module(model, torch.ones(1, 600)), machine, policy).disk
        assert planned.stored == pytest.approx(report.on_disk, rel=0.02)
        assert moved == pytest.approx([planned.read, planned.written], rel=0.02)
        assert report.disk_buffers <= planned.buffers
        results.append([report.disk_buffers, moved[0] / block, moved[1] / block])
        del model, blocks, optimizer
    return results


def most_in_a_backward(num_layers: int) -> int:
    """Returns the most bytes of parameters and gradients in memory between the blocks of a backward."""
    with bmt.default_policy(bmt.BlockPolicy(**ALL)):
        blocks = [bmt.Block(bmt.nn.Linear(600, 600, bias=False)) for _ in range(num_layers)]
    bmt.init_parameters(torch.nn.ModuleList(blocks))
    pool, seen = current_engine(context()).tier.pool, []
    for _ in range(2):
        x = torch.ones(1, 600, requires_grad=True)
        for block in blocks:
            x = block(x)
            x.register_hook(lambda _: seen.append(pool.stats()["bytes_in_use"]))
        x.sum().backward()
    return max(seen)


def test_gradients_leave_memory_in_the_backward(tmp_path: Path) -> None:
    few, many = (run_ranks(1, most_in_a_backward, number, init=tiers(tmp_path)) for number in (6, 12))
    assert few == many


@pytest.mark.parametrize(("kind", "moments"), [("AdamOptimizer", 2), ("MuonOptimizer", 1)])
@pytest.mark.parametrize("world", [1, 2])
def test_memory_is_that_of_a_few_blocks_and_each_byte_passes_once(
    world: int, kind: str, moments: int, tmp_path: Path
) -> None:
    for results in run_ranks(world, count_memory_and_bytes, kind, RUNS, init=tiers(tmp_path)):
        assert results[0][0] == results[1][0]  # bytes of buffers
        for (num_layers, times, level), (_, read, written) in zip(RUNS, results, strict=True):
            # Parameters for forward and backward, gradients that are added to, and in the step parameters, gradients
            # and moments.
            again = num_layers - 1 if level == 3 else 0
            passes = times * (num_layers + again) + (times - 1) * num_layers
            assert read == pytest.approx(passes + (2 + moments) * num_layers, rel=0.02)
            assert written == pytest.approx((times + 1 + moments) * num_layers, rel=0.02)


def test_plan_counts_shares_of_the_blocks(tmp_path: Path) -> None:
    for kind in ("AdamOptimizer", "MuonOptimizer"):
        run_ranks(2, count_memory_and_bytes, kind, [(5, 1, 3)], 0.4, init=tiers(tmp_path), fresh=True)


# ---- what goes wrong


def fail(kind: str, result: int, failing: int, places: dict[str, Any]) -> str:
    small_chunks()
    model, optimizer = make(kind, torch.bfloat16, places)
    train(model, optimizer, range(2))
    if bmt.rank() == bmt.world_size() - 1:
        _C.disturb_transfers(0, failing, result)
    try:
        with pytest.raises(bmt.errors.DiskError) as raised:
            train(model, optimizer, range(2, 4))  # the forward after a failed update raises
        with pytest.raises(bmt.errors.DiskError):  # for ever
            optimizer.step()
    finally:
        _C.disturb_transfers(0)
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "places", "failing", "what"),
    [
        ("AdamOptimizer", TIERS[1], 0, "optimizer state"),
        ("AdamOptimizer", TIERS[1], 12, "optimizer state"),
        ("AdamOptimizer", ALL, 0, "parameters"),
        ("AdamOptimizer", ALL, 11, "gradients"),
        ("AdamOptimizer", ALL, 16, "gradients"),
        ("AdamOptimizer", ALL, 40, "optimizer state"),
        ("MuonOptimizer", TIERS[1], 0, "optimizer state"),
        ("MuonOffloadOptimizer", TIERS[1], 7, "optimizer state"),
        ("MuonOptimizer", TIERS[1], 19, "optimizer state"),  # the last write
    ],
)
def test_failed_transfers(kind: str, places: dict[str, Any], failing: int, what: str, tmp_path: Path) -> None:
    results = {-5: "Input/output error", 0: "the file ended after", -28: "No space"}
    result, words = list(results.items())[failing % 3]
    for text in run_ranks(2, fail, kind, result, failing, places, init=tiers(tmp_path), fresh=True):
        assert words in text
        assert f"disk tier in {tmp_path}" in text
        assert f"{what} of " in text


def flip(optimizer: Any, what: str) -> None:
    """Changes a bit that rank 1 has on the drive, or changes it back."""
    arena = next(iter(optimizer._place._homes.values())).arena
    if bmt.rank() != 1:
        return
    if what == "state":
        arena.mapping.tensor(arena.file.nbytes // 2, 1).bitwise_xor_(4)
    else:
        getattr(arena.stored, what).mapping[1000:1001].bitwise_xor_(4)


#: Readers of a model, an optimizer and a parameter at rest: what they read, and whether a rank does it alone.
READERS: dict[str, tuple[str, bool, Any]] = {
    "forward": ("parameters", False, lambda m, o, p, f: m(torch.ones(2, 40))),
    "gather": ("parameters", False, lambda m, o, p, f: p.gather()),
    "state_dict": ("parameters", False, lambda m, o, p, f: m.state_dict()),
    "save": ("parameters", False, lambda m, o, p, f: bmt.save(m, f"{f}/file")),
    "weights": ("parameters", False, lambda m, o, p, f: bmt.weights.save(m, f"{f}/w.safetensors")),
    "inspect": ("parameters", False, lambda m, o, p, f: bmt.inspect.inspect_model(m, "*")),
    "whole": ("parameters", False, lambda m, o, p, f: bmt.whole(m.layers[0]).__enter__()),
    "checkpoint": ("parameters", False, lambda m, o, p, f: bmt.distributed.checkpoint.save(f, 1, m)),
    "dcp": ("parameters", False, lambda m, o, p, f: bmt.dcp.save(f"{f}/dcp", m, o)),
    "data": ("parameters", True, lambda m, o, p, f: p.data),
    "deepcopy": ("parameters", True, lambda m, o, p, f: copy.deepcopy(p)),
    "load": ("parameters", True, lambda m, o, p, f: p.load(torch.ones(40, 40))),
    "load_state_dict": ("parameters", True, lambda m, o, p, f: m.load_state_dict(STATE, strict=False)),
    "step": ("gradients", False, lambda m, o, p, f: (o.step(), m(torch.ones(2, 40)))),
    "gather_grad": ("gradients", False, lambda m, o, p, f: p.gather_grad()),
    "inspect gradients": ("gradients", False, lambda m, o, p, f: bmt.inspect.inspect_model(m, "*")),
    "clip": ("gradients", False, lambda m, o, p, f: bmt.optim.clip_grad.clip_gradients(m.parameters(), 0.1)),
    "rescale": (
        "gradients",
        False,
        lambda m, o, p, f: bmt.optim.optim_manager.grad_rescale(o.param_groups, 2),
    ),
    "overflow": (
        "gradients",
        False,
        lambda m, o, p, f: bmt.optim.optim_manager.check_overflow(o.param_groups),
    ),
    "backward": ("gradients", False, lambda m, o, p, f: (m(torch.ones(2, 40)).sum().backward(), o.step())),
    "grad": ("gradients", True, lambda m, o, p, f: p.grad),
    "step of state": ("state", False, lambda m, o, p, f: (o.step(), m(torch.ones(2, 40)))),
    "checkpoint of state": (
        "state",
        False,
        lambda m, o, p, f: bmt.distributed.checkpoint.save(f, 1, None, o),
    ),
    "gathered state": ("state", False, lambda m, o, p, f: o.state_dict(gather=True)),
    "state": ("state", True, lambda m, o, p, f: o.state),
}
STATE = {"layers.0.bias": torch.ones(40)}


def read_flipped(kind: str, readers: list[str], folder: str) -> list[str]:
    """Has a bit of rank 1 flipped before each reader. Returns the errors."""
    small_chunks()
    model, optimizer = make(kind, torch.float32, ALL)
    train_only(model, optimizer)
    texts = []
    for name in readers:
        what, is_alone, read = READERS[name]
        train_only(model, optimizer)
        flip(optimizer, what)
        if not is_alone or bmt.rank() == 1:
            try:
                read(model, optimizer, model.layers[0].weight, folder)
                pytest.fail(f"{name}: not detected")
            except bmt.errors.DiskError as error:
                assert what.split()[-1] in str(error), name
                texts.append(str(error))
        if is_alone:  # then no rank goes on
            with pytest.raises(bmt.errors.DiskError):
                for _ in range(2):  # the forward after a failed update raises
                    train_only(model, optimizer, waits=False)
        flip(optimizer, what)
        current_engine(context()).drives.failure = None
    return texts


def train_only(model: Any, optimizer: Any, *, waits: bool = True) -> None:
    """Leaves gradients on the drive, so that a reader finds them."""
    optimizer.zero_grad(set_to_none=True)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    if waits:
        optimizer._place.finish()


@pytest.mark.parametrize(
    ("kind", "back_end"),
    [("AdamOptimizer", "io_uring"), ("AdamOptimizer", "threads"), ("MuonOptimizer", "io_uring")],
)
def test_flipped_bit(kind: str, back_end: str, tmp_path: Path) -> None:
    environment = {"BMTRAIN_DISK_IO": back_end}
    run = run_ranks(
        2, read_flipped, kind, list(READERS), str(tmp_path), init=tiers(tmp_path), environment=environment
    )
    for texts in run:
        for text in texts:
            assert re.search(r"(parameters|gradients|optimizer state) of Layer#0: ", text)
            assert re.search(f"disk tier in {tmp_path}: [0-9]+ bytes at offset [0-9]+", text)
            assert "their checksum differs" in text


def read_large() -> None:
    block = bmt.Block(bmt.nn.Linear(2000, 2000), policy=bmt.BlockPolicy(**ALL))
    bmt.init_parameters(block)
    optimizer: Any = bmt.optim.AdamOptimizer(block.parameters())
    train_block(block, optimizer)
    optimizer._place.finish()
    stored: Any = stored_shard_of(block.weight)
    for at in range(0, 4 * 2000 * 2000, 1_500_000):
        stored.parameters.mapping[at : at + 1].bitwise_xor_(4)
        with pytest.raises(bmt.errors.DiskError, match="their checksum differs"):
            block(torch.ones(1, 2000))
        stored.rest_parameters()
        stored.parameters.mapping[at : at + 1].bitwise_xor_(4)
        stored.tier.drives.failure = None
    block(torch.ones(1, 2000))


def test_flipped_bit_anywhere_in_large_parameters(tmp_path: Path) -> None:
    """Reads are cut into pieces, and each piece is compared."""
    run_ranks(1, read_large, init=tiers(tmp_path))


def fill() -> str:
    model, _ = make("AdamOptimizer", torch.bfloat16, False)  # the first optimizer has nothing on the drive
    with bmt.default_policy(bmt.BlockPolicy(optimizer="disk")):
        block = bmt.Block(bmt.nn.Linear(2000, 2000, dtype=torch.bfloat16))
    with pytest.raises(bmt.errors.DiskError) as raised:
        bmt.optim.AdamOptimizer([*model.parameters(), *block.parameters()])
    return str(raised.value)


def test_no_room(tmp_path: Path) -> None:
    with small_drive(tmp_path / "drive", 20 << 20) as drive:
        texts = run_ranks(2, fill, init=tiers(drive), fresh=True)
        assert len(set(texts)) == 1
        assert re.search(r"24[0-9]{6} bytes are needed, [0-9]+ are free", texts[0])
        assert os.statvfs(drive).f_bfree == os.statvfs(drive).f_blocks


LIMIT = 512 << 20


@pytest.mark.skipif(
    os.environ.get("BMTRAIN_DISK_LIMIT") != "1", reason="takes minutes: set BMTRAIN_DISK_LIMIT=1"
)
def test_model_of_four_times_the_memory_limit(tmp_path: Path) -> None:
    """The example's GPT-2 in fp32: 134 million parameters of 16 bytes are 2.1 GB, and the limit is 0.5 GiB."""
    group = Path(f"/sys/fs/cgroup/memory/bmtrain-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"no control group of memory (version 1) can be made here: {error}")
    options = (
        "--num-layers 76 --dim-model 384 --num-heads 6 --steps 12 --batch-size 2 --seq-len 64 --log-every 1"
    )
    command = [sys.executable, "example/train.py", *options.split(), "--save-every", "100", "--warmup", "1"]
    command += ["--disk", str(tmp_path), "--out", str(tmp_path / "out"), "--validation-batches", "2"]
    try:
        enter = ["bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "enter"]
        done = run_process([*enter, *command], timeout=3600)
        peak = int((group / "memory.max_usage_in_bytes").read_text())
    finally:
        time.sleep(1)
        group.rmdir()
    count = int(re.search(r"with ([\d,]+) parameters", done.stdout)[1].replace(",", ""))  # type: ignore[index]
    assert 16 * count >= 4 * LIMIT >= 4 * peak
    first, last = re.search(r"validation loss: +([\d.]+) before, ([\d.]+) after", done.stdout).groups()  # type: ignore[union-attr]
    assert float(last) < float(first)


# ---- what is refused


def refusals(wrong: str) -> str:
    policy = bmt.BlockPolicy(optimizer="disk")
    if wrong != "tierless":
        model = bmt.Block(bmt.nn.Linear(8, 8), policy=policy)
    calls = {
        "int8": lambda: bmt.optim.AdamOptimizer(model.parameters(), state_dtype="int8"),
        "muon": lambda: bmt.optim.MuonOptimizer(model.parameters(), state_dtype="int8"),
        "torch": lambda: bmt.optim.OptimManager().add_optimizer(torch.optim.SGD(model.parameters(), lr=1)),
        "tierless": lambda: bmt.Block(bmt.nn.Linear(8, 8), policy=policy),
    }
    with pytest.raises(ValueError) as raised:
        calls[wrong]()
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("int8", "expected state_dtype float32 or bfloat16, got int8"),
        ("muon", "expected state_dtype float32 or bfloat16, got int8"),
        ("torch", "expected an optimizer of bmtrain.optim, got SGD"),
        ("tierless", "init_distributed"),
    ],
)
def test_refused(kind: str, words: str, tmp_path: Path) -> None:
    init = {} if kind == "tierless" else tiers(tmp_path)
    (text,) = run_ranks(1, refusals, kind, init=init)
    assert words in text
    assert "BlockPolicy(" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parameters": "disk"}, "parameters='disk': expected optimizer='disk' as well, got None"),
        ({"gradients": "drive"}, "gradients: expected 'device', 'host' or 'disk', got 'drive'"),
        ({**ALL, "level": 1}, "parameters='disk': expected level 2 or 3, got 1"),
        ({**TIERS[2], "level": 0}, "gradients='disk': expected level 1, 2 or 3, got 0"),
        (
            {"optimizer": {"disk": 0.5}},
            "optimizer: expected shares of 'device', 'host' and 'disk' with the sum 1",
        ),
        (
            {"optimizer": {"disk": 0.5, "nvme": 0.5}},
            "optimizer: expected shares of 'device', 'host' and 'disk'",
        ),
        (
            {"optimizer": {"disk": 0.2, "host": 0.8}, "gradients": "disk"},
            "gradients='disk': expected optimizer='disk' as well, got {'disk': 0.2",
        ),
    ],
)
def test_refused_policies(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        bmt.BlockPolicy(**options)


def test_shares_of_the_blocks() -> None:
    policy = bmt.BlockPolicy(
        optimizer={"disk": 0.5, "device": 0.5},
        gradients={"disk": 0.5, "device": 0.5},
        parameters={"disk": 0.2, "host": 0.8},
    )
    places = [policy.of_block(number) for number in range(3, 43)]
    on_disk = [number for number, place in enumerate(places) if place.optimizer == "disk"]
    assert {b - a for a, b in itertools.pairwise(on_disk)} == {2}
    assert [place.gradients == "disk" for place in places] == [place.optimizer == "disk" for place in places]
    assert [place.parameters for place in places].count("disk") == 8
    assert {place.parameters for place in places if place.optimizer is None} == {"host"}
    assert places[0].of_block(7) is places[0]
    for share in (0.01, 0.5, 0.99):  # a single Block is not divided
        assert bmt.BlockPolicy(optimizer={"disk": share, "device": 1 - share}).of_block(0).optimizer is None
