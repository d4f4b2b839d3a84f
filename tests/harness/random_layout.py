"""Layouts of ranks drawn at random, a model that every one of them divides, and the same model in plain torch.

A layout is a factorisation of up to 8 ranks with the choices that must not change a result either: policies of blocks,
schedules, accumulation, loss scales. `train` trains on the ranks of a layout, `train_whole` in one process in fp64 and
plain torch; both return the tensors of each step, by name, for `bmtrain._tools.parity.compare`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import bmtrain
from bmtrain._tools.parity_rank import Done, Recorder
from bmtrain.nn.functional import attention

__all__ = ["Layout", "draw", "initial_weights", "train", "train_whole"]

DIM, HEADS, FF, EXPERTS, TOP_K, VOCAB, TOKENS = 16, 8, 24, 8, 2, 24, 8
ROWS = 144  # which every draw divides
STEPS = 5
CLIP = 0.5
SMOOTHING = 0.1
Weights = dict[str, torch.Tensor]
Recorded = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Layout:
    """One draw.

    Attributes:
        ranks: their number.
        init: arguments of `init_distributed`.
        policies: of each layer, arguments of `BlockPolicy`.
        pipeline: arguments of the pipeline list; None without a pipeline.
        loss_inside: whether the pipeline computes the loss.
        mixture: whether layers have experts.
        shared: whether the first layer runs again after the last one.
        tied: whether the head reads the embedding.
        frozen: parameters that are not trained, by the ends of their names.
        accumulate: backwards of a step.
        accumulates_in: ``"manager"``, ``"no_sync"`` or ``"shards"`` (sent each time).
        loss_scale: of the manager.
        dtype: of the layers' parameters.
        optimizer: ``"sgd"`` or ``"adam"``.
        method: of divided sequences.
        packed: whether sequences have several documents, at other places in each.
        ignored: whether many labels do not count, on some ranks none, and the others are smoothed.
        norm_type: of the norm that clips.
    """

    seed: int
    ranks: int
    init: dict[str, int]
    policies: list[dict[str, Any]]
    pipeline: dict[str, Any] | None = None
    loss_inside: bool = False
    mixture: bool = False
    shared: bool = False
    tied: bool = False
    frozen: tuple[str, ...] = ()
    accumulate: int = 1
    accumulates_in: str = "manager"
    loss_scale: float | None = None
    dtype: str = "float32"
    optimizer: str = "sgd"
    method: str = "heads"
    packed: bool = False
    ignored: bool = False
    norm_type: float = 2

    @property
    def has_auxiliary_loss(self) -> bool:
        """Layers of a pipeline pass the hidden state alone."""
        return self.mixture and self.pipeline is None


def draw(seed: int) -> Layout:
    """Returns the layout of a seed."""
    r = random.Random(seed)
    while True:
        pipe, tp, sp = (r.choice([1, 1, 1, 2, 2, 4]) for _ in range(3))
        product = pipe * tp * sp
        if product <= 8:
            break
    ranks = product * r.choice([times for times in (1, 2, 3, 4, 8) if product * times <= 8])
    stage = ranks // pipe
    mixture = r.random() < 0.5
    divides_experts = mixture and tp == 1
    ep = r.choice([size for size in (1, 2, 2, 4, 8) if stage % size == 0]) if divides_experts else 1
    init = {"tp_size": tp, "sp_size": sp, "ep_size": ep}
    pipeline: dict[str, Any] | None = None
    if pipe > 1:
        micros = pipe * r.choice([1, 2, 3])
        schedule = r.choice(["gpipe", "1f1b", "interleaved", "zb1p"])
        pipeline = {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
        init |= {"pipe_size": pipe, "num_micro_batches": micros}
    loss_inside = pipe > 1 and ((pipeline is not None and pipeline["chunks"] > 1) or r.random() < 0.7)
    layers = r.choice([2, 3, 5, 6])
    sharing = stage // tp
    names = ["embedding", "norm.weight", "q.weight", "o.bias", "router.weight", "down", "up.weight"]
    return Layout(
        seed=seed,
        ranks=ranks,
        init=init,
        policies=[_draw_policy(r, sharing // ep) for _ in range(layers)],
        pipeline=pipeline,
        loss_inside=loss_inside,
        mixture=mixture,
        shared=pipe == 1 and r.random() < 0.3,
        tied=r.random() < 0.5,
        frozen=tuple(r.sample(names, r.choice([0, 0, 1, 2]))),
        accumulate=r.choice([1, 1, 2, 3]),
        accumulates_in=r.choice(["manager", "no_sync", "shards"]),
        loss_scale=r.choice([None, None, 1024.0]),
        # In fp16 a router may choose another expert than in fp64.
        dtype="float16" if r.random() < 0.2 and not mixture else "float32",
        optimizer=r.choice(["sgd", "adam"]),
        method=r.choice(["heads", "ring"]),
        packed=r.random() < 0.4,
        ignored=r.random() < 0.5,
        norm_type=r.choice([2, 2, 1, math.inf]),
    )


def _draw_policy(r: random.Random, sharing: int) -> dict[str, Any]:
    policy: dict[str, Any] = {
        "level": r.choice([0, 1, 2, 3, 3, 3]),
        "recompute": r.choice(["off", "whole", "whole", "selective"]),
        "keep_gradients": r.random() < 0.7,
    }
    sizes = [size for size in (2, 4) if sharing % size == 0]
    if policy["level"] and sizes and r.random() < 0.3:
        policy["zero_size"] = r.choice(sizes)
    return policy


class Layer(bmtrain.DistributedModule):
    """Attention and feed-forward: tensor-parallel ranks have rows of their own and share heads and features."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__()
        nn = bmtrain.nn
        self.norm = bmtrain.nn.Linear(DIM, DIM, bias=False, dtype=dtype)
        self.q, self.k, self.v = (nn.ColumnParallelLinear(DIM, DIM, dtype=dtype) for _ in range(3))
        self.o = nn.RowParallelLinear(DIM, DIM, dtype=dtype)
        self.mixture = layout.mixture
        self.returns_logits = layout.has_auxiliary_loss
        if layout.mixture:
            self.moe = nn.MoE(DIM, FF, EXPERTS, TOP_K, dtype=dtype)
        else:
            self.up, self.down = (
                nn.ColumnParallelLinear(DIM, FF * 2, dtype=dtype),
                nn.RowParallelLinear(FF * 2, DIM, dtype=dtype),
            )

    def forward(self, x: torch.Tensor) -> Any:
        normed = self.norm(torch.tanh(x))
        q, k, v = (split(part(normed)) for part in (self.q, self.k, self.v))
        x = x + self.o(attention(q, k, v, causal=True).transpose(1, 2).flatten(2))
        if not self.mixture:
            return x + self.down(torch.tanh(self.up(x)))
        y, logits = self.moe(torch.tanh(x))
        return (x + y, logits) if self.returns_logits else x + y


