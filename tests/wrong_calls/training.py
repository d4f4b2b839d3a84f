"""Optimizers, their manager, clipping and schedules."""

from __future__ import annotations

from typing import Any

import torch

import bmtrain as bmt

from .kinds import Calls

__all__ = ["managers", "momentum_optimizers", "optimizers", "schedules"]


def optimizers() -> Calls:
    """Of constructors only what is checked there."""
    parameters = [torch.nn.Parameter(torch.ones(3))]
    numbers = dict.fromkeys(("lr", "eps", "weight_decay", "hold_steps"), ("number", 0.1))
    hyper = {"lr": numbers["lr"], "betas": ("betas", (0.9, 0.99)), **numbers}
    made: Calls = {
        kind.__name__: (lambda *values, kind=kind: kind(parameters, *values), hyper)
        for kind in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer)
    }
    made["OptimManager"] = (
        lambda *values: bmt.optim.OptimManager(*values[:6], accumulate=values[6]),
        {
            "loss_scale": ("optional number", 8.0),
            "loss_scale_factor": ("number", 2.0),
            "loss_scale_steps": ("scale", 10),
            "min_loss_scale": ("number", 1.0),
            "max_loss_scale": ("scale", 1e9),
            "grad_scale": ("optional number", 1.0),
            "accumulate": ("count", 1),
        },
    )
    made["clip_grad_norm"] = (
        bmt.optim.clip_grad_norm,
        {
            "param_groups": ("some parameters", parameters),
            "max_norm": ("number", 1.0),
            "scale": ("number", 1.0),
            "norm_type": ("norm", 2),
        },
    )
    return made


def momentum_optimizers() -> Calls:
    """The other formulas, and what all optimizers take."""
    parameters = [torch.nn.Parameter(torch.ones(3))]
    rate, number = ("rate", 0.1), ("number", 0.1)
    sgd = {"lr": rate, "momentum": number, "dampening": ("finite number", 0.0), "weight_decay": number}
    lion = {"lr": rate, "betas": ("betas", (0.9, 0.99)), "weight_decay": number}
    muon = dict.fromkeys(("momentum", "weight_decay", "eps", "adam_eps"), number)
    muon |= {"lr": rate, "adam_betas": ("betas", (0.9, 0.99))}
    made: Calls = {}
    for kind, options in (
        (bmt.optim.SGDOptimizer, sgd),
        (bmt.optim.SGDOffloadOptimizer, sgd),
        (bmt.optim.LionOptimizer, lion),
        (bmt.optim.LionOffloadOptimizer, lion),
    ):
        made[kind.__name__] = (lambda *values, kind=kind: kind(parameters, *values), options)
    both = (bmt.optim.MuonOptimizer, bmt.optim.MuonOffloadOptimizer)
    for kind in both:
        made[kind.__name__] = (
            lambda *values, kind=kind: kind(parameters, **dict(zip(muon, values, strict=True))),
            muon,
        )
    some = (bmt.optim.AdamOptimizer, bmt.optim.SGDOptimizer, bmt.optim.LionOffloadOptimizer)
    for kind in (*some, *both):
        made[f"{kind.__name__}(params)"] = (
            lambda params, kind=kind: kind(params),
            {"params": ("parameters", parameters)},
        )
        made[f"{kind.__name__}(group)"] = (
            lambda lr, decay, kind=kind: kind([{"params": parameters, "lr": lr, "weight_decay": decay}]),
            {"lr": rate, "weight_decay": number},
        )
    made["whole_matrix"] = (
        lambda params: bmt.optim.whole_matrix(torch.optim.Adafactor, params),
        {"params": ("parameters", parameters)},
    )
    return made


def managers() -> Calls:
    """The methods of `OptimManager`."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = bmt.optim.AdamOptimizer([parameter])
    manager = bmt.optim.OptimManager(loss_scale=8.0)
    manager.add_optimizer(optimizer)
    schedule = bmt.lr_scheduler.NoDecay(optimizer, 0.1, 2, None)
    return {
        "add_optimizer": (
            lambda *values: bmt.optim.OptimManager().add_optimizer(*values),
            {"optimizer": ("optimizer", optimizer), "lr_scheduler": ("schedule", schedule)},
        ),
        "backward": (
            lambda loss: manager.backward(loss),
            {"loss": ("loss", torch.ones(1, requires_grad=True).sum())},
        ),
        "manager.clip_grad_norm": (
            lambda *values: manager.clip_grad_norm(*values),
            {
                "param_groups": ("parameter groups", optimizer.param_groups),
                "max_norm": ("number", 1.0),
                "norm_type": ("norm", 2),
                "eps": ("number", 1e-6),
            },
        ),
        "manager.load_state_dict": (
            lambda state: manager.load_state_dict(state),
            {"state_dict": ("state", manager.state_dict())},
        ),
        "justify_scale": (lambda scale: optimizer.justify_scale(scale), {"scale": ("rate", 8.0)}),
    }


def schedules() -> Calls:
    """The constructors, `step` and `load_state_dict`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    common: dict[str, tuple[str, Any]] = {
        "optimizer": ("optimizer", optimizer),
        "start_lr": ("rate", 0.1),
        "warmup_iter": ("count or zero", 2),
    }
    made: Calls = {}
    for kind, end in (
        (bmt.lr_scheduler.NoDecay, "optional end"),
        (bmt.lr_scheduler.Noam, "optional end"),
        (bmt.lr_scheduler.Linear, "end"),
        (bmt.lr_scheduler.Cosine, "end"),
        (bmt.lr_scheduler.Exponential, "optional end"),
    ):
        arguments = {**common, "end_iter": (end, 8), "num_iter": ("count or zero", 0)}
        if kind is bmt.lr_scheduler.Exponential:
            arguments["gamma"] = ("rate", 0.9)
        made[kind.__name__] = (kind, arguments)
    schedule = bmt.lr_scheduler.Linear(optimizer, 0.1, 2, 8)
    made["schedule.step"] = (lambda number: schedule.step(number), {"num_iter": ("optional count", 3)})
    made["schedule.load_state_dict"] = (
        lambda state: schedule.load_state_dict(state),
        {"state_dict": ("state", schedule.state_dict())},
    )
    return made
