"""One training run, small enough to be repeated at every size, with everything that a checkpoint has to hold."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.distributed import checkpoint

__all__ = ["Run", "state_of"]

DIM = 12


class Linear(bmt.DistributedModule):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        init = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.3)
        self.weight = bmt.DistributedParameter(torch.empty(DIM, DIM, dtype=dtype), init_method=init)
        self.bias = bmt.DistributedParameter(torch.empty(DIM, dtype=dtype), init_method=init)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.linear(x, self.weight, self.bias))


class Model(bmt.DistributedModule):
    """A head outside Blocks, layers in a list, a tied name, a frozen parameter, a plain one and buffers."""

    def __init__(self, dtype: torch.dtype, pipeline: bool) -> None:
        super().__init__()
        init = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.3)
        self.embed = bmt.DistributedParameter(torch.empty(7, DIM, dtype=dtype), init_method=init)
        kind = bmt.PipelineTransformerBlockList if pipeline else bmt.TransformerBlockList
        mode = "PIPE" if pipeline else "BLOCK"
        self.layers = kind([bmt.Block(Linear(dtype), mode=mode) for _ in range(3)])
        self.frozen = bmt.DistributedParameter(torch.empty(5), requires_grad=False, init_method=init)
        self.empty = bmt.DistributedParameter(torch.empty(0, 3))
        self.scale = torch.nn.Parameter(torch.full((DIM,), 1.0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.tied = self._parameters["embed"]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.embedding(ids, self.embed)
        x = torch.nn.functional.dropout(self.layers(x), 0.1)
        self.seen += ids.numel()
        return torch.nn.functional.linear(x * self.scale.to(x.dtype), self.embed)


class Run:
    """Model, manager, schedules and data of one training run."""

    def __init__(
        self, optimizer: str = "adam", dtype: str = "float32", pipeline: bool = False, seed: int = 1
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        self.model = Model(getattr(torch, dtype), pipeline)
        bmt.init_parameters(self.model)
        classes: dict[str, Any] = {
            "adam": bmt.optim.AdamOptimizer,
            "offload": bmt.optim.AdamOffloadOptimizer,
            "bf16 moments": partial(bmt.optim.AdamOptimizer, state_dtype="bfloat16"),
            "8-bit moments": partial(bmt.optim.AdamOptimizer, state_dtype="int8"),
            "8-bit offload": partial(bmt.optim.AdamOffloadOptimizer, state_dtype="int8"),
            "torch": torch.optim.Adam,
            "sgd": torch.optim.SGD,
        }
        options = {"momentum": 0.9} if optimizer == "sgd" else {}
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = classes[optimizer](parameters, lr=1e-2, **options)
        self.scheduler = bmt.lr_scheduler.Cosine(self.optimizer, 1e-2, 2, 50)
        self.manager = bmt.optim.OptimManager(
            loss_scale=2.0**10 if dtype == "float16" else None, loss_scale_steps=3
        )
        self.manager.add_optimizer(self.optimizer, self.scheduler)
        self.position = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            ids = torch.randint(0, 7, (4, 5), device=bmt.config["device"]) + 0 * random.randrange(3)
            loss = self.model(ids).float().square().mean()
            self.manager.zero_grad()
            self.manager.backward(loss)
            self.manager.step()
            self.position += 1
            losses.append(loss.item())
        return losses

    def save(self, folder: str | Path, **options: Any) -> checkpoint.CheckpointHandle:
        data = {"position": self.position, "rank": bmt.rank()}
        extra = {"note": ("a", None), "table": torch.arange(3, device="cpu")}
        return checkpoint.save(
            folder, self.position, self.model, self.manager, data=data, extra=extra, **options
        )

    def load(self, folder: str | Path, **options: Any) -> checkpoint.Checkpoint:
        found = checkpoint.load(folder, self.model, self.manager, **options)
        self.position = found.step or 0
        return found


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """All that training changed, in full on every rank, by name: what two runs are compared by."""
    state = {f"model/{key}": value.clone() for key, value in run.model.state_dict().items()}
    manager = run.manager.state_dict(gather_opt=True)
    for number, entry in manager["optimizers"][0]["state"].items():
        for key, value in entry.items():
            state[f"optimizer/{number}/{key}"] = torch.as_tensor(value).clone().reshape(-1)
    for key in ("loss_scale", "steps_since_last_scale"):
        state[key] = torch.tensor(float(manager[key]))
    state["lr"] = torch.tensor(run.scheduler.current_lr, dtype=torch.float64)
    return state


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of what is not the same bits."""
    names = set(one) ^ set(other)
    for name in set(one) & set(other):
        a, b = one[name], other[name]
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(_bits(a), _bits(b)):
            names.add(name)
    return sorted(names)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
