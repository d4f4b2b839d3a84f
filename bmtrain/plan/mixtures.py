"""Mixtures of experts while a model is described: without values, and without messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._engine.experts import RunExperts
from .._model.divided_experts import DividedExperts, num_experts
from ..nn.moe import Experts

__all__ = ["balanced_experts"]


@contextmanager
def balanced_experts(
    module: torch.nn.Module, note: Callable[[int, int], None]
) -> Iterator[list[torch.nn.Module]]:
    """Has experts compute as many rows as their rank sends: what they get if all experts get as many.

    Args:
        module: a model whose parameters are full.
        note: gets, in each call of experts, their number and the bytes of the rows.

    Returns:
        the modules that hold experts.
    """
    numbers = {
        member: member.num_experts if isinstance(member, Experts) else num_experts(member)
        for member in module.modules()
    }
    found = [member for member, number in numbers.items() if number]

    def before(member: torch.nn.Module, args: Any, kwargs: Any) -> None:
        x, top_k_index = [*args, *kwargs.values()][:2]
        note(numbers[member], x.nbytes * top_k_index.shape[-1])

    with ExitStack() as stack:
        if found:
            stack.enter_context(_GroupsAsOne())
        for member in found:
            hook = member.register_forward_pre_hook(before, with_kwargs=True)
            stack.callback(hook.remove)
            if isinstance(member, (Experts, DividedExperts)):
                vars(member)["_run_experts"] = _run_without_values
                stack.callback(vars(member).pop, "_run_experts")
        yield found


class _GroupsAsOne(TorchDispatchMode):
    """Computes grouped products as one product of all rows, which has the same work and shapes.

    FakeTensorMode knows grouped products in bf16 only, and torch does not count their work.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            return args[0].mm(args[1][0])
        return func(*args, **(kwargs or {}))


def _run_without_values(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    num_experts: int,
    run: RunExperts,
    parameters: Sequence[torch.Tensor],
) -> torch.Tensor:
    """As `run_experts`, with the same products and saved tensors, for rows that stay on their rank."""
    del num_experts
    tokens, k = top_k_index.shape
    rows = x.repeat_interleave(k, 0)
    results = run(rows, torch.zeros(len(parameters[0]), dtype=torch.int64), parameters)
    own = results.view(tokens, k, -1)
    dtype = torch.promote_types(torch.float32, top_k_weights.dtype)
    return (own * top_k_weights.to(dtype).unsqueeze(-1)).sum(1).to(x.dtype)
