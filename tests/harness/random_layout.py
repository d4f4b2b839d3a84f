"""Layouts of ranks drawn at random.

A layout is a factorisation of up to 8 ranks with the choices that must not change a result either (policies of blocks,
schedules, accumulation, loss scales, places of state), and a program: what is trained, on which tokens, and by what.
`random_layout_run` trains it on its ranks, `random_layout_peer` in one process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

__all__ = [
    "CLIP",
    "DIM",
    "EXPERTS",
    "FF",
    "HEADS",
    "PLACES",
    "SMOOTHING",
    "STEPS",
    "TOP_K",
    "VOCAB",
    "Batch",
    "Layout",
    "Recorded",
    "Weights",
    "batch",
    "draw",
    "freeze",
    "groups_of",
    "is_skipped",
    "split",
]

DIM, HEADS, FF, EXPERTS, TOP_K, VOCAB, PLACES = 16, 8, 24, 8, 2, 24, 16
ROWS = 48, 144  # the latter is divided by every draw
STEPS = 4
CLIP = 0.5
SMOOTHING = 0.1
Weights = dict[str, torch.Tensor]
Recorded = list[tuple[str, torch.Tensor]]
Batch = dict[str, torch.Tensor]


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
        frozen: parameters that are not trained, by parts of their names.
        accumulate: backwards of a step, or its virtual shards.
        accumulates_in: ``"manager"``, ``"no_sync"``, ``"shards"`` (sent each time) or ``"virtual"`` shards.
        loss_scale: of the manager.
        dtype: of the layers' parameters.
        optimizer: ``"sgd"``, ``"adam"`` or ``"muon"``.
        method: of divided sequences.
        packed: whether sequences have several documents, at other places in each.
        ignored: whether many labels do not count, on some ranks none, and the others are smoothed.
        norm_type: of the norm that clips.
        kv_heads: heads of keys and values.
        causal: whether tokens attend to earlier ones only.
        window: number of tokens that a token attends to; None: all.
        tokens: of a sequence.
        padded: whether sequences begin or end with padding.
        moe: further arguments of the mixture.
        offloads: whether optimizers have their state on the host.
        groups: parameters in groups of their own learning rate and decay: 0 none, 1 of one optimizer, 2 of two.
        early: whether backward steps; then nothing clips.
        skips: whether a step leaves a layer out.
        sets_to_none: how gradients are dropped.
        evaluates: ``"divided"`` or ``"whole"`` sequences between steps; or empty.
        reloads: whether a model and an optimizer made anew go on from a gathered state.
        on_disk: whether blocks have their state on a drive, and some their gradients and parameters.
        tiles: number of pieces of tokens in the feed-forward layer.
        fuses: whether the head computes its loss in pieces.
        reads: layers whose weight the model reads in its own forward, each with the number of layers before that.
    """

    seed: int
    ranks: int
    init: dict[str, Any]
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
    kv_heads: int = HEADS
    causal: bool = True
    window: int | None = None
    tokens: int = 8
    padded: bool = False
    moe: dict[str, Any] = field(default_factory=dict)
    offloads: bool = False
    groups: int = 0
    early: bool = False
    skips: bool = False
    sets_to_none: bool = False
    evaluates: str = ""
    reloads: bool = False
    on_disk: bool = False
    tiles: int = 1
    fuses: bool = False
    reads: tuple[tuple[int, int], ...] = ()

    @property
    def has_auxiliary_loss(self) -> bool:
        """Layers of a pipeline pass the hidden state alone, and virtual shards do not know all tokens."""
        return self.mixture and self.pipeline is None and self.accumulates_in != "virtual"

    @property
    def rows(self) -> int:
        """Sequences of a batch: few, as attention computes their documents one by one."""
        stages, micros = self.init.get("pipe_size", 1), self.init.get("num_micro_batches", 1)
        parts = max(
            1, self.ranks // stages // self.init.get("sp_size", 1) * micros
        )  # 0 ranks: drawn by no seed
        return next(rows for rows in ROWS if rows % parts == 0)

    @property
    def is_uneven(self) -> bool:
        """Whether some tokens of some ranks do not count."""
        return self.ignored or self.padded or self.tokens % 8 > 0

    @property
    def plain(self) -> Layout:
        """The same model over whole batches in which every token counts."""
        return replace(self, packed=False, ignored=False, padded=False, tokens=8, accumulates_in="manager")

    @property
    def without_stages(self) -> Layout:
        """The same model and division without its pipeline."""
        init = {**self.init, "pipe_size": 1, "num_micro_batches": 1}
        ranks = self.ranks // self.init["pipe_size"]
        return replace(self, ranks=ranks, init=init, pipeline=None, loss_inside=False)


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
    ep = 1
    if mixture:  # beside tensor parallelism the division of experts has come to the draw later
        of_experts = r if tp == 1 else random.Random(f"experts {seed}")
        ep = of_experts.choice([size for size in (1, 2, 2, 4, 8) if stage % size == 0])
    init = {"tp_size": tp, "sp_size": sp, "ep_size": ep}
    pipeline: dict[str, Any] | None = None
    if pipe > 1:
        micros = pipe * r.choice([1, 2, 3])
        schedule = r.choice(["gpipe", "1f1b", "interleaved", "zb1p"])
        pipeline = {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
        init |= {"pipe_size": pipe, "num_micro_batches": micros}
    loss_inside = pipe > 1 and ((pipeline is not None and pipeline["chunks"] > 1) or r.random() < 0.7)
    layers = r.choice([2, 3, 5, 6])
    sharing = math.gcd(stage // tp, stage // ep)
    names = ["embedding", "norm.weight", "q.weight", "o.bias", "router.weight", "down", "up.weight"]
    layout = Layout(
        seed=seed,
        ranks=ranks,
        init=init,
        policies=[_draw_policy(r, sharing) for _ in range(layers)],
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
    return _with_program(layout, random.Random(f"program {seed}"))


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


def _with_program(layout: Layout, r: random.Random) -> Layout:
    """Draws what the layout trains, and what has come to the draw later: layouts of known seeds stay as they are."""
    sizes, pipe = layout.init, layout.pipeline is not None
    tokens, padded = r.choice([8, 8, 7]), r.random() < 0.25
    causal = r.random() < 0.7
    # The bits of products at owners are those of bf16.
    optimizer = "muon" if r.random() < 0.3 and layout.dtype == "float32" else layout.optimizer
    layout = replace(
        layout,
        kv_heads=r.choice([HEADS, HEADS, 4]),
        causal=causal,
        window=r.choice([None, None, 3]) if causal else None,
        tokens=tokens,
        padded=padded,
        moe={"scoring": r.choice(["softmax", "sigmoid"]), "shared_hidden_dim": r.choice([0, 8])},
        optimizer=optimizer,
        offloads=r.random() < 0.4,
        groups=r.choice([0, 0, 1, 2]),
        sets_to_none=r.random() < 0.5,
        evaluates=r.choice(["", "", "divided", "whole"]),
        reloads=r.random() < 0.25,
        policies=[
            {**p, "keep_gathered": r.random() < 0.2, "offload_activations": r.random() < 0.1}
            for p in layout.policies
        ],
    )
    if r.random() < 0.15:  # of a frozen beginning, and of one where little is trained
        layout = replace(
            layout, frozen=r.choice([("embedding", "layers.0."), (".weight",), ("norm", "q.", "down")])
        )
    came_later = pipe or sizes["tp_size"] > 1 or 1 not in (sizes["sp_size"], sizes["ep_size"])
    of_shards = random.Random(f"virtual {layout.seed}") if came_later else r
    if of_shards.random() < 0.4:
        shards = max(of_shards.choice([3, 4, 6]), layout.ranks // (sizes["sp_size"] * sizes["tp_size"]))
        init = {**sizes, "virtual_shards": shards}
        if pipe:
            init["num_micro_batches"] = init["pipe_size"]
        layout = replace(layout, init=init, accumulate=shards, accumulates_in="virtual")
    if not pipe and layout.loss_scale is None and r.random() < 0.3:
        layout = replace(layout, early=layout.accumulates_in in ("manager", "virtual"))
    if not pipe and r.random() < 0.2:
        layout = replace(layout, skips=not layout.shared)
    if r.random() < 0.2 and layout.optimizer != "muon":
        more = [
            r.sample(["gradients", "parameters"][: p["level"]], r.randint(0, min(p["level"], 2)))
            for p in layout.policies
        ]
        policies = [
            {**policy, "optimizer": "disk", **dict.fromkeys(places, "disk")}
            for policy, places in zip(layout.policies, more, strict=True)
        ]
        layout = replace(layout, policies=policies, on_disk=True)
    layout = replace(layout, tiles=r.choice([1, 1, 3]), fuses=r.random() < 0.3)
    of_reads, layers = random.Random(f"reads {layout.seed}"), range(len(layout.policies))
    if not pipe and of_reads.random() < 0.4:
        reads = [(of_reads.choice(layers), of_reads.choice(layers)) for _ in range(of_reads.choice([1, 2]))]
        layout = replace(layout, reads=tuple(reads))
    return layout


def batch(layout: Layout, step: int, micro: int) -> Batch:
    """Tokens, labels, documents, and whether each token is no padding; of all ranks."""
    generator = torch.Generator().manual_seed(layout.seed * 1000 + step * 10 + micro)
    rows, tokens = layout.rows, layout.tokens
    if layout.accumulates_in == "virtual":
        rows //= layout.accumulate
    ids, labels = (torch.randint(VOCAB, (rows, tokens), generator=generator) for _ in range(2))
    begins = torch.rand(rows, tokens, generator=generator) < 0.3 * layout.packed
    if layout.ignored:
        do_not_count = torch.rand(rows, tokens, generator=generator) < 0.4
        do_not_count[: rows // 4] = True
        do_not_count[:, : tokens // 2 * (step % 2)] = True
        labels.masked_fill_(do_not_count, -100)
    mask = torch.ones(rows, tokens, dtype=torch.long)
    if layout.padded:
        mask[::2, :2] = 0
        mask[1::3, -3:] = 0
        labels.masked_fill_(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "documents": begins.cumsum(1), "mask": mask}


def freeze(layout: Layout, named: Mapping[str, torch.Tensor]) -> None:
    """Freezes what the layout says."""
    for name, param in named.items():
        param.requires_grad_(not any(part in name for part in layout.frozen))


def groups_of(layout: Layout, named: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Options and members of each group of parameters; the sizes of a rate are those of the optimizer's own."""
    lr = 0.1 if layout.optimizer == "sgd" else 0.01
    if not layout.groups:
        return [({"lr": lr, "weight_decay": 0.0}, dict(named))]
    apart = {name for name in named if name.endswith(".bias") or "embedding" in name or "o.weight" in name}
    return [
        ({"lr": lr / 2, "weight_decay": 0.0}, {name: p for name, p in named.items() if name in apart}),
        ({"lr": lr, "weight_decay": 0.1}, {name: p for name, p in named.items() if name not in apart}),
    ]


def is_skipped(layout: Layout, step: int, number: int) -> bool:
    """Whether a step leaves out a layer."""
    return layout.skips and step >= 0 and number == step % 3


def split(x: torch.Tensor) -> torch.Tensor:
    """Features to heads: ``(rows, heads, tokens, 2)``."""
    heads: torch.Tensor = x.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
    return heads