def split(x: torch.Tensor) -> torch.Tensor:
    """Features to heads: ``(rows, heads, tokens, 2)``."""
    heads: torch.Tensor = x.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
    return heads


class Embedding(bmtrain.DistributedModule):
    """Embeddings of tokens and of positions."""

    def __init__(self) -> None:
        super().__init__()
        normal = bmtrain.ParameterInitializer(torch.nn.init.normal_, std=0.7)
        self.tokens = bmtrain.DistributedParameter(torch.empty(VOCAB, DIM), init_method=normal)
        self.places = bmtrain.DistributedParameter(torch.empty(TOKENS * 2, DIM), init_method=normal)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.tokens) + F.embedding(position_ids, self.places)


class Head(bmtrain.DistributedModule):
    """Mean loss over the tokens that this rank has, or its share of the mean over those that count."""

    def __init__(self, embedding: Embedding | None) -> None:
        super().__init__()
        if embedding is None:
            normal = bmtrain.ParameterInitializer(torch.nn.init.normal_, std=0.3)
            self.weight = bmtrain.DistributedParameter(torch.empty(VOCAB, DIM), init_method=normal)
        else:
            self.weight = embedding.tokens

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, share: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits = (x.float() @ self.weight.t()).flatten(0, 1)
        if share is None:
            return F.cross_entropy(logits, labels.flatten())
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none", label_smoothing=SMOOTHING)
        return losses.view(labels.shape).sum(1).mean() * share


