"""Experts of other libraries, such as transformers, divided over expert-parallel ranks.

A module of experts is recognised by its call, ``forward(hidden_states, indices, weights)`` with ``(tokens, features)``
and twice ``(tokens, k)``, and by its parameters, each of which has a slice along dim 0 for each of ``num_experts``. A
rank keeps the slices of its own experts, and calls the module's forward with their tokens, one expert each, with
weight 1.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from .._engine.experts import run_experts
from ..global_var import context

_ALL = "_num_experts_of_all_ranks"


def takes_routing(module_class: type[torch.nn.Module]) -> bool:
    """Whether modules of this class are called with hidden states, indices of experts, and their weights."""
    try:
        names = list(inspect.signature(module_class.forward).parameters)[1:]
    except (TypeError, ValueError):
        return False
    return (
        len(names) == 3
        and names[0] == "hidden_states"
        and "ind" in names[1]  # top_k_index, router_indices, selected_indices
        and "weights" in names[2]
    )


def num_experts(module: torch.nn.Module) -> int:
    """The experts of all ranks of which ``module`` holds some or all; 0 for modules of another kind."""
    number, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if type(number) is not int or not takes_routing(type(module)) or not own:
        return 0
    if len(own) != len(list(module.parameters())) or any(p.dim() == 0 or p.shape[0] != number for p in own):
        return 0
    return int(vars(module).get(_ALL, number))


def can_divide(module: torch.nn.Module) -> bool:
    """Whether ``module`` holds experts that are to be divided over several ranks.

    Raises:
        ValueError: they do not divide.
    """
    ctx = context()
    ep_size = ctx.topology.ep_size
    # With virtual shards one rank, too, sums the results of a token in the order that several do.
    number = num_experts(module) if ep_size > 1 or ctx.virtual_shards else 0
    if number % ep_size:
        raise ValueError(
            f"{type(module).__name__}: expected a number of experts that divides by ep_size {ep_size}, got {number}"
        )
    return number > 0


def divide_experts(module: Any) -> None:
    """Makes ``module`` one of this rank's share of experts; its parameters are the caller's to cut."""
    module.__dict__[_ALL] = module.num_experts
    module.num_experts //= context().topology.ep_size


def own_experts(param: torch.Tensor) -> torch.Tensor:
    """Returns the slices of this rank's experts."""
    ep = context().groups["ep"]
    return param.detach().chunk(ep.size)[ep.rank]


class DividedExperts:
    """Base class of converted modules of experts; where one rank holds all of them, the module is called as before."""

    _run_experts = staticmethod(run_experts)

    def forward(
        self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        number = vars(self).get(_ALL)
        run_here = super().forward  # type: ignore[misc]
        if number is None:
            result: torch.Tensor = run_here(hidden_states, index, weights)
            return result

        names = list(self._parameters)  # type: ignore[attr-defined]

        def run_some(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
            computed: torch.Tensor = run_here(rows, experts, torch.ones_like(experts, dtype=rows.dtype))
            return computed

        def run(
            rows: torch.Tensor, numbers: torch.Tensor, parameters: Sequence[torch.Tensor]
        ) -> torch.Tensor:
            own = torch.arange(len(numbers)).repeat_interleave(numbers, output_size=len(rows))
            own = own.to(rows.device).unsqueeze(1)
            vars(self).update(zip(names, parameters, strict=True))  # which come before registered ones
            try:
                if not context().virtual_shards:
                    return run_some(rows, own)
                # One expert at a time: modules that sort rows may take those of an expert in an order that depends on
                # the number of rows.
                sizes = numbers.tolist()
                parts = zip(rows.split(sizes), own.split(sizes), strict=True)
                return torch.cat([rows[:0], *(run_some(*part) for part in parts if len(part[0]))])
            finally:
                for name in names:
                    del vars(self)[name]

        parameters = [getattr(self, name) for name in names]
        return self._run_experts(hidden_states, index, weights, number, run, parameters)
