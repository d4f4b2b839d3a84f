"""A module of few experts, as those of transformers, which the wrapper divides over ranks."""

from __future__ import annotations

import torch


class HitExperts(torch.nn.Module):
    """Computes experts that have tokens and no others.

    Args:
        weight: a matrix for each expert.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.num_experts = len(weight)
        self.weight = torch.nn.Parameter(weight)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            rows = hidden_states[token] @ self.weight[expert] * top_k_weights[token, place, None]
            result = result.index_add(0, token, rows)
        return result
