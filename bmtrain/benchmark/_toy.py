"""The small model of the stress test."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._tools.gpt import GPT
from ..optim import OptimManager
from ._training import sharded

VOCAB, SEQ, BATCH = 64, 16, 2


def toy(
    make_optimizer: Callable[..., torch.optim.Optimizer], loss_scale: float | None = 1024.0
) -> tuple[Any, OptimManager]:
    """A model of ids, ``(BATCH, SEQ + 1)``, that returns its loss, and the manager of its optimizer."""
    torch.manual_seed(0)
    wrapped = sharded(GPT(2, 32, num_heads=2, vocab=VOCAB, seq=SEQ))
    manager = OptimManager(loss_scale)
    manager.add_optimizer(make_optimizer(wrapped.parameters(), lr=1e-3))
    return wrapped, manager


def hash_of_training(model: torch.nn.Module, manager: OptimManager, **options: Any) -> str:
    """A hash of the weights and the optimizer's state, which is got with ``options``."""
    tensors = dict(model.state_dict())
    for index, entry in manager.optimizers[0].state_dict(**options)["state"].items():
        tensors.update({f"{index}.{name}": torch.as_tensor(value) for name, value in entry.items()})
    return hash_of(tensors)


def hash_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """A hash of names and values."""
    digest = hashlib.sha256()
    for name, value in tensors.items():
        digest.update(name.encode())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
