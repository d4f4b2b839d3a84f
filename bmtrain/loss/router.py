"""Losses of routers of mixtures of experts: means over the tokens of all ranks."""

from __future__ import annotations

import torch

from .._base.arguments import require_integer, require_tensor
from .._engine.tokens import total_over_batches
from ..global_var import num_losses

__all__ = ["load_balancing_loss", "router_z_loss"]


def load_balancing_loss(
    router_logits: torch.Tensor, top_k: int, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The load-balancing loss of Switch Transformers, of all ranks' tokens.

    ``num_experts * sum_e f_e * p_e``, where ``f_e`` is the share of the tokens that have expert ``e`` among their
    ``top_k``, and ``p_e`` the mean of its softmax (W. Fedus et al., Switch Transformers, 2021, equation 4, for any
    ``top_k``). Perfect balance gives ``top_k``. The mean of the ranks' results, which
    :class:`bmtrain.optim.OptimManager` trains on, is the loss of one process that has all tokens. Collective over all
    ranks.

    Args:
        router_logits: ``(tokens, num_experts)``, as :class:`bmtrain.nn.MoE` returns; of several layers, concatenated.
        top_k: experts of a token.
        mask: ``(tokens,)``, 0 where a token (of padding) does not count; None: all count.

    Returns:
        0-dim, fp32.

    Raises:
        TypeError, ValueError: naming an argument of another kind or shape.
        RuntimeError: within :func:`bmtrain.virtual_shards`, whose tokens are not there at once.

    Example:
        >>> balanced = bmtrain.loss.load_balancing_loss(torch.zeros(6, 3), top_k=3)
        >>> round(balanced.item(), 4)
        3.0
    """
    _check_logits(router_logits)
    if require_integer("top_k", top_k, 1) > router_logits.shape[-1]:
        raise ValueError(f"top_k: expected at most {router_logits.shape[-1]} experts, got {top_k}")
    logits, weight = _counted(router_logits, mask)
    probabilities = logits.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1)
    counts = torch.cat([(chosen * weight).sum(0), weight.sum().view(1)])
    totals = total_over_batches(counts, "load_balancing_loss")
    frequencies, share = totals[:-1] / totals[-1], num_losses() / totals[-1]
    own = (probabilities * weight).sum(0)
    return router_logits.shape[-1] * (frequencies * share).float() @ own


def router_z_loss(router_logits: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """The mean of ``logsumexp(logits) ** 2`` over all ranks' tokens, which keeps a router's logits small.

    From B. Zoph et al., ST-MoE, 2022, equation 5. The mean of the ranks' results is the mean over all tokens.
    Collective over all ranks.

    Args:
        router_logits: ``(tokens, num_experts)``.
        mask: ``(tokens,)``, 0 where a token does not count; None: all count.

    Returns:
        0-dim, fp32.

    Raises:
        TypeError, ValueError: naming an argument of another kind or shape.
        RuntimeError: within :func:`bmtrain.virtual_shards`, whose tokens are not there at once.

    Example:
        >>> round(bmtrain.loss.router_z_loss(torch.zeros(5, 8)).item(), 4)  # the square of log(8)
        4.3241
    """
    _check_logits(router_logits)
    logits, weight = _counted(router_logits, mask)
    total = total_over_batches(weight.sum(), "router_z_loss")
    squares = torch.logsumexp(logits, dim=-1, keepdim=True).square()
    return (squares * weight).sum() * (num_losses() / total).float()


def _check_logits(router_logits: torch.Tensor) -> None:
    require_tensor("router_logits", router_logits)
    if router_logits.dim() != 2 or not router_logits.is_floating_point():
        raise ValueError(
            f"router_logits: expected (tokens, num_experts) of floats, got shape {tuple(router_logits.shape)} of "
            f"{router_logits.dtype}"
        )


def _counted(router_logits: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits in fp32, and the weights of the tokens; the logits of a token without weight may be NaN."""
    logits = router_logits.float()
    if mask is None:
        return logits, torch.ones(len(logits), 1, device=logits.device)
    require_tensor("mask", mask)
    if mask.numel() != len(logits):
        raise ValueError(f"mask: expected {len(logits)} tokens, got shape {tuple(mask.shape)}")
    weight = mask.reshape(-1, 1).to(logits.device, torch.float32)
    return torch.where(weight == 0, 0, logits), weight
