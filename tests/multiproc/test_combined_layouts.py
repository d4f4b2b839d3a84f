"""Programs that random layouts do not draw: each trains on divided ranks as on one.

The programs, but for their division, are the same on one rank, whose training the other tests compare with plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.random_layout import Batch, Layout, Weights, batch
from harness.random_layout_run import Layer, initial_weights, make_manager, make_model, own_part
from torch.optim import swa_utils

import bmtrain as bmt
from bmtrain._tools.parity import compare
from bmtrain.distributed import checkpoint

STEPS = 3
LAYOUT = Layout(
    seed=5,
    ranks=0,
    init={},
    policies=[{"recompute": "whole"}, {"level": 2, "recompute": "off"}],
    accumulates_in="virtual",  # the auxiliary losses of mixtures are left out
    optimizer="adam",
    groups=1,
    moe={"scoring": "softmax", "shared_hidden_dim": 8},
)
Found = list[tuple[str, torch.Tensor]]


def mine(layout: Layout, whole: Batch, bounds: Sequence[int] | None = None) -> Batch:
    """This rank's part of a batch; ``bounds``: of the groups' rows, where they have unequally many."""
    size, number = bmt.config["dp_size"], bmt.config["dp_rank"]
    rows = len(whole["input_ids"])
    ends = bounds if bounds and size > 1 else [rows * place // size for place in range(size + 1)]
    own = {name: part[ends[number] : ends[number + 1]] for name, part in whole.items()}
    bmt.nn.sequence.whole_sequences()
    return own_part(replace(layout, accumulates_in="virtual"), own)


class Run:
    """A model in training, and what it has shown."""

    def __init__(self, layout: Layout, weights: Weights) -> None:
        self.layout = layout
        self.model = make_model(layout, weights)
        self.manager = make_manager(layout, self.model)
        self.found: Found = []

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.manager.optimizers for group in optimizer.param_groups]

    def loss(self, step: int, micro: int = 0, bounds: Sequence[int] | None = None) -> torch.Tensor:
        return self.model.loss(mine(self.layout, batch(self.layout, step, micro), bounds), step)

    def backward(self, step: int, bounds: Sequence[int] | None = None) -> None:
        for micro in range(self.layout.accumulate):
            self.manager.backward(self.loss(step, micro, bounds))

    def step(self, step: int) -> None:
        self.manager.zero_grad()
        self.backward(step)
        self.end(step)

    def end(self, step: int) -> None:
        norm = self.manager.clip_grad_norm(self.groups, 0.5)
        self.keep(f"step {step}: norm", norm.nan_to_num(nan=-1, posinf=-1))
        self.manager.step()

    def keep(self, name: str, value: Any) -> None:
        self.found.append((name, torch.as_tensor(value).detach().double().clone()))

    def result(self) -> Found:
        self.found += [
            (f"weight of {name}", value.double()) for name, value in self.model.state_dict().items()
        ]
        return self.found


def own_norms(run: Run) -> None:
    """Each group is clipped by a norm of its own."""
    for step in range(STEPS):
        run.manager.zero_grad()
        run.backward(step)
        for number, (group, norm_type) in enumerate(zip(run.groups, (2, "inf"), strict=True)):
            norm = run.manager.clip_grad_norm([group], 0.01, norm_type=norm_type)
            run.keep(f"step {step}: norm {number}", norm)
        run.manager.step()


def overflow(run: Run) -> None:
    """The loss of one rank overflows: all skip the step."""
    for step in range(STEPS):
        run.manager.zero_grad()
        loss = run.loss(step)
        is_last = bmt.rank() == bmt.world_size() - 1
        run.manager.backward(loss * torch.inf if step == 1 and is_last else loss)
        run.end(step)
        run.keep(f"step {step}: scale", run.manager.loss_scale)


def inspected(run: Run) -> None:
    run.step(0)
    for row in bmt.inspect.inspect_model(run.model, "*"):
        names = ("max", "min", "mean", "std", "grad_mean", "grad_std")
        run.keep(f"row of {row['name']}", [*row["shape"], *map(row.get, names)])


def uneven(run: Run) -> None:
    """Groups of ranks have unequally many rows, of micro-batches too."""
    for step in range(STEPS):
        run.manager.zero_grad()
        run.backward(step, [0, 2 + 4 * step, 16])
        run.end(step)


def averaged(run: Run) -> None:
    """An exponential mean of the weights, by hand and by torch."""
    by_hand = [param.detach().clone() for param in run.model.parameters()]
    of_torch = swa_utils.AveragedModel(run.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    of_torch.update_parameters(run.model)
    for step in range(STEPS):
        run.step(step)
        torch._foreach_lerp_(by_hand, [param.detach() for param in run.model.parameters()], 0.5)
        of_torch.update_parameters(run.model)
    for name, value in of_torch.module.state_dict().items():
        run.keep(f"mean of {name}", value)
    for param, value in zip(run.model.parameters(), by_hand, strict=True):
        param.data.copy_(value)
    with torch.no_grad():
        run.keep(
            "loss of the mean", bmt.distributed.all_reduce(run.loss(STEPS), "avg") * bmt.config["tp_size"]
        )


def vertical(run: Run) -> None:
    """All micro-batches pass a Block before the next; one after the other on one rank."""
    layers = bmt.TransformerBlockList(list(run.model.layers))
    tp = bmt.config["tp_size"]
    for step in range(STEPS):
        run.manager.zero_grad()
        if bmt.world_size() == 1:
            for micro in range(2):
                (run.loss(step, micro) / 2).backward()
        else:
            parts = [mine(run.layout, batch(run.layout, step, micro)) for micro in range(2)]
            hidden = [run.model.embedding(part["input_ids"], part["position_ids"]) for part in parts]
            outs = layers.vertical(hidden)
            losses = [run.model.head(out, part["targets"]) for out, part in zip(outs, parts, strict=True)]
            (sum(losses) / 2 / tp / run.manager.grad_scale).backward()
        run.end(step)


def thawed(run: Run) -> None:
    """Parameters are frozen and trained again during the run."""
    for step in range(STEPS):
        for name, param in run.model.named_parameters():
            is_late = "router" in name or "up" in name or "q.weight" in name
            param.requires_grad_(is_late if step == 2 else step == 1 or not is_late)
        run.step(step)


def hooked(run: Run) -> None:
    """Hooks of parameters change gradients."""
    for name, param in run.model.named_parameters():
        if any(part in name for part in ("down", "embedding", "q.weight", "experts")):
            param.register_hook(lambda gradient: gradient * 3)
    for step in range(STEPS):
        run.step(step)


def late_group(run: Run) -> None:
    """A group of parameters comes to the optimizer later."""
    [optimizer] = run.manager.optimizers
    late = optimizer.param_groups.pop()
    run.step(0)
    optimizer.add_param_group({**late, "lr": 0.02})
    for step in range(1, STEPS):
        run.step(step)


def evaluated_between(run: Run) -> None:
    """An evaluation between the micro-batches of a step."""
    for step in range(STEPS):
        run.manager.zero_grad()
        for micro in range(run.layout.accumulate):
            run.manager.backward(run.loss(step, micro))
            run.model.eval()
            with torch.no_grad():
                seen = bmt.distributed.all_reduce(run.loss(step + 7, micro), "avg") * bmt.config["tp_size"]
            run.keep(f"step {step}, {micro}: evaluation", seen)
            run.model.train()
        run.end(step)


def mixed(run: Run) -> None:
    """Micro-batches of other lengths, documents and methods."""
    layouts = [run.layout, replace(run.layout, method="ring", tokens=7, packed=True), run.layout]
    for step in range(STEPS):
        run.manager.zero_grad()
        for micro, layout in enumerate(layouts):
            run.manager.backward(run.model.loss(mine(layout, batch(layout, step, micro)), step))
        run.end(step)


def checkpointed(run: Run) -> None:
    """Layers outside of Blocks, computed again by torch's checkpoint."""
    model, weights = run.model, run.model.state_dict()
    model.layers = torch.nn.ModuleList([Layer(run.layout, torch.float32) for _ in run.layout.policies])
    model.load_state_dict(weights)
    run.manager = make_manager(run.layout, model)
    for step in range(STEPS):
        run.manager.zero_grad()
        own = mine(run.layout, batch(run.layout, step, 0))
        x = model.embedding(own["input_ids"], own["position_ids"])
        for layer in model.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        run.manager.backward(model.head(x, own["targets"]) / bmt.config["tp_size"])
        run.end(step)


