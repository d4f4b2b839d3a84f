"""Training by offloading optimizers, with all that can happen to gradients between a backward and the step.

A *way* is a function of a `Run` and the number of a step: it computes gradients and does something to them.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.optim.clip_grad import clip_gradients

from .offloaded import LAYERS, Model

__all__ = ["WAYS", "Run", "clipped", "plain"]


class Run:
    """A model, and what trains it."""

    def __init__(self, overlap: bool, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        torch.manual_seed(7)
        self.overlap = overlap
        self.options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "overlap": overlap, **options}
        self.model = Model().to(dtype)
        self.x = torch.randn(6, 40).to(dtype)
        self.manager = bmt.optim.OptimManager(loss_scale=2.0**10)
        self.kept: torch.Tensor | None = None
        self.add([list(self.model.parameters())])

    def add(self, shares: list[list[torch.Tensor]]) -> None:
        self.optimizers = [bmt.optim.AdamOffloadOptimizer(share, **self.options) for share in shares]
        self.manager.optimizers.clear()
        self.manager.lr_schedulers.clear()
        for optimizer in self.optimizers:
            self.manager.add_optimizer(optimizer)

    @property
    def layers(self) -> Any:
        return self.model.layers

    def loss(self) -> torch.Tensor:
        result: torch.Tensor = self.model(self.x).float().square().mean()
        return result

    def backward(self) -> None:
        self.manager.backward(self.loss())

    def clip(self, max_norm: float = 0.1) -> None:
        self.manager.clip_grad_norm(self.model.parameters(), max_norm=max_norm)


def plain(run: Run, number: int) -> None:
    run.manager.zero_grad(set_to_none=number % 2 == 0)
    run.backward()


def clipped(run: Run, number: int) -> None:
    plain(run, number)
    run.clip()


def clipped_after_forward(run: Run, number: int) -> None:
    loss = run.loss()
    run.manager.zero_grad()
    run.manager.backward(loss)
    run.clip()


def clipped_twice(run: Run, number: int) -> None:
    plain(run, number)
    run.clip()
    run.clip(0.07)


def not_clipped(run: Run, number: int) -> None:
    plain(run, number)
    run.clip(1e9)


def a_part_clipped(run: Run, number: int) -> None:
    plain(run, number)
    clip_gradients([p for layer in run.layers[:2] for p in layer.parameters()], 0.05, run.manager.loss_scale)
    clip_gradients([run.layers[3].weight], 0.05, run.manager.loss_scale)


def written_through_data(run: Run, number: int) -> None:
    plain(run, number)
    run.layers[1].weight.grad.data.mul_(0.5)
    run.clip()


def written_in_place(run: Run, number: int) -> None:
    plain(run, number)
    for p in run.layers[2].parameters():
        p.grad.clamp_(-1e-3, 1e-3)


def written_by_an_older_holder(run: Run, number: int) -> None:
    """The tensors are those of the steps before, and nobody has them any more when the step looks."""
    run.manager.zero_grad()
    kept = [p.grad for p in run.layers[2].parameters() if p.grad is not None]
    run.backward()
    for grad in kept:
        grad.data.mul_(0.5)


def written_through_the_flat_gradient(run: Run, number: int) -> None:
    plain(run, number)
    for flat in run.layers[4]._storage_params.values():
        flat.grad.data.mul_(0.25)


def replaced(run: Run, number: int) -> None:
    plain(run, number)
    weight = run.layers[0].weight
    weight.grad = weight.grad * 0.5
    run.clip()


def set_unread(run: Run, number: int) -> None:
    plain(run, number)
    weight = run.layers[0].weight
    weight.grad = torch.full_like(weight, 0.01 * (number + 1))
    run.clip()


def dropped(run: Run, number: int) -> None:
    plain(run, number)
    run.layers[3].weight.grad = None
    del run.layers[2].bias.grad


def accumulated(run: Run, number: int) -> None:
    run.manager.zero_grad()
    for _ in range(1 + number % 3):
        run.backward()
    run.clip()


def added_to_with_a_graph_kept(run: Run, number: int) -> None:
    """Now and then a second backward, whose graph may run again: nothing is sent of it."""
    plain(run, number)
    if number % 2:
        run.kept = run.loss()
        run.manager.scale_loss(run.kept).backward(retain_graph=True)


def unsent_then_sent(run: Run, number: int) -> None:
    run.manager.zero_grad()
    with bmt.no_sync():
        run.backward()
    run.backward()
    run.clip()


def zeroed_after_backward(run: Run, number: int) -> None:
    plain(run, number)
    run.manager.zero_grad(set_to_none=number % 2 == 1)
    if number % 2:
        run.backward()


def regularised(run: Run, number: int) -> None:
    plain(run, number)
    run.clip()
    (run.layers[1].weight.float() ** 2).sum().backward()
    (run.layers[3].weight.float() ** 2).sum().backward(create_graph=True)
    gc.collect()


def frozen_and_unused(run: Run, number: int) -> None:
    run.layers[1].weight.requires_grad_(number % 2 == 0)
    run.manager.zero_grad(set_to_none=True)
    x = run.x @ run.model.first
    for block in [*run.layers][: LAYERS - number % 2]:
        x = block(x)
    run.manager.backward(x.float().square().mean())
    run.clip()


def overflowing(run: Run, number: int) -> None:
    plain(run, number)
    if number == 3:
        run.layers[2].weight.grad.data[0] = float("inf")
    run.clip()


def stepped_twice(run: Run, number: int) -> None:
    plain(run, number)
    run.clip()
    if number % 2:
        run.manager.step()


def hooked(run: Run, number: int) -> None:
    if number == 2:
        weight = run.layers[1].weight
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.data.mul_(0.5))
    plain(run, number)


WAYS = {
    way.__name__: way
    for way in (
        plain,
        clipped,
        clipped_after_forward,
        clipped_twice,
        not_clipped,
        a_part_clipped,
        written_through_data,
        written_in_place,
        written_by_an_older_holder,
        written_through_the_flat_gradient,
        replaced,
        set_unread,
        dropped,
        accumulated,
        added_to_with_a_graph_kept,
        unsent_then_sent,
        zeroed_after_backward,
        regularised,
        frozen_and_unused,
        overflowing,
        stepped_twice,
        hooked,
    )
}
