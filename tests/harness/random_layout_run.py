"""A model that every drawn layout divides, and its training on the layout's ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import bmtrain
from bmtrain._tools.parity_rank import Done, Recorder
from bmtrain.loss import fused_linear_cross_entropy
from bmtrain.nn.functional import attention, tiled

from .random_layout import (
    CLIP,
    DIM,
    EXPERTS,
    FF,
    HEADS,
    PLACES,
    SMOOTHING,
    STEPS,
    TOP_K,
    VOCAB,
    Batch,
    Layout,
    Recorded,
    Weights,
    batch,
    freeze,
    groups_of,
    is_skipped,
    split,
)

__all__ = ["initial_weights", "make_manager", "make_model", "own_part", "train"]


class Layer(bmtrain.DistributedModule):
    """Attention and feed-forward: tensor-parallel ranks have rows of their own and share heads and features."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__()
        nn = bmtrain.nn
        self.norm = bmtrain.nn.Linear(DIM, DIM, bias=False, dtype=dtype)
        self.q = nn.ColumnParallelLinear(DIM, DIM, dtype=dtype)
        self.k, self.v = (
            nn.ColumnParallelLinear(DIM, DIM // HEADS * layout.kv_heads, dtype=dtype) for _ in range(2)
        )
        self.o = nn.RowParallelLinear(DIM, DIM, dtype=dtype)
        self.register_buffer("factor", torch.tensor(0.5, dtype=dtype))
        self.layout = layout
        if layout.mixture:
            self.moe = nn.MoE(DIM, FF, EXPERTS, TOP_K, dtype=dtype, **layout.moe)
        else:
            self.up, self.down = (
                nn.ColumnParallelLinear(DIM, FF * 2, dtype=dtype),
                nn.RowParallelLinear(FF * 2, DIM, dtype=dtype),
            )

    def forward(self, x: torch.Tensor) -> Any:
        normed = self.norm(torch.tanh(x * self.factor))
        q, k, v = (split(part(normed)) for part in (self.q, self.k, self.v))
        attended = attention(q, k, v, causal=self.layout.causal, window=self.layout.window)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        if not self.layout.mixture:
            return x + tiled(lambda part: self.down(torch.tanh(self.up(part))), x, self.layout.tiles)
        y, logits = self.moe(torch.tanh(x))
        return (x + y, logits) if self.layout.has_auxiliary_loss else x + y


class Embedding(bmtrain.DistributedModule):
    """Embeddings of tokens and of positions."""

    def __init__(self) -> None:
        super().__init__()
        normal = bmtrain.ParameterInitializer(torch.nn.init.normal_, std=0.7)
        self.tokens = bmtrain.DistributedParameter(torch.empty(VOCAB, DIM), init_method=normal)
        self.places = bmtrain.DistributedParameter(torch.empty(PLACES, DIM), init_method=normal)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.tokens) + F.embedding(position_ids, self.places)


class Reader(bmtrain.DistributedModule):
    """Computes with a weight of a layer, beside that one's own calls."""

    def forward(self, x: torch.Tensor, layer: Any) -> torch.Tensor:
        return x + 0.3 * F.linear(x, layer.norm.weight)


