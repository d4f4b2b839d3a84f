"""Ten steps of a model on several ranks against the same model in plain, single-process torch.

Three runs are compared: *sharded* (every rank with its part of the batch), *whole* (plain torch, the batch in one
piece) and *cut* (plain torch, the batch cut into the ranks' parts, gradients added). Whole and cut differ by rounding
alone; how much is the measure of what sharded weights may differ from whole: nothing on one rank, where they have to be
equal bit for bit. All three start from one file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

import bmtrain

from .twins import full_gradient

__all__ = [
    "STEPS",
    "Batch",
    "Run",
    "assert_same_training",
    "saved",
    "token_batches",
    "train_plain",
    "train_sharded",
]

STEPS = 10
LEARNING_RATE = 3e-3

Batch: TypeAlias = "tuple[torch.Tensor, ...]"
Loss: TypeAlias = Callable[[torch.nn.Module, Batch], torch.Tensor]


@dataclass
class Run:
    """What a run came to: losses over the whole batch, gradients of the first step and weights at the end, by name."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def train_plain(
    model: torch.nn.Module,
    loss_of: Loss,
    batches: Sequence[Batch],
    parts: int,
    *,
    optimizers: Callable[[torch.nn.Module], list[torch.optim.Optimizer]] | None = None,
) -> Run:
    """The loop as one writes it in torch, on a batch cut into ``parts``."""
    made = [torch.optim.Adam(_trained(model), lr=LEARNING_RATE)] if optimizers is None else optimizers(model)
    run = Run()
    for step, batch in enumerate(batches):
        model.zero_grad()
        total = 0.0
        for part in range(parts):
            loss = loss_of(model, tuple(t.chunk(parts)[part] for t in batch))
            (loss / parts).backward()
            total += loss.item() / parts
        run.losses.append(total)
        if step == 0:
            run.gradients = {
                name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
            }
        for optimizer in made:
            optimizer.step()
    run.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return run


def train_sharded(
    model: torch.nn.Module,
    loss_of: Loss,
    batches: Sequence[Batch],
    *,
    optimizers: Callable[[torch.nn.Module], list[torch.optim.Optimizer]] | None = None,
) -> Run:
    """The loop as one writes it with this library, on this rank's part of each batch. The same run on every rank."""
    manager = bmtrain.optim.OptimManager()
    if optimizers is None:
        manager.add_optimizer(bmtrain.optim.AdamOptimizer(_trained(model), lr=LEARNING_RATE))
    else:
        for optimizer in optimizers(model):
            manager.add_optimizer(optimizer)
    rank, world = bmtrain.rank(), bmtrain.world_size()
    run = Run()
    for step, batch in enumerate(batches):
        model.zero_grad()
        loss = loss_of(model, tuple(t.chunk(world)[rank] for t in batch))
        manager.backward(loss)
        run.losses.append(bmtrain.distributed.all_reduce(loss.detach(), "avg").item())
        if step == 0:
            run.gradients = {name: full_gradient(p) for name, p in model.named_parameters()}
        manager.step()
    run.weights = dict(model.state_dict())
    return run


def assert_same_training(ours: Sequence[Run], whole: Run, cut: Run) -> None:
    """Losses and first gradients to 1e-6; weights to twice what cutting the batch does to plain torch.

    Args:
        ours: one run of every rank.
        whole: plain torch.
        cut: plain torch with the batch cut into the ranks' parts.
    """
    for other in ours[1:]:
        assert other.losses == ours[0].losses
    first = ours[0]
    for step, (have, want) in enumerate(zip(first.losses, whole.losses, strict=True)):
        assert abs(have - want) <= 1e-6 * abs(want), f"loss of step {step}: {have!r}, in plain torch {want!r}"
    assert list(first.gradients) == list(whole.gradients)
    for name, wanted in whole.gradients.items():
        got = first.gradients[name]
        if wanted is None:
            assert got is None, f"{name}: a gradient without a use"
        else:
            assert got is not None, f"{name}: no gradient"
            assert furthest(got, wanted) <= 1e-6 * wanted.abs().max().item(), f"gradient of {name}"
    assert list(first.weights) == list(whole.weights)
    bound = min(1e-4, 2 * max(furthest(cut.weights[name], whole.weights[name]) for name in whole.weights))
    for name, value in whole.weights.items():
        assert furthest(first.weights[name], value) <= bound, f"{name}: further than {bound} from plain torch"


def furthest(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of any element."""
    assert one.shape == other.shape and one.dtype == other.dtype
    return (one.double() - other.double()).abs().max().item() if one.numel() else 0.0


def saved(model: torch.nn.Module, path: Path) -> str:
    """Writes the one file that all runs start from, in torch's way."""
    torch.save(model.state_dict(), path)
    return str(path)


def token_batches(vocab: int, batch: int, *lengths: int, seed: int = 0) -> list[Batch]:
    """Random token ids, one tensor ``(batch, length)`` for each length, for every step."""
    generator = torch.Generator().manual_seed(100 + seed)
    return [
        tuple(torch.randint(vocab, (batch, length), generator=generator) for length in lengths)
        for _ in range(STEPS)
    ]


def _trained(model: torch.nn.Module) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]
