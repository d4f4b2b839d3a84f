"""Saving and loading."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import bmtrain as bmt
from bmtrain.distributed import checkpoint

from .kinds import Calls

__all__ = ["checkpoints", "model_files", "objects"]

_FOLDER = tempfile.TemporaryDirectory(prefix="bmtrain-wrong-calls-")


def model_files() -> Calls:
    """`bmtrain.save` and `bmtrain.load`."""
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(2, 2))
    file = Path(_FOLDER.name, "model.pt")
    arguments = {"model": ("module", model), "file_name": ("path", file)}
    return {"save": (bmt.save, arguments), "load": (bmt.load, arguments)}


def objects() -> Calls:
    """`bmtrain.store`: state dicts of rank 0, and objects of all ranks."""
    store, world = bmt.store, bmt.config["comm"]
    return {
        "DistributedStateDictWrapper": (
            store.DistributedStateDictWrapper,
            {"state_dict": ("a dict", {"weight": torch.ones(2)})},
        ),
        "DistributedTensorWrapper": (
            store.DistributedTensorWrapper,
            {"tensor": ("a tensor", torch.ones(2))},
        ),
        "allgather_object": (
            lambda comm: store.allgather_object(1, comm),
            {"comm": ("a comm", world)},
        ),
        "broadcast_object": (
            lambda comm, src: store.broadcast_object(1, comm, src),
            {"comm": ("comm", world), "src": ("rank", 0)},
        ),
    }


def checkpoints() -> Calls:
    """`bmtrain.distributed.checkpoint`."""
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(2, 2))
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    schedule = bmt.lr_scheduler.NoDecay(optimizer, 0.1, 2, None)
    folder = Path(_FOLDER.name, "steps")
    parts = {
        "model": ("optional module", model),
        "optim": ("optimizers", optimizer),
        "schedulers": ("schedules", [schedule]),
    }
    return {
        "checkpoint.save": (
            lambda folder, step, model, optim, schedulers, data, extra, keep: checkpoint.save(
                folder, step, model, optim, schedulers=schedulers, data=data, extra=extra, keep=keep
            ),
            {
                "folder": ("path", folder),
                "step": ("step number", 3),
                **parts,
                "data": ("plain values", {"position": 3}),
                "extra": ("plain values", [1]),
                "keep": ("optional positive", 2),
            },
        ),
        "checkpoint.load": (
            lambda path, model, optim, schedulers: checkpoint.load(path, model, optim, schedulers=schedulers),
            {"path": ("path", folder), **parts},
        ),
        "checkpoint.latest": (checkpoint.latest, {"folder": ("path", folder)}),
        "checkpoint.prune": (checkpoint.prune, {"folder": ("path", folder), "keep": ("count", 1)}),
    }
