"""Training programs drawn from a seed: a model, the policies of its blocks, and what is done with it.

A program is data. Whoever runs it (`test_random_programs.py`) decides what it is compared with: the same program in
plain torch, or itself with other policies.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

import bmtrain as bmt

__all__ = [
    "AFTER",
    "Micro",
    "Program",
    "RandomModel",
    "Step",
    "batch",
    "draw",
    "draw_policy",
    "forward",
    "hidden_of",
    "reset",
]

VOCAB = 11
#: Sizes that no number of ranks divides, and one whose blocks are large enough for buffers in shared memory.
DIMS = (5, 8, 33, 264)
OPTIMIZERS = (
    "adam",
    "adam_offload",
    "adam_offload_synchronous",
    "sgd",
    "sgd_offload",
    "torch_sgd",
    "torch_adamw",
)
#: What may happen between two steps.
AFTER = ("nothing", "state_dict", "save", "scale", "freeze", "optimizer_state", "deepcopy", "forward_only")

Tensors: TypeAlias = "torch.Tensor | dict[str, Any]"


class Mlp(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.up = torch.nn.Linear(dim, 4 * dim + 1)
        self.down = torch.nn.Linear(4 * dim + 1, dim)

    def forward(
        self, x: torch.Tensor, extra: torch.Tensor | None = None, causal: bool = True
    ) -> torch.Tensor:
        if extra is not None:
            x = x * (1 + extra)
        change: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + change


class Attention(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(dim)
        self.qkv = torch.nn.Linear(dim, 3 * dim, bias=False)
        self.out = torch.nn.Linear(dim, dim)

    def forward(
        self, x: torch.Tensor, extra: torch.Tensor | None = None, causal: bool = True
    ) -> torch.Tensor:
        q, k, v = (part[:, None] for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)[:, 0]
        change: torch.Tensor = self.out(y if extra is None else y + extra)
        return x + change


class Gated(torch.nn.Module):
    """Returns a mapping: the hidden state, and among other things a term of the loss. One parameter is a number."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.randn(dim) / 3)
        self.mix = torch.nn.Linear(dim, dim)
        self.shift = torch.nn.Parameter(torch.tensor(0.1))

    def forward(
        self, x: torch.Tensor, extra: torch.Tensor | None = None, causal: bool = True
    ) -> dict[str, Any]:
        y = torch.tanh(self.mix(x)) * self.gate + self.shift
        if extra is not None:
            y = y + extra.tanh()
        return {"hidden": x + y, "others": [y.square().mean(), "text"]}


class SharedInPlace(torch.nn.Module):
    """One layer under two names, and operations in place."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(dim, dim)
        self.second = self.first
        self.bias = torch.nn.Parameter(torch.randn(dim))

    def forward(
        self, x: torch.Tensor, extra: torch.Tensor | None = None, causal: bool = True
    ) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        y += self.bias
        y.mul_(0.5)
        y = self.second(y)
        if extra is not None:
            y.add_(extra)
        return x + y


class Viewing(torch.nn.Module):
    """Returns the hidden state and a view of it; the first call after `reset` computes something else."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mix = torch.nn.Linear(dim, dim)
        self.was_called = False

    def forward(
        self, x: torch.Tensor, extra: torch.Tensor | None = None, causal: bool = True
    ) -> dict[str, Any]:
        sign = -1 if self.was_called else 1
        self.was_called = True
        y = x + sign * torch.tanh(self.mix(x if extra is None else x + extra))
        return {"hidden": y, "others": [y.select(-1, 0), None]}


class Reader(torch.nn.Module):
    """Computes with a parameter of another layer, beside that one's own calls."""

    def forward(self, x: torch.Tensor, layer: torch.nn.Module, path: str) -> torch.Tensor:
        *modules, name = path.split(".")
        for module in modules:
            layer = getattr(layer, module)
        value = getattr(layer, name).to(x.dtype)
        return x + 0.1 * (F.linear(x, value) if value.dim() == 2 else x * value)