@dataclass(frozen=True)
class Case:
    """A program, and the layouts in which it runs: number of ranks, sizes of groups."""

    program: Callable[[Run], None]
    layouts: Sequence[tuple[int, dict[str, int]]]
    options: dict[str, Any] = field(default_factory=dict)


PIPE = {"pipe_size": 2, "num_micro_batches": 2}
WINDOW = {"accumulate": 2, "accumulates_in": "manager"}
IN_A_PIPELINE = {"pipeline": {"schedule": "1f1b"}, "loss_inside": True}
CASES = {
    "norms, pipe": Case(own_norms, [(4, {"tp_size": 2, **PIPE})], IN_A_PIPELINE),
    "norms": Case(own_norms, [(4, {"tp_size": 2, "ep_size": 2})], {"mixture": True}),
    "overflow": Case(
        overflow,
        [(2, {"tp_size": 2}), (4, {"sp_size": 2, "ep_size": 4})],
        {"mixture": True, "loss_scale": 1024.0},
    ),
    "overflow, pipe": Case(overflow, [(2, PIPE)], {**IN_A_PIPELINE, "loss_scale": 1024.0}),
    "inspected": Case(inspected, [(4, {"tp_size": 2, "ep_size": 4})], {"mixture": True}),
    "inspected, pipe": Case(inspected, [(4, {"tp_size": 2, **PIPE})], {**IN_A_PIPELINE, "tied": True}),
    "uneven": Case(
        uneven,
        [(2, {}), (4, {"sp_size": 2, "ep_size": 4}), (4, {"tp_size": 2, "ep_size": 2})],
        {"mixture": True, "ignored": True, "accumulate": 3},
    ),
    "averaged": Case(averaged, [(2, {"ep_size": 2}), (4, {"tp_size": 2, "ep_size": 4})], {"mixture": True}),
    "vertical": Case(
        vertical, [(4, {"ep_size": 2, "sp_size": 2}), (4, {"tp_size": 2, "ep_size": 2})], {"mixture": True}
    ),
    "thawed": Case(thawed, [(4, {"tp_size": 2, "ep_size": 2})], {"mixture": True}),
    "thawed, pipe": Case(thawed, [(4, {"tp_size": 2, **PIPE})], IN_A_PIPELINE),
    "hooked": Case(hooked, [(4, {"tp_size": 2, "ep_size": 2})], {"mixture": True}),
    "hooked, pipe": Case(hooked, [(4, {"sp_size": 2, **PIPE})], {**IN_A_PIPELINE, "tied": True}),
    "late group": Case(late_group, [(4, {"tp_size": 2, "ep_size": 2})], {"mixture": True}),
    "evaluated between": Case(
        evaluated_between, [(4, {"sp_size": 2, "ep_size": 2})], {"mixture": True, **WINDOW}
    ),
    "evaluated between, pipe": Case(
        evaluated_between, [(4, {"tp_size": 2, **PIPE})], {**IN_A_PIPELINE, **WINDOW}
    ),
    "mixed": Case(mixed, [(4, {"sp_size": 2, "tp_size": 2})], {"accumulate": 3}),
    "checkpointed": Case(
        checkpointed,
        [(4, {"tp_size": 2, "ep_size": 2}), (4, {"sp_size": 2, "ep_size": 4})],
        {"mixture": True},
    ),
}