class Head(bmtrain.DistributedModule):
    """Mean loss over the tokens that this rank has, or its share of the mean over those that count."""

    def __init__(self, embedding: Embedding | None, layout: Layout) -> None:
        super().__init__()
        self.smoothing, self.fuses = SMOOTHING * layout.ignored, layout.fuses
        if embedding is None:
            normal = bmtrain.ParameterInitializer(torch.nn.init.normal_, std=0.3)
            self.weight = bmtrain.DistributedParameter(torch.empty(VOCAB, DIM), init_method=normal)
        else:
            self.weight = embedding.tokens

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, share: torch.Tensor | None = None
    ) -> torch.Tensor:
        smoothing = 0.0 if share is None else self.smoothing
        options: dict[str, Any] = {"reduction": "none", "label_smoothing": smoothing}
        if self.fuses:
            losses = fused_linear_cross_entropy(x.float(), self.weight, labels, chunk=10, **options)
        else:
            losses = F.cross_entropy((x.float() @ self.weight.t()).movedim(-1, 1), labels, **options)
        return losses.mean() if share is None else losses.sum(1).mean() * share


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
        self.reader = Reader()
        self.head = Head(self.embedding if layout.tied else None, layout)

    def loss(self, own: Batch, step: int = -1) -> torch.Tensor:
        """This rank's share of the loss of its tensor-parallel group."""
        tp = bmtrain.config["tp_size"]
        x = self.embedding(own["input_ids"], own["position_ids"]).to(self.dtype)
        labels = [own[name] for name in ("targets", "share") if name in own]
        if self.layout.loss_inside:
            loss: torch.Tensor = self.layers.loss(x, head=self.head, labels=tuple(labels))
            return loss.div(tp)
        if self.layout.pipeline is not None:
            out: torch.Tensor = self.head(self.layers(x), *labels)
            return out.div(tp)
        logits = []
        for number, layer in enumerate([*self.layers, *list(self.layers)[: int(self.layout.shared)]]):
            for place, read in self.layout.reads:
                if place == number:
                    x = self.reader(x, self.layers[read])
            if is_skipped(self.layout, step, number):
                continue
            x = layer(x)
            if self.layout.has_auxiliary_loss:
                x, found = x
                logits.append(found)
        loss = self.head(x, *labels)
        if self.layout.has_auxiliary_loss:
            mask = own["mask"].flatten().repeat(len(logits)) if "mask" in own else None
            loss = loss + 0.1 * bmtrain.loss.load_balancing_loss(torch.cat(logits), TOP_K, mask)
            loss = loss + 0.01 * bmtrain.loss.router_z_loss(torch.cat(logits), mask)
        return loss.div(tp)


def initial_weights(layout: Layout) -> Weights:
    """The weights that all runs begin with; made on one rank."""
    model = Model(replace(layout, policies=[{}] * len(layout.policies)))
    bmtrain.init_parameters(model)
    return {name: value.float() for name, value in model.state_dict().items()}


def make_model(layout: Layout, weights: Weights) -> Model:
    model = Model(layout)
    dtype = getattr(torch, layout.dtype)
    model.load_state_dict(
        {name: x.to(dtype if name.startswith("layers") else torch.float32) for name, x in weights.items()}
    )
    freeze(layout, dict(model.named_parameters()))
    return model


def make_manager(layout: Layout, model: Model) -> Any:
    """The manager, with its optimizers."""
    manager = bmtrain.optim.OptimManager(
        loss_scale=layout.loss_scale,
        accumulate=layout.accumulate if layout.accumulates_in == "manager" else 1,
        step_in_backward=layout.early,
    )
    kind = getattr(
        bmtrain.optim,
        {"sgd": "SGD", "adam": "Adam", "muon": "Muon"}[layout.optimizer]
        + "Offload" * layout.offloads
        + "Optimizer",
    )
    options: dict[str, Any] = {"sgd": {"momentum": 0.5}, "adam": {"eps": 0.01, "decoupled": True}}.get(
        layout.optimizer, {"adam_eps": 0.01}
    )
    groups: list[dict[str, Any]] = [
        {"params": list(members.items()), **own}
        for own, members in groups_of(layout, dict(model.named_parameters()))
    ]
    for some in [groups[:1], groups[1:]] if layout.groups == 2 else [groups]:
        if layout.optimizer == "muon":
            named = [name for group in some for name, _ in group["params"]]
            options["splits"] = {name: EXPERTS for name in named if "experts" in name}
        manager.add_optimizer(kind(some, lr=1.0, **options))
    return manager


