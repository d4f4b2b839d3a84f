"""The training of a drawn layout in one process, in plain torch and fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from .random_layout import (
    CLIP,
    DIM,
    EXPERTS,
    HEADS,
    SMOOTHING,
    STEPS,
    TOP_K,
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

__all__ = ["train_whole"]


def train_whole(layout: Layout, weights: Weights, reached: Weights) -> Recorded:
    """The steps of `random_layout_run.train` in one process.

    Each begins at the weights that the step before has reached in the layout: some steps amplify their rounding.
    """
    named = {name: value.double().clone() for name, value in weights.items() if not name.endswith("factor")}
    if layout.tied:
        named.pop("head.weight", None)
    freeze(layout, named)
    trained = [value for value in named.values() if value.requires_grad]
    optimizers = list(_optimizers(layout, named))
    found: Recorded = []
    for step in range(STEPS):
        if layout.evaluates:
            with torch.no_grad():
                loss = _loss(
                    layout.plain, named, batch(layout.plain, STEPS + step, 0), -1, layout.has_auxiliary_loss
                )
            found.append((f"step {step}: evaluation", loss))
        for value in trained:
            value.grad = None if layout.sets_to_none or value.grad is None else torch.zeros_like(value)
        losses = []
        for micro in range(layout.accumulate):
            data = batch(layout, step, micro)
            loss = _loss(layout, named, data, step, layout.has_auxiliary_loss)
            losses.append(loss.detach())
            (loss / layout.accumulate).backward()
        if layout.accumulates_in == "virtual":
            losses = [torch.stack(losses).mean()]
        found += [(f"step {step}: loss", loss) for loss in losses]
        if not layout.early:
            for name, value in named.items():
                if value.grad is not None:
                    found.append((f"step {step}: gradient of {name}", value.grad.reshape(-1).clone()))
            norm = torch.nn.utils.clip_grad_norm_(trained, CLIP, layout.norm_type)
            found.append((f"step {step}: norm", norm))
        for optimizer, parts in optimizers:
            for part, whole, index in parts:
                part.grad = None if whole.grad is None else whole.grad[index]
            optimizer.step()
        for name, value in named.items():
            key = f"step {step}: weight of {name}"
            found.append((key, value.detach().reshape(-1).clone()))
            value.detach().copy_(reached[key].view_as(value))
    return sorted(found, key=lambda pair: pair[0])


def _optimizers(layout: Layout, named: Weights) -> Iterator[tuple[Any, list[tuple[Any, ...]]]]:
    """Optimizers of torch, and parts of parameters that are matrices to them: the part, the whole, and the place."""
    for options, members in groups_of(layout, named):
        trained = {name: p for name, p in members.items() if p.requires_grad}
        is_muon = {
            name: layout.optimizer == "muon" and name.startswith("layers") and p.dim() > 1
            for name, p in trained.items()
        }
        others = [p for name, p in trained.items() if not is_muon[name]]
        if layout.optimizer == "sgd":
            kind: Any = torch.optim.SGD(others or [torch.zeros(1)], momentum=0.5, **options)
        else:
            betas = (0.9, 0.95) if layout.optimizer == "muon" else (0.9, 0.999)
            kind = torch.optim.AdamW(others or [torch.zeros(1)], eps=0.01, betas=betas, **options)
        yield kind, []
        parts = []
        for name, p in trained.items():
            if is_muon[name]:
                for index in range(len(p)) if p.dim() > 2 else [slice(None)]:
                    parts.append((torch.nn.Parameter(p.detach()[index]), p, index))
        if parts:
            yield torch.optim.Muon([part for part, *_ in parts], momentum=0.95, **options), parts


def _loss(layout: Layout, w: Weights, data: Batch, step: int, has_auxiliary_loss: bool) -> torch.Tensor:
    ids, documents, mask = data["input_ids"], data["documents"], data["mask"]
    tokens = ids.shape[1]
    x = w["embedding.tokens"][ids] + w["embedding.places"][:tokens]
    order = [*range(len(layout.policies)), *[0] * int(layout.shared)]
    allowed = (documents[:, :, None] == documents[:, None]) & (mask[:, :, None] == mask[:, None])
    if layout.causal:
        allowed = allowed.tril()
    if layout.window is not None:
        allowed = allowed & ~torch.ones(tokens, tokens, dtype=torch.bool).tril(-layout.window)
    logits = []
    for place, number in enumerate(order):
        for before, read in layout.reads:
            if before == place:
                x = x + 0.3 * F.linear(x, w[f"layers.{read}.norm.weight"])
        if is_skipped(layout, step, place):
            continue
        prefix = f"layers.{number}."
        own = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        normed = torch.tanh(x * 0.5) @ own["norm.weight"].T
        q, k, v = (split(F.linear(normed, own[f"{n}.weight"], own[f"{n}.bias"])) for n in "qkv")
        k, v = (part.repeat_interleave(HEADS // layout.kv_heads, 1) for part in (k, v))
        scores = q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5
        mixed = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1) @ v
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), own["o.weight"], own["o.bias"])
        if layout.mixture:
            y, found = _mixture(layout, torch.tanh(x).flatten(0, 1), own)
            x = x + y.view_as(x)
            logits.append(found)
        else:
            hidden = torch.tanh(F.linear(x, own["up.weight"], own["up.bias"]))
            x = x + F.linear(hidden, own["down.weight"], own["down.bias"])
    head = w["embedding.tokens" if layout.tied else "head.weight"]
    smoothing = SMOOTHING * layout.ignored
    loss = F.cross_entropy((x @ head.T).flatten(0, 1), data["labels"].flatten(), label_smoothing=smoothing)
    if has_auxiliary_loss:
        every = torch.cat([found[mask.flatten() > 0] for found in logits])
        shares = torch.zeros_like(every).scatter_(-1, every.topk(TOP_K).indices, 1).mean(0)
        loss = loss + 0.1 * EXPERTS * (shares * every.softmax(-1).mean(0)).sum()
        loss = loss + 0.01 * torch.logsumexp(every, -1).square().mean()
    return loss


def _mixture(layout: Layout, x: torch.Tensor, own: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x @ own["moe.router.weight"].T
    scores = logits.softmax(-1) if layout.moe["scoring"] == "softmax" else logits.sigmoid()
    factors, index = scores.topk(TOP_K, dim=-1)
    factors = factors / factors.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = (x @ own["moe.experts.gate_up"][expert].T).chunk(2, dim=-1)
        of_all = (F.silu(gate) * up) @ own["moe.experts.down"][expert].T
        y = y + of_all * (factors * (index == expert)).sum(-1, keepdim=True)
    if layout.moe["shared_hidden_dim"]:
        gate, up = F.linear(x, own["moe.shared_gate_up.weight"]).chunk(2, dim=-1)
        y = y + F.linear(F.silu(gate) * up, own["moe.shared_down.weight"])
    return y, logits
