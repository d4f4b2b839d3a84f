"""Training of one model by plain torch and by ranks that divide its sequences, and the comparison of both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

import bmtrain
from bmtrain._tools.parity_rank import _whole_gradient

from .parity import Run

__all__ = ["assert_same_run", "batch_of", "train_divided", "train_whole"]

Make = Callable[[], torch.nn.Module]


def batch_of(rows: int, length: int, packed: bool = False, vocab: int = 50) -> dict[str, torch.Tensor]:
    """Token ids and labels, some of which do not count; with ``packed``, two documents in each sequence."""
    ids = torch.randint(3, vocab, (rows, length), generator=torch.Generator().manual_seed(rows * length))
    labels = ids.clone()
    labels[0, 2 : length // 2] = -100
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        first = length // 3
        positions = torch.cat([torch.arange(first), torch.arange(length - first)])
        batch["position_ids"] = positions.expand(rows, length).contiguous()
    return batch


def train_whole(make: Make, batch: Mapping[str, torch.Tensor], steps: int = 1) -> Run:
    """Steps of plain torch in one process."""
    model, run = make(), Run()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        inputs.setdefault(
            "position_ids", torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"])
        )
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    for step in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(_logits(model, inputs), targets.flatten())
        loss.backward()
        run.losses.append(loss.item())
        if step == 0:
            run.gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            run.gradients = {name: grad.clone() for name, grad in run.gradients.items() if grad is not None}
        run.losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    run.weights = {name: value.clone() for name, value in model.state_dict().items()}
    return run


def train_divided(
    make: Make, batch: Mapping[str, torch.Tensor], method: str, steps: int = 1, recompute: Any = "whole"
) -> Run:
    """The same steps on ranks that divide sequences, and perhaps the batch."""
    with bmtrain.default_policy(bmtrain.BlockPolicy(recompute=recompute)):
        model: Any = bmtrain.BMTrainModelWrapper(make())
    run, manager = Run(), bmtrain.optim.OptimManager()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.add_optimizer(optimizer)
    config, tp = bmtrain.config, bmtrain.config["tp_size"]
    rank, size = config["dp_rank"] * tp + config["tp_rank"], config["dp_size"] * tp
    for step in range(steps):
        part = bmtrain.shard_sequence(
            {name: value.chunk(size)[rank] for name, value in batch.items()}, method=method
        )
        manager.zero_grad()
        divisor, targets = part.pop("num_items_in_batch"), part.pop("shift_labels")
        del part["labels"]
        if "position_ids" not in inspect.signature(type(model).forward).parameters:
            del part["position_ids"]
        loss = F.cross_entropy(_logits(model, part), targets.flatten(), reduction="sum") / divisor
        manager.backward(loss / tp)
        run.losses.append(bmtrain.distributed.all_reduce(loss.detach(), "avg").item())
        if step == 0:
            run.gradients = {name: _whole_gradient(p) for name, p in model.named_parameters()}
        run.losses.append(manager.clip_grad_norm(optimizer.param_groups, 1.0).item())
        manager.step()
    run.weights = dict(model.state_dict())
    return run


def _logits(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    options = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    out = model(**inputs, **options)
    logits: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return logits.flatten(0, 1)


def assert_same_run(ours: Run, wanted: Run, allowed: float = 1e-6) -> None:
    """Losses, norms and gradients to ``allowed`` of their largest value; a gradient whose true value is 0 (of a bias
    that attention cancels) to ``allowed`` of the largest gradient."""
    for have, want in zip(ours.losses, wanted.losses, strict=True):
        assert abs(have - want) <= allowed * abs(want), (ours.losses, wanted.losses)
    largest = max(value.abs().max().item() for value in wanted.gradients.values() if value is not None)
    for name, value in wanted.gradients.items():
        got = ours.gradients[name]
        assert value is not None and got is not None, name
        scale = value.abs().max().item()
        scale = scale if scale > 1e-4 * largest else largest
        difference = (got.reshape(-1) - value.reshape(-1)).abs().max().item()
        assert difference <= allowed * scale, f"gradient of {name}: {difference / scale}"
    for name, value in wanted.weights.items():
        assert (ours.weights[name] - value).abs().max().item() <= 3e-6, f"weight {name}"
