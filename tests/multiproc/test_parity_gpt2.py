"""The example's GPT-2 on 1, 2 and 4 ranks against the same model in a plain, single-process PyTorch loop.

Three runs are compared in each test: *sharded* (bmtrain, W ranks, each with its part of the batch), *whole* (plain
PyTorch, the batch in one piece) and *cut* (plain PyTorch, the batch cut into the ranks' parts and their gradients
added). Whole and cut differ by rounding alone; how much is the measure of what sharded may differ from whole.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.adam_inputs import step_with_nearest_roots
from reference_gpt import SMALL_SHAPE, ReferenceGPT

import bmtrain as bmt

EXAMPLE = str(Path(__file__).parents[2] / "example")
STEPS = 20
BATCH, SEQ_LEN = 8, 16
SHAPE = {**SMALL_SHAPE, "max_distance": SEQ_LEN}


@dataclass
class Run:
    """What a training run came to. Gradients and weights by name, in full."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, targets and the mask of real tokens. Rows alternate so that every rank has as many tokens to predict."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(SHAPE["vocab_size"], (BATCH, SEQ_LEN + 1), generator=generator)
    lengths = torch.tensor([SEQ_LEN, SEQ_LEN - 5]).repeat(BATCH // 2)
    mask = torch.arange(SEQ_LEN) < lengths[:, None]
    return ids[:, :-1], torch.where(mask, ids[:, 1:], -100), mask


def loss_of(model: torch.nn.Module, step: int, part: int, parts: int) -> torch.Tensor:
    """Mean loss over one part of the batch, by torch's own loss function."""
    ids, targets, mask = (t.chunk(parts)[part] for t in batch_of(step))
    pos = torch.arange(SEQ_LEN).repeat(len(ids), 1)
    logits = model(ids, pos, mask)
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_scheduler(optimizer: torch.optim.Optimizer) -> bmt.lr_scheduler.WarmupLRScheduler:
    return bmt.lr_scheduler.Cosine(optimizer, start_lr=3e-3, warmup_iter=4, end_iter=2 * STEPS, num_iter=1)


def sharded(
    dtype: torch.dtype, optimizer_name: str, loss_scale: float | None, options: dict[str, Any]
) -> dict[str, Any]:
    """One rank's part of a run: losses, scales, its shards of the first gradients, the full weights."""
    if EXAMPLE not in sys.path:
        sys.path.insert(0, EXAMPLE)
    from models import GPT  # the example's folder is no package

    torch.manual_seed(7)
    model = GPT(**SHAPE, dtype=dtype, **options)
    bmt.init_parameters(model)
    if optimizer_name == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    else:
        optimizer = getattr(bmt.optim, optimizer_name)(model.parameters(), weight_decay=0.01)
    manager = bmt.optim.OptimManager(loss_scale=loss_scale)
    scheduler = make_scheduler(optimizer)
    manager.add_optimizer(optimizer, scheduler)
    run: dict[str, Any] = {"losses": [], "scales": [], "gradients": {}}
    for step in range(STEPS):
        manager.zero_grad()
        loss = loss_of(model, step, bmt.rank(), bmt.world_size())
        manager.backward(loss)
        if step == 0:
            run["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        run["losses"].append(bmt.distributed.all_reduce(loss.detach(), op="avg").item())
        run["scales"].append(manager.loss_scale)
        manager.step()
    run["weights"] = model.state_dict()
    return run


def sharded_run(
    world: int,
    *,
    dtype: torch.dtype = torch.float32,
    optimizer: str = "AdamOptimizer",
    loss_scale: float | None = None,
    **options: Any,
) -> Run:
    ranks = run_ranks(world, sharded, dtype, optimizer, loss_scale, options, timeout=120)
    for other in ranks[1:]:
        assert other["losses"] == ranks[0]["losses"]
        assert other["scales"] == ranks[0]["scales"]
    weights = ranks[0]["weights"]
    gradients = {
        name: torch.cat([rank["gradients"][name] for rank in ranks]).view_as(weight)
        for name, weight in weights.items()
    }
    return Run(ranks[0]["losses"], ranks[0]["scales"], gradients, weights)


class PlainAdam16:
    """Adam as CONTRACT 7.2 has it for 16-bit parameters, from torch's own: fp32 masters, decoupled weight decay."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.masters = [p.detach().float() for p in parameters]
        self.adam = torch.optim.AdamW(self.masters, weight_decay=0.01, foreach=False)
        self.param_groups = self.adam.param_groups

    def step(self, scale: float) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / scale
        step_with_nearest_roots(self.adam)
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


def plain_run(
    parts: int,
    *,
    dtype: torch.dtype = torch.float32,
    optimizer: str = "AdamOptimizer",
    loss_scale: float | None = None,
    tied: bool = True,
) -> Run:
    """The plain loop, with the batch cut into ``parts``; dynamic loss scale as OptimManager's, if one is given."""
    torch.manual_seed(7)
    model = ReferenceGPT(**SHAPE, dtype=dtype, tied=tied)
    parameters = list(model.parameters())
    if dtype != torch.float32:
        adam: Any = PlainAdam16(parameters)
    elif optimizer == "AdamW":
        adam = torch.optim.AdamW(parameters, weight_decay=0.1)
    else:
        adam = torch.optim.Adam(parameters, weight_decay=0.01)
    scheduler = make_scheduler(adam)
    run, scale = Run(), loss_scale or 1.0
    for step in range(STEPS):
        model.zero_grad()
        losses = []
        for part in range(parts):
            loss = loss_of(model, step, part, parts)
            (loss * (scale / parts)).backward()
            losses.append(loss.detach())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if step == 0:
            run.gradients = {name: grad.clone() for name, grad in gradients.items()}
        run.losses.append((torch.stack(losses).sum() / parts).item())
        run.scales.append(scale)
        if loss_scale is not None and not all(bool(grad.isfinite().all()) for grad in gradients.values()):
            scale = max(scale / 2, 1.0)
            continue
        if dtype == torch.float32:
            adam.step()
        else:
            adam.step(scale)
        scheduler.step()
    run.weights = {name: w.detach().clone() for name, w in model.state_dict().items()}
    return run


def furthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of any element."""
    assert list(ours) == list(theirs)
    return max((ours[name].float() - theirs[name].float()).abs().max().item() for name in ours)


def assert_losses_close(ours: Run, theirs: Run, relative: float) -> None:
    for step, (one, other) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert abs(one - other) <= relative * abs(other), f"step {step}: {one!r} against {other!r}"


def assert_gradients_close(ours: Run, theirs: Run, relative: float) -> None:
    for name, gradient in theirs.gradients.items():
        bound = relative * gradient.float().abs().max().item()
        assert furthest({name: ours.gradients[name]}, {name: gradient}) <= bound, name


POLICIES = [
    pytest.param({"use_checkpoint": True, "zero_level": 3}, id="recompute-level3"),
    pytest.param({"use_checkpoint": False, "zero_level": 3}, id="keep-level3"),
    pytest.param({"use_checkpoint": True, "zero_level": 2}, id="recompute-level2"),
    pytest.param({"use_checkpoint": False, "zero_level": 2}, id="keep-level2"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_fp32_equals_plain_pytorch(world: int, policy: dict[str, Any]) -> None:
    whole, cut = plain_run(1), plain_run(world)
    ours = sharded_run(world, **policy)
    assert_losses_close(ours, whole, 1e-6)
    assert_gradients_close(ours, whole, 1e-6)
    assert furthest(ours.weights, whole.weights) <= 2 * furthest(cut.weights, whole.weights)
    assert ours.losses[-1] < ours.losses[0]


@pytest.mark.parametrize("world", [1, 2])
def test_untied_head(world: int) -> None:
    whole, cut = plain_run(1, tied=False), plain_run(world, tied=False)
    ours = sharded_run(world, tied=False)
    assert_losses_close(ours, whole, 1e-6)
    assert_gradients_close(ours, whole, 1e-6)
    assert furthest(ours.weights, whole.weights) <= 2 * furthest(cut.weights, whole.weights)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_torch_adamw_on_shards(world: int) -> None:
    whole, cut = plain_run(1, optimizer="AdamW"), plain_run(world, optimizer="AdamW")
    ours = sharded_run(world, optimizer="AdamW")
    assert_losses_close(ours, whole, 1e-6)
    assert furthest(ours.weights, whole.weights) <= 2 * furthest(cut.weights, whole.weights)


# Losses of 16-bit runs. A weight whose gradient is mostly rounding moves by the learning rate up or down as the
# rounding falls, because Adam divides by the gradient's own size; so weights drift apart, and losses little:
# a loss near 4 depends on thousands of weights, whose roundings are independent. A unit of rounding is 2**-9
# (bf16) or 2**-12 (fp16) of a value; over 20 steps plain PyTorch's own runs, whole and cut, are within a tenth of it.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "loss_scale"),
    [pytest.param(torch.bfloat16, None, id="bf16"), pytest.param(torch.float16, 2.0**22, id="fp16")],
)
def test_16_bit_equals_plain_pytorch(dtype: torch.dtype, loss_scale: float | None, world: int) -> None:
    whole = plain_run(1, dtype=dtype, loss_scale=loss_scale)
    ours = sharded_run(world, dtype=dtype, loss_scale=loss_scale)
    assert ours.scales == whole.scales
    assert ours.losses[-1] < ours.losses[0]
    # Chosen so that the first steps overflow, on every rank, and later ones do not.
    if loss_scale is not None:
        assert whole.scales[0] > whole.scales[2] > whole.scales[-1] == whole.scales[-8]
    if world == 1:
        assert ours.losses == whole.losses
        assert furthest(ours.weights, whole.weights) == 0
        return
    cut = plain_run(world, dtype=dtype, loss_scale=loss_scale)
    assert_losses_close(ours, whole, ROUNDING[dtype])
    assert furthest(ours.weights, whole.weights) <= 2 * furthest(cut.weights, whole.weights)
    if loss_scale is None:
        assert furthest(ours.gradients, whole.gradients) <= 2 * furthest(cut.gradients, whole.gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_offloaded_adam(dtype: torch.dtype) -> None:
    """The optimizer on the host differs from the one on the device by a few last digits at most."""
    whole, cut = plain_run(1, dtype=dtype), plain_run(2, dtype=dtype)
    ours = sharded_run(2, dtype=dtype, optimizer="AdamOffloadOptimizer")
    assert_losses_close(ours, whole, ROUNDING.get(dtype, 1e-6))
    assert furthest(ours.weights, whole.weights) <= 2 * furthest(cut.weights, whole.weights)