LAYERS: dict[str, type[torch.nn.Module]] = {
    "mlp": Mlp,
    "attention": Attention,
    "gated": Gated,
    "shared": SharedInPlace,
    "viewing": Viewing,
}
#: What a `Reader` may read of them.
READABLE: dict[str, tuple[str, ...]] = {
    "mlp": ("norm.weight", "down.bias"),
    "attention": ("norm.bias", "out.bias"),
    "gated": ("gate", "shift", "mix.weight"),
    "shared": ("bias", "first.weight"),
    "viewing": ("mix.bias", "mix.weight"),
}


@dataclass(frozen=True)
class Micro:
    """One micro-batch: a forward, or two that share a backward, and the backward."""

    order: tuple[int, ...]  # of the layers that are called
    rows: int
    length: int
    extra: str  # argument of all layers: "none", "constant" or "differentiable"
    sync: bool  # else in no_sync()
    twice: bool = False  # two forwards, one loss
    retain: bool = False  # backward runs twice over the graph
    detach: bool = False  # behind the first layer called
    hook: bool = False  # that changes a gradient
    write: bool = False  # to what layers return
    with_others: bool = False  # what layers return besides is in the loss
    evaluate_before: bool = False
    evaluate_between: bool = False  # forward and backward
    #: Reads by the model: the position in the order before which, the layer, and the parameter of it.
    reads: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True)
class Step:
    micros: tuple[Micro, ...]
    after: str
    which: int  # parameter, for what is done to one


@dataclass(frozen=True)
class Program:
    seed: int
    dim: int
    layers: tuple[str, ...]
    policies: tuple[bmt.BlockPolicy, ...]
    tied: bool
    optimizer: str
    two_groups: bool
    set_to_none: bool
    clip: float | None
    loss_scale: float | None
    steps: tuple[Step, ...] = field(repr=False)


def draw(seed: int, world: int) -> Program:
    """The program of this seed."""
    r = random.Random(seed)
    layers = tuple(r.choice(list(LAYERS)) for _ in range(r.randint(1, 5)))
    policies = tuple(draw_policy(r, world) for _ in layers)
    if r.random() < 0.3:
        policies = policies[:1] * len(layers)
    return Program(
        seed=seed,
        dim=r.choice(DIMS),
        layers=layers,
        policies=policies,
        tied=r.random() < 0.4,
        optimizer=r.choice(OPTIMIZERS),
        two_groups=r.random() < 0.3,
        set_to_none=r.random() < 0.5,
        clip=r.choice([None, None, 0.5, 100.0]),
        loss_scale=r.choice([None, None, 1024.0]),
        steps=_with_reads(
            tuple(_step(r, len(layers)) for _ in range(r.randint(2, 5))),
            layers,
            random.Random(f"reads {seed}"),
        ),
    )


def _with_reads(steps: tuple[Step, ...], layers: tuple[str, ...], r: random.Random) -> tuple[Step, ...]:
    """Draws what has come to the draw later: programs of known seeds stay as they are, but for the reads."""
    if r.random() < 0.5:
        return steps

    def drawn(micro: Micro) -> Micro:
        times = r.choice([0, 1, 2])
        layer = [r.randrange(len(layers)) for _ in range(times)]
        places = sorted(r.randrange(len(micro.order)) for _ in range(times))
        reads = [(place, of, r.choice(READABLE[layers[of]])) for place, of in zip(places, layer, strict=True)]
        return replace(micro, reads=tuple(reads))

    return tuple(replace(step, micros=tuple(map(drawn, step.micros))) for step in steps)


def draw_policy(
    r: random.Random, world: int, levels: tuple[int, ...] = (0, 1, 2, 3, 3, 3)
) -> bmt.BlockPolicy:
    level = r.choice(levels)
    return bmt.BlockPolicy(
        level=level,
        recompute=r.choice(["off", "whole", "selective"]),
        keep_gathered=r.random() < 0.3,
        keep_gradients=r.random() < 0.7,
        offload_activations=r.random() < 0.1,
        zero_size=2 if level and world == 4 and r.random() < 0.3 else None,
    )