def run_program(case: str, weights: Weights, is_whole: bool) -> Found:
    run = Run(_layout(CASES[case], is_whole), weights)
    CASES[case].program(run)
    return run.result()


def _layout(case: Case, is_whole: bool) -> Layout:
    layout = replace(LAYOUT, **case.options)
    return replace(layout, pipeline=None, loss_inside=False) if is_whole else layout


def _same(wanted: Found, runs: Iterator[Found]) -> None:
    for found in runs:
        difference = compare(sorted(wanted), sorted(found), 5e-6)
        assert not difference, difference


@pytest.mark.parametrize("name", CASES)
def test_a_program_trains_as_on_one_rank(name: str) -> None:
    case = CASES[name]
    [weights] = run_ranks(1, initial_weights, _layout(case, True))
    [wanted] = run_ranks(1, run_program, name, weights, True)
    for world, sizes in case.layouts:
        _same(wanted, iter(run_ranks(world, run_program, name, weights, False, init=sizes, timeout=300)))


RESUMED = {"mixture": True, **WINDOW}


def interrupted(weights: Weights, folder: str, saves: bool) -> Found:
    """Two and a half steps, then a save, and the rest of all, or of what another division of the ranks has saved."""
    run = Run(replace(LAYOUT, **RESUMED), weights)
    if saves:
        run.step(0)
        run.step(1)
        run.manager.zero_grad()
        run.manager.backward(run.loss(2))
        checkpoint.save(folder, 2, run.model, run.manager)
        run.manager.backward(run.loss(2, 1))
        run.end(2)
    else:
        assert checkpoint.load(folder, run.model, run.manager).step == 2
        run.step(2)
    return [pair for pair in run.result() if "step 0" not in pair[0] and "step 1" not in pair[0]]


def test_another_layout_goes_on_from_the_middle_of_an_accumulation(tmp_path) -> None:
    [weights] = run_ranks(1, initial_weights, replace(LAYOUT, **RESUMED))
    saved = run_ranks(4, interrupted, weights, str(tmp_path), True, init={"tp_size": 2, "ep_size": 2})
    wanted = saved[0]
    _same(wanted, iter(saved))
    for world, sizes in ((1, {}), (2, {"ep_size": 2}), (4, {"sp_size": 2, "ep_size": 4})):
        _same(wanted, iter(run_ranks(world, interrupted, weights, str(tmp_path), False, init=sizes)))
