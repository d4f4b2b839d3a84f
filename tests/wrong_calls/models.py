"""Blocks, layers and losses, and what ranks do with results."""

from __future__ import annotations

from typing import Any

import torch

import bmtrain as bmt
from bmtrain import _C

from .kinds import Calls

__all__ = ["layers", "losses", "tokens", "wrappers"]

X = torch.ones(4)


def wrappers() -> Calls:
    """Blocks, virtual shards, results of ranks, and a sum of the core."""
    shard = bmt.virtual.VirtualShard(0, 2)
    return {
        "BlockPolicy": (bmt.BlockPolicy, {"level": ("level", 3)}),
        "Block": (
            lambda *values: bmt.Block(bmt.nn.Linear(2, 2), zero_level=values[0], mode=values[1]),
            {"zero_level": ("unknown level", 3), "mode": ("mode", "BLOCK")},
        ),
        "BMTrainModelWrapper": (
            lambda model: bmt.BMTrainModelWrapper(model),
            {"model": ("module", torch.nn.Linear(2, 2))},
        ),
        "DistributedParameter": (
            lambda method: bmt.DistributedParameter(X, init_method=method),
            {"init_method": ("callable", torch.nn.init.zeros_)},
        ),
        "ParameterInitializer": (bmt.ParameterInitializer, {"func": ("callable", torch.nn.init.zeros_)}),
        "init_parameters": (bmt.init_parameters, {"module": ("modules", torch.nn.Linear(2, 2))}),
        "VirtualShard.of": (shard.of, {"batch": ("sequence", [1, 2])}),
        "sum_loss": (bmt.sum_loss, {"loss": ("a tensor", X)}),
        "gather_result": (bmt.gather_result, {"x": ("a tensor", X)}),
        "TreeSum.push": (lambda leaf: _C.TreeSum().push(leaf), {"leaf": ("leaf", X)}),
    }


def layers() -> Calls:
    """The constructors of `bmtrain.nn`, and their inputs."""
    n = bmt.nn
    linear: dict[str, tuple[str, Any]] = {
        "in_features": ("size", 4),
        "out_features": ("size", 6),
        "dtype": ("floating dtype", torch.float32),
    }
    table: dict[str, tuple[str, Any]] = {
        "vocab_size": ("size", 8),
        "embedding_size": ("size", 4),
        "dtype": ("floating dtype", torch.float32),
        "init_mean": ("finite number", 0.0),
        "init_std": ("number", 1.0),
    }
    made: Calls = {
        kind.__name__: (lambda i, o, dtype, kind=kind: kind(i, o, True, dtype), linear)
        for kind in (n.Linear, n.ColumnParallelLinear, n.RowParallelLinear)
    }
    made.update({kind.__name__: (kind, table) for kind in (n.VPEmbedding, n.Projection, n.VPProjection)})
    features, ids = torch.ones(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64)
    for kind in (n.Linear, n.ColumnParallelLinear, n.RowParallelLinear):
        layer: torch.nn.Module = kind(4, 6)
        made[f"{kind.__name__}.forward"] = (layer, {"input": ("features", features)})
    made["VPEmbedding.forward"] = (n.VPEmbedding(8, 4, torch.float32), {"x": ("ids", ids)})
    hidden = {"x": ("features", features)}
    for projection in (n.Projection, n.VPProjection):
        made[f"{projection.__name__}.forward"] = (projection(8, 4, torch.float32), hidden)
    made["VPEmbedding.projection"] = (n.VPEmbedding(8, 4, torch.float32).projection, hidden)
    sizes: dict[str, tuple[str, Any]] = {
        "dim": ("size", 4),
        "hidden_dim": ("size", 6),
        "num_experts": ("count", 3),
        "act": ("callable", torch.tanh),
        "dtype": ("floating dtype", torch.float32),
    }
    made["Experts"] = (lambda d, h, e, act, t: n.Experts(d, h, e, act=act, dtype=t), sizes)
    made["MoE"] = (
        lambda d, h, e, act, t, k, s, shared: n.MoE(
            d, h, e, k, scoring=s, shared_hidden_dim=shared, act=act, dtype=t
        ),
        {
            **sizes,
            "top_k": ("count", 2),
            "scoring": ("reduction", "softmax"),
            "shared_hidden_dim": ("size", 0),
        },
    )
    made["Experts.forward"] = (
        n.Experts(4, 6, 3),
        {
            "x": ("features", torch.ones(5, 4)),
            "top_k_index": ("class indices", torch.zeros(5, 2, dtype=torch.int64)),
            "top_k_weights": ("a tensor", torch.ones(5, 2)),
        },
    )
    chunks = {"async_gather_chunks": ("positive", 2)}
    made["ColumnParallelLinear(chunks)"] = (
        lambda number: n.ColumnParallelLinear(4, 6, async_gather_chunks=number),
        chunks,
    )
    made["RowParallelLinear(chunks)"] = (
        lambda number: n.RowParallelLinear(4, 6, async_chunks=number),
        {"async_chunks": ("positive", 2)},
    )
    return made


def tokens() -> Calls:
    """`bmtrain.nn.functional` and `bmtrain.nn.sequence`."""
    heads, values = torch.ones(1, 2, 3, 4), torch.ones(3)
    return {
        "attention": (
            lambda q, k, v, window: bmt.nn.functional.attention(q, k, v, window=window),
            {
                **dict.fromkeys("qkv", ("a tensor", heads)),
                "window": ("optional positive", 2),
            },
        ),
        "tiled": (
            bmt.nn.functional.tiled,
            {
                "function": ("callable", torch.tanh),
                "x": ("a tensor", heads[0]),
                "tiles": ("positive count", 2),
            },
        ),
        "token_mean": (
            bmt.nn.sequence.token_mean,
            {"losses": ("a tensor", values), "weights": ("mask", torch.ones(3))},
        ),
    }


def losses() -> Calls:
    """The losses, their options and inputs."""
    weight, logits, target = torch.ones(5), torch.ones(3, 5), torch.zeros(3, dtype=torch.int64)
    return {
        "FusedCrossEntropy": (
            bmt.loss.FusedCrossEntropy,
            {
                "weight": ("class weights", weight),
                "ignore_index": ("integer", -100),
                "reduction": ("reduction", "mean"),
                "label_smoothing": ("share", 0.1),
            },
        ),
        "FusedCrossEntropy.forward": (
            bmt.loss.FusedCrossEntropy(),
            {"input": ("logits", logits), "target": ("class indices", target)},
        ),
        "load_balancing_loss": (
            bmt.loss.load_balancing_loss,
            {"router_logits": ("logits", logits), "top_k": ("count", 2), "mask": ("mask", torch.ones(3))},
        ),
        "router_z_loss": (
            bmt.loss.router_z_loss,
            {"router_logits": ("logits", logits), "mask": ("mask", torch.ones(3))},
        ),
        "fused_linear_cross_entropy": (
            lambda hidden, table, targets, chunk, weight, ignored, reduction, smoothing: (
                bmt.loss.fused_linear_cross_entropy(
                    hidden,
                    table,
                    targets,
                    chunk=chunk,
                    class_weight=weight,
                    ignore_index=ignored,
                    reduction=reduction,
                    label_smoothing=smoothing,
                )
            ),
            {
                "hidden": ("features", torch.ones(3, 4)),
                "weight": ("matrix", torch.ones(5, 4)),
                "targets": ("class indices", target),
                "chunk": ("positive", 2),
                "class_weight": ("class weights", weight),
                "ignore_index": ("integer", -100),
                "reduction": ("reduction", "mean"),
                "label_smoothing": ("share", 0.1),
            },
        ),
    }