class Model(bmtrain.DistributedModule):
    """A decoder whose every part some layout divides."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.dtype = getattr(torch, layout.dtype)
        self.embedding = Embedding()
        made = [
            bmtrain.Block(
                Layer(layout, self.dtype),
                policy=bmtrain.BlockPolicy(**policy),
                mode="PIPE" if layout.pipeline is not None else "BLOCK",
            )
            for policy in layout.policies
        ]
        self.layers: Any = (
            torch.nn.ModuleList(made)
            if layout.pipeline is None
            else bmtrain.PipelineTransformerBlockList(made, **layout.pipeline)
        )
        self.head = Head(self.embedding if layout.tied else None)

    def loss(self, ids: torch.Tensor, positions: torch.Tensor, *labels: torch.Tensor) -> torch.Tensor:
        """This rank's share of the loss of its tensor-parallel group; ``labels`` may have a share behind them."""
        tp = bmtrain.config["tp_size"]
        x = self.embedding(ids, positions).to(self.dtype)
        if self.layout.loss_inside:
            loss: torch.Tensor = self.layers.loss(x, head=self.head, labels=labels)
            return loss.div(tp)
        if self.layout.pipeline is not None:
            out: torch.Tensor = self.head(self.layers(x), *labels)
            return out.div(tp)
        logits = []
        for layer in [*self.layers, *list(self.layers)[: int(self.layout.shared)]]:
            x = layer(x)
            if self.layout.has_auxiliary_loss:
                x, found = x
                logits.append(found)
        loss = self.head(x, *labels)
        if self.layout.has_auxiliary_loss:
            all_logits = torch.cat(logits)
            loss = loss + 0.1 * bmtrain.loss.load_balancing_loss(all_logits, TOP_K)
            loss = loss + 0.01 * bmtrain.loss.router_z_loss(all_logits)
        return loss.div(tp)


def batch(layout: Layout, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and documents of all ranks."""
    generator = torch.Generator().manual_seed(layout.seed * 1000 + step * 10 + micro)
    ids, labels = (torch.randint(VOCAB, (ROWS, TOKENS), generator=generator) for _ in range(2))
    begins = torch.rand(ROWS, TOKENS, generator=generator) < 0.3 * layout.packed
    if layout.ignored:
        do_not_count = torch.rand(ROWS, TOKENS, generator=generator) < 0.4
        do_not_count[: ROWS // 4] = True
        do_not_count[:, : TOKENS // 2 * (step % 2)] = True
        labels.masked_fill_(do_not_count, -100)
    return ids, labels, begins.cumsum(1)


def freeze(layout: Layout, named: Mapping[str, torch.Tensor]) -> None:
    """Freezes what the layout says."""
    for name, param in named.items():
        param.requires_grad_(not any(end in name for end in layout.frozen))


def initial_weights(layout: Layout) -> Weights:
    """The weights that all runs begin with; made on one rank."""
    model = Model(layout)
    bmtrain.init_parameters(model)
    return {name: value.float() for name, value in model.state_dict().items()}


def train(layout: Layout, weights: Weights) -> Recorded:
    """Trains on the ranks of a layout, which make this call together."""
    model = Model(layout)
    model.load_state_dict(
        {
            name: value.to(getattr(torch, layout.dtype) if name.startswith("layers") else torch.float32)
            for name, value in weights.items()
        }
    )
    freeze(layout, dict(model.named_parameters()))
    options = {"lr": 0.1, "momentum": 0.5} if layout.optimizer == "sgd" else {"lr": 0.01, "eps": 0.01}
    kind: Any = bmtrain.optim.SGDOptimizer if layout.optimizer == "sgd" else bmtrain.optim.AdamOptimizer
    optimizer: Any = kind(model.named_parameters(), **options)
    by_manager = layout.accumulates_in == "manager"
    manager = bmtrain.optim.OptimManager(
        loss_scale=layout.loss_scale, accumulate=layout.accumulate if by_manager else 1
    )
    manager.add_optimizer(optimizer)
    recorder = Recorder(STEPS)
    try:
        for step in range(STEPS):
            manager.zero_grad()
            for micro in range(layout.accumulate):
                loss = model.loss(*_own(layout, step, micro))
                recorder.see_loss(loss)
                waits = layout.accumulates_in == "no_sync" and micro < layout.accumulate - 1
                with bmtrain.no_sync() if waits else nullcontext():
                    manager.backward(loss if by_manager else loss / layout.accumulate)
            recorder.before_step(manager)
            if layout.loss_scale:
                recorder.found = [
                    (name, value / layout.loss_scale if name.startswith(f"step {step}: gradient") else value)
                    for name, value in recorder.found
                ]
            norm = manager.clip_grad_norm(optimizer.param_groups, CLIP, norm_type=layout.norm_type)
            recorder.keep("norm", norm)
            manager.step()
            recorder.after_step(manager)
    except Done:
        pass
    return recorder.found


def _own(layout: Layout, step: int, micro: int) -> tuple[torch.Tensor, ...]:
    """This rank's tokens, their positions and labels: sequence ranks divide tokens, tensor-parallel ranks rows."""
    config = bmtrain.config
    targets = "shift_labels" if layout.ignored else "targets"
    whole = dict(zip(("input_ids", targets, "documents"), batch(layout, step, micro), strict=True))
    own = {name: part.chunk(config["dp_size"])[config["dp_rank"]] for name, part in whole.items()}
    own = {name: part.chunk(config["tp_size"])[config["tp_rank"]] for name, part in own.items()}
    if config["sp_size"] > 1 or layout.packed or layout.ignored:
        own = bmtrain.shard_sequence(own, method=layout.method)
        share = [len(own["input_ids"]) / own["num_items_in_batch"]] if layout.ignored else []
        return own["input_ids"], own["position_ids"], own[targets], *share
    return own["input_ids"], torch.arange(TOKENS).expand_as(own["input_ids"]), own["targets"]


def train_whole(layout: Layout, weights: Weights, reached: Weights) -> Recorded:
    """The same steps in one process, in plain torch and fp64.

    Each begins at the weights that the step before has reached in the layout: some steps amplify their rounding.
    """
    named = {name: value.double().clone() for name, value in weights.items()}
    if layout.tied:
        named.pop("head.weight", None)
    freeze(layout, named)
    trained = [value for value in named.values() if value.requires_grad]
    kind: Any = torch.optim.SGD if layout.optimizer == "sgd" else torch.optim.Adam
    options = {"lr": 0.1, "momentum": 0.5} if layout.optimizer == "sgd" else {"lr": 0.01, "eps": 0.01}
    optimizer: Any = kind(trained, **options)
    found: Recorded = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(layout.accumulate):
            loss = _plain_loss(layout, named, *batch(layout, step, micro))
            found.append((f"step {step}: loss", loss.detach()))
            (loss / layout.accumulate).backward()
        for name, value in named.items():
            if value.grad is not None:
                found.append((f"step {step}: gradient of {name}", value.grad.reshape(-1).clone()))
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP, layout.norm_type)
        found.append((f"step {step}: norm", norm))
        optimizer.step()
        for name, value in named.items():
            key = f"step {step}: weight of {name}"
            found.append((key, value.detach().reshape(-1).clone()))
            value.detach().copy_(reached[key].view_as(value))
    return found


