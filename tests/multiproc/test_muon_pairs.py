"""Layouts in pairs, with groups added later, frozen parameters, clipping and accumulation, against torch, bit for bit.

Each parameter has an optimizer of torch of its own over whole fp32 copies, and the gradients that the ranks have.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.distributed import checkpoint
from bmtrain.optim import OptimManager, whole_matrix

DIM, LR, DECAY = 16, 0.02, 0.1
#: Kind, ranks, arguments of init_distributed, policy of Blocks, what happens during training.
CASES: tuple[tuple[str, int, dict[str, Any], dict[str, Any], tuple[str, ...]], ...] = (
    ("MuonOptimizer", 4, {"tp_size": 2, "pipe_size": 2}, {}, ("schedule", "later")),
    ("MuonOffloadOptimizer", 4, {"tp_size": 2}, {"level": 0}, ("accumulated", "clipped")),
    ("MuonOptimizer", 4, {"tp_size": 2, "virtual_shards": 4}, {}, ("in shards", "clipped", "frozen")),
    ("MuonOffloadOptimizer", 4, {}, {"zero_size": 2}, ("schedule", "later", "frozen", "accumulated")),
    ("MuonOptimizer", 2, {"tier_directories": ["."]}, {"optimizer": "disk"}, ("later", "frozen", "clipped")),
    ("MuonOptimizer", 3, {}, {"recompute": "selective", "level": 1}, ("in backward", "schedule", "later")),
    ("whole_matrix", 4, {"tp_size": 2, "pipe_size": 2}, {}, ("later", "frozen")),
    ("whole_matrix", 2, {"tp_size": 2, "virtual_shards": 4}, {}, ("in shards", "clipped", "schedule")),
)


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = bmt.nn.ColumnParallelLinear(DIM, 3 * DIM)
        self.out = bmt.nn.RowParallelLinear(3 * DIM, DIM)
        self.odd = bmt.DistributedParameter(torch.randn(3, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.qkv(x).tanh()) + (x @ self.odd.t()).tanh() @ self.odd


class Model(bmt.DistributedModule):
    def __init__(self, policy: dict[str, Any]) -> None:
        super().__init__()
        is_staged = bmt.config["pipe_size"] > 1
        mode: Any = "PIPE" if is_staged else "BLOCK"
        blocks = [bmt.Block(Layer(), mode=mode, policy=bmt.BlockPolicy(**policy)) for _ in range(3)]
        self.layers = (bmt.PipelineTransformerBlockList if is_staged else bmt.TransformerBlockList)(blocks)
        self.head = bmt.DistributedParameter(torch.randn(DIM, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) @ self.head).square().mean() / bmt.config["tp_size"]


class Reference:
    def __init__(self, kind: str, named: dict[str, Any], splits: int) -> None:
        self.named, self.splits = named, splits if kind != "whole_matrix" else 1
        self.parts: dict[str, list[torch.nn.Parameter]] = {}
        self.optimizers: dict[str, list[torch.optim.Optimizer]] = {}
        for name, p in named.items():
            is_matrix = name != "head" and len(p.full_shape) == 2
            cls: Any = torch.optim.Muon if is_matrix else torch.optim.AdamW
            options = {} if is_matrix else {"betas": (0.9, 0.95)}
            if kind == "whole_matrix":
                cls, options = torch.optim.Adafactor, {}
            parts = [torch.nn.Parameter(x.detach().clone()) for x in self.divided(name, p.gather_all())]
            self.parts[name] = parts
            self.optimizers[name] = [cls([x], lr=LR, weight_decay=DECAY, **options) for x in parts]

    def divided(self, name: str, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return whole.chunk(self.splits if "qkv.weight" in name else 1)

    def step(self, names: set[str], factor: float) -> None:
        for name, p in self.named.items():
            gradient = p.gather_grad()
            if gradient is not None and p._tp_split_dim >= 0:
                slices = bmt.distributed.all_gather(gradient)[: bmt.config["tp_size"]]
                gradient = torch.cat(list(slices), p._tp_split_dim)
            if gradient is None or name not in names:
                continue
            for part, own, optimizer in zip(
                self.parts[name], self.divided(name, gradient), self.optimizers[name], strict=True
            ):
                part.grad = own.clone()
                optimizer.param_groups[0]["lr"] = LR * factor
                optimizer.step()

    def check(self) -> None:
        for name, p in self.named.items():
            assert torch.equal(p.gather_all(), torch.cat([x.detach() for x in self.parts[name]])), name


def losses(model: Model, step: int, count: int, is_virtual: bool) -> Iterator[torch.Tensor]:
    """This rank's losses of a step: of virtual shards, or of micro-batches."""
    rows = torch.randn(8, 6, DIM, generator=torch.Generator().manual_seed(step))
    if is_virtual:
        for shard in bmt.virtual_shards(step):
            yield model(shard.of(rows))
        return
    for number in range(count):
        yield model(rows.roll(number + bmt.rank() // bmt.config["tp_size"], 0)[:4])


def train(kind: str, policy: dict[str, Any], events: tuple[str, ...], folder: str) -> None:
    torch.manual_seed(1)
    model = Model(policy)
    bmt.init_parameters(model)
    named: dict[str, Any] = dict(model.named_parameters())
    of_later = {name for name in named if name.startswith("layers.1.") and "later" in events}
    frozen = {name for name in named if name.startswith("layers.0.qkv") and "frozen" in events}
    splits = 3 * bmt.config["tp_size"]
    reference = Reference(kind, named, splits)

    def make(names: list[set[str]]) -> tuple[Any, OptimManager]:
        first, *others = [[(name, named[name]) for name in named if name in part] for part in names]
        if kind == "whole_matrix":
            optimizer: Any = whole_matrix(torch.optim.Adafactor, first, lr=LR, weight_decay=DECAY)
        else:
            cls = getattr(bmt.optim, kind)
            optimizer = cls(first, lr=LR, weight_decay=DECAY, splits={"*.qkv.weight": splits})
        for part in others:
            optimizer.add_param_group({"params": part})
        count = 2 if "accumulated" in events else 1
        manager = OptimManager(accumulate=count, step_in_backward="in backward" in events)
        manager.add_optimizer(optimizer)
        return optimizer, manager

    present = named.keys() - of_later
    optimizer, manager = make([present])
    for step in range(5):
        if step == 2 and of_later:
            optimizer.add_param_group({"params": [(name, named[name]) for name in named if name in of_later]})
            present |= of_later
        for name in frozen:
            named[name].requires_grad_(step not in (1, 2))
        factor = 1 / (1 + step) if "schedule" in events else 1.0
        for group in optimizer.param_groups:
            group["lr"] = LR * factor
        manager.zero_grad(set_to_none=True)
        for number, loss in enumerate(losses(model, step, manager.accumulate, "in shards" in events)):
            manager.backward(loss)
            if number < manager.accumulate - 1:
                manager.step()
        if "clipped" in events:
            manager.clip_grad_norm(optimizer.param_groups, 0.1)
        reference.step({name for name in present if named[name].requires_grad}, factor)
        manager.step()
        reference.check()
        if step == 3:
            checkpoint.save(folder, step, model, manager)
            parts = [present - of_later, of_later] if of_later else [present]
            optimizer, manager = make(parts)
            checkpoint.load(folder, model, manager)


@pytest.mark.parametrize(("kind", "world", "init", "policy", "events"), CASES, ids=str)
def test_pairs_of_layouts_have_the_weights_of_torch(
    kind: str,
    world: int,
    init: dict[str, Any],
    policy: dict[str, Any],
    events: tuple[str, ...],
    tmp_path: Path,
) -> None:
    if "tier_directories" in init:
        init = {**init, "tier_directories": [str(tmp_path)]}
    run_ranks(world, train, kind, policy, events, str(tmp_path / "file"), init=init)