def _step(r: random.Random, layers: int) -> Step:
    micros = [_micro(r, layers) for _ in range(r.choice([1, 1, 2, 3]))]
    micros[-1] = replace(micros[-1], sync=True)
    return Step(tuple(micros), r.choice([*AFTER, "nothing", "nothing"]), r.randrange(1000))


def _micro(r: random.Random, layers: int) -> Micro:
    order = list(range(layers))
    kind = r.random()
    if kind < 0.2:
        r.shuffle(order)
    elif kind < 0.4:
        order = [r.randrange(layers) for _ in range(r.randint(1, layers + 2))]
    return Micro(
        order=tuple(order),
        rows=r.choice([2, 3]),
        length=r.choice([3, 7]),
        extra=r.choice(["none", "none", "differentiable", "constant"]),
        sync=r.random() < 0.5,
        twice=r.random() < 0.15,
        retain=r.random() < 0.1,
        detach=r.random() < 0.1,
        hook=r.random() < 0.15,
        write=r.random() < 0.3,
        with_others=r.random() < 0.7,
        evaluate_before=r.random() < 0.2,
        evaluate_between=r.random() < 0.2,
    )


class RandomModel(torch.nn.Module):
    """Embedding, layers that `forward` calls, and a head that may be the embedding's weight."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, program.dim)
        self.layers = torch.nn.ModuleList([LAYERS[kind](program.dim) for kind in program.layers])
        self.reader = Reader()
        self.norm = torch.nn.LayerNorm(program.dim)
        self.head = None if program.tied else torch.nn.Linear(program.dim, VOCAB)


def batch(program: Program, step: int, index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Token ids and the extra argument of a rank's micro-batch: any rank can make those of all."""
    micro = program.steps[step].micros[index]
    generator = torch.Generator().manual_seed(program.seed * 7919 + step * 101 + index * 11 + rank)
    ids = torch.randint(VOCAB, (micro.rows, micro.length), generator=generator)
    if micro.extra == "none":
        return ids, None
    extra = 0.1 * torch.randn(micro.rows, micro.length, program.dim, generator=generator)
    return ids, extra.requires_grad_(micro.extra == "differentiable")


def hidden_of(output: Tensors) -> torch.Tensor:
    """The hidden state in what a layer returned."""
    if isinstance(output, torch.Tensor):
        return output
    hidden: torch.Tensor = output["hidden"]
    return hidden


def reset(model: Any) -> None:
    """Has layers forget their calls."""
    for module in model.modules():
        if getattr(module, "was_called", False):
            module.was_called = False


def forward(model: Any, micro: Micro, ids: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
    """The loss of one micro-batch."""
    if micro.twice:
        once = replace(micro, twice=False)
        return forward(model, once, ids, extra) + forward(model, once, ids.flip(0), extra)
    hidden = F.embedding(ids, model.embedding.weight)
    others: list[torch.Tensor] = []
    for position, index in enumerate(micro.order):
        for place, layer, path in micro.reads:
            if place == position:
                hidden = model.reader(hidden, model.layers[layer], path)
        output = model.layers[index](hidden, extra, causal=True)
        if isinstance(output, dict):
            others.append(output["others"][0])
        hidden = hidden_of(output)
        if micro.write:
            hidden.mul_(0.75)
        if micro.detach and position == 0:
            hidden = hidden.detach()
    if micro.hook and hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * 1.5)
    reset(model)
    hidden = model.norm(hidden)
    logits = model.head(hidden) if model.head is not None else hidden @ model.embedding.weight.t()
    loss = F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())
    return loss + 0.1 * sum(other.mean() for other in others) if micro.with_others else loss