def _plain_loss(
    layout: Layout, w: Weights, ids: torch.Tensor, labels: torch.Tensor, documents: torch.Tensor
) -> torch.Tensor:
    x = w["embedding.tokens"][ids] + w["embedding.places"][: ids.shape[1]]
    order = [*range(len(layout.policies)), *[0] * int(layout.shared)]
    allowed = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    logits = []
    for number in order:
        prefix = f"layers.{number}."
        own = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        normed = torch.tanh(x) @ own["norm.weight"].T
        q, k, v = (split(F.linear(normed, own[f"{n}.weight"], own[f"{n}.bias"])) for n in "qkv")
        scores = q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5
        mixed = (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(mixed, own["o.weight"], own["o.bias"])
        if layout.mixture:
            y, found = _plain_mixture(torch.tanh(x).flatten(0, 1), own)
            x = x + y.view_as(x)
            logits.append(found)
        else:
            hidden = torch.tanh(F.linear(x, own["up.weight"], own["up.bias"]))
            x = x + F.linear(hidden, own["down.weight"], own["down.bias"])
    head = w["embedding.tokens" if layout.tied else "head.weight"]
    smoothing = SMOOTHING * layout.ignored
    loss = F.cross_entropy((x @ head.T).flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    if layout.has_auxiliary_loss:
        every = torch.cat(logits)
        shares = torch.zeros_like(every).scatter_(-1, every.topk(TOP_K).indices, 1).mean(0)
        loss = loss + 0.1 * EXPERTS * (shares * every.softmax(-1).mean(0)).sum()
        loss = loss + 0.01 * torch.logsumexp(every, -1).square().mean()
    return loss


def _plain_mixture(x: torch.Tensor, own: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x @ own["moe.router.weight"].T
    factors, index = logits.softmax(-1).topk(TOP_K, dim=-1)
    factors = factors / factors.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = (x @ own["moe.experts.gate_up"][expert].T).chunk(2, dim=-1)
        of_all = (F.silu(gate) * up) @ own["moe.experts.down"][expert].T
        y = y + of_all * (factors * (index == expert)).sum(-1, keepdim=True)
    return y, logits