def train(layout: Layout, weights: Weights) -> Recorded:
    """Trains on the ranks of a layout, which make this call together."""
    model = make_model(layout, weights)
    manager = make_manager(layout, model)
    recorder = Recorder(STEPS)
    try:
        for step in range(STEPS):
            if layout.evaluates:
                recorder.keep("evaluation", _evaluate(layout, model, step))
            if layout.reloads and step == 2:
                state = model.state_dict(), [each.state_dict(gather=True) for each in manager.optimizers]
                model = make_model(layout, state[0])
                scale, manager = manager.loss_scale, make_manager(layout, model)
                manager.loss_scale = scale
                for optimizer, each in zip(manager.optimizers, state[1], strict=True):
                    optimizer.load_state_dict(each)
            manager.zero_grad(set_to_none=layout.sets_to_none)
            _backward(layout, model, manager, recorder, step)
            if not layout.early:
                _clip(layout, manager, recorder, step)
            manager.step()
            recorder.after_step(manager)
    except Done:
        pass
    return sorted(recorder.found, key=lambda pair: pair[0])


def _backward(layout: Layout, model: Model, manager: Any, recorder: Recorder, step: int) -> None:
    if layout.accumulates_in == "virtual":
        shards, losses = bmtrain.virtual_shards(step), []
        for shard in shards:
            losses.append(model.loss(own_part(layout, batch(layout, step, shard.index)), step))
            manager.backward(losses[-1])
        recorder.keep("loss", shards.mean(losses) * bmtrain.config["tp_size"])
        return
    for micro in range(layout.accumulate):
        loss = model.loss(own_part(layout, batch(layout, step, micro)), step)
        recorder.see_loss(loss)
        waits = layout.accumulates_in == "no_sync" and micro < layout.accumulate - 1
        with bmtrain.no_sync() if waits else nullcontext():
            manager.backward(loss if layout.accumulates_in == "manager" else loss / layout.accumulate)


def _clip(layout: Layout, manager: Any, recorder: Recorder, step: int) -> None:
    recorder.before_step(manager)
    if layout.loss_scale:
        recorder.found = [
            (name, value / manager.loss_scale if name.startswith(f"step {step}: gradient") else value)
            for name, value in recorder.found
        ]
    groups = [group for optimizer in manager.optimizers for group in optimizer.param_groups]
    recorder.keep("norm", manager.clip_grad_norm(groups, CLIP, norm_type=layout.norm_type))


@torch.no_grad()
def _evaluate(layout: Layout, model: Model, step: int) -> torch.Tensor:
    """The mean loss of other tokens, in evaluation."""
    config = bmtrain.config
    model.eval()
    plain = layout.plain
    divides = layout.evaluates == "divided"
    if not divides:
        bmtrain.nn.sequence.whole_sequences()
    loss = model.loss(own_part(plain, batch(plain, STEPS + step, 0), divides=divides))
    model.train()
    mean: torch.Tensor = bmtrain.distributed.all_gather(loss.float()).mean() * config["tp_size"]
    return mean


def own_part(layout: Layout, whole: Batch, divides: bool | None = None) -> Batch:
    """This rank's tokens, their positions and labels: sequence ranks divide tokens, tensor-parallel ranks rows."""
    config = bmtrain.config
    own = dict(whole)
    if layout.accumulates_in != "virtual":
        own = {name: part.chunk(config["dp_size"])[config["dp_rank"]] for name, part in own.items()}
    own = {name: part.chunk(config["tp_size"])[config["tp_rank"]] for name, part in own.items()}
    rows = len(own["input_ids"])
    targets = "shift_labels" if layout.is_uneven else "targets"
    own[targets] = own.pop("labels")
    if layout.padded:
        own["attention_mask"] = own["mask"]
    if not layout.packed:
        del own["documents"]
    if config["sp_size"] > 1 or layout.packed or layout.is_uneven if divides is None else divides:
        own = bmtrain.shard_sequence(own, method=layout.method)
    own.setdefault("position_ids", torch.arange(own["input_ids"].shape[1]).expand_as(own["input_ids"]))
    own["targets"] = own.pop(targets)
    if layout.is_uneven:
        own["share"] = rows / own.pop("num_items_in_batch")
    else:
        del own["mask"]
    return own
