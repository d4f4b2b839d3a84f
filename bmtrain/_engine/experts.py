"""Exchange of tokens with experts, each of which runs on one rank of an expert-parallel group.

[Note: Order of tokens at an expert]
An expert gets its tokens in the order of the ranks they come from, and of each rank in the order of its batch: the
order of one process that computes the batches of all ranks, one after the other. So a gradient sums the same tokens in
the same order, whatever the number of ranks that hold experts. A token with several experts sums their results in the
order of its own list of experts.

A rank sends another one exactly the rows that the other's experts get; nothing is padded, and no token is dropped. All
ranks of the group take part in each call, with or without tokens of their own or for their experts.

[Note: Experts in virtual shards]
The ranks of a group compute one virtual shard each, and a shard's gradient must be the same wherever it is computed. So
an expert takes the rows of each rank in a call of its own, with an alias of its parameters, and the gradients of the
aliases are the leaves of the tree, in the order of the shards: see `virtual_sum.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .._C import Communicator, lead_graphs_to
from ..global_var import context
from ..parameter import DistributedParameter
from .copies import source_of
from .dropout import no_random_numbers
from .engine import current_engine

#: Computes one rank's experts. Arguments: ``(n, ...)``, the rows of the first expert, then those of the second and so
#: on; ``(experts,)``, how many rows each has, on the host; the full parameters. Returns ``(n, ...)``, in their order.
RunExperts = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


def run_experts(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    num_experts: int,
    run: RunExperts,
    parameters: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Sends each token to its experts, and adds their results. Collective over the expert-parallel group.

    Args:
        x: ``(tokens, features)``; ranks may have different numbers of tokens, also none.
        top_k_index: ``(tokens, k)``, integers: the experts of each token, ``0 <= index < num_experts``.
        top_k_weights: ``(tokens, k)``, the factor of each result; sums are made in its dtype, or fp32.
        num_experts: of all ranks; a multiple of the ranks, each of which holds as many, one after the other.
        run: computes this rank's experts.
        parameters: of this rank's experts, as read from their module.

    Returns:
        ``(tokens, features of the results)``, in the dtype of ``x``.
    """
    comm = context().groups["ep"].comm
    tokens, k = top_k_index.shape
    expert = top_k_index.reshape(-1)
    order = expert.argsort(stable=True)
    back = order.argsort()
    counts = expert.new_zeros(num_experts).scatter_add_(0, expert, torch.ones_like(expert))
    rows = _Rows.apply(x, order // k, back, k)
    if comm.size == 1:
        results: torch.Tensor = run(rows, counts.cpu(), parameters)
    else:
        by_rank = _gathered(counts, comm)  # (ranks, experts), on the host
        sent = by_rank[comm.rank].view(comm.size, -1).sum(1).tolist()
        here = by_rank.view(comm.size, comm.size, -1)[:, comm.rank]  # (ranks, experts of this one)
        received = here.sum(1).tolist()
        arrived = _Exchange.apply(rows, received, sent, comm)
        run_all = _run_each_source if current_engine(context()).virtual.is_open else _run_together
        with no_random_numbers():
            computed = run_all(arrived, here, run, parameters)
        results = _Exchange.apply(computed, sent, received, comm)
    own: torch.Tensor = _Rows.apply(results, back, order, 1).view(tokens, k, results.shape[-1])
    dtype = torch.promote_types(torch.float32, top_k_weights.dtype)
    return (own * top_k_weights.to(dtype).unsqueeze(-1)).sum(1).to(x.dtype)


def _run_together(
    arrived: torch.Tensor, here: torch.Tensor, run: RunExperts, parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Runs this rank's experts on the rows of all ranks, which are in the order of ``(rank, expert)``, as ``here``."""
    numbers = torch.arange(here.shape[1]).repeat(len(here)).repeat_interleave(here.reshape(-1))
    by_expert = numbers.argsort(stable=True).to(arrived.device)
    from_ranks = by_expert.argsort()
    arrived = _Rows.apply(arrived, by_expert, from_ranks, 1)
    computed = run(arrived, here.sum(0), parameters)
    if torch.is_grad_enabled() and (arrived.requires_grad or _trained(parameters)):
        anchor = arrived if arrived.requires_grad else _a_leaf(computed)
        idle = () if len(arrived) else _trained_with_tokens(arrived, here.shape[1], run, parameters)
        computed = _Connected.apply(computed, anchor, *idle)
    rows: torch.Tensor = _Rows.apply(computed, from_ranks, by_expert, 1)
    return rows


def _trained_with_tokens(
    arrived: torch.Tensor, experts: int, run: RunExperts, parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The parameters that have gradients where experts have tokens: in Blocks all trained ones, elsewhere those in the
    graph of a row of zeros."""
    trained = [parameters[number] for number in _trained(parameters)]
    if all(isinstance(param, DistributedParameter) for param in trained):
        return trained
    aliases = [param.detach().requires_grad_(param.requires_grad) for param in parameters]
    row = arrived.new_zeros((1, *arrived.shape[1:]))
    numbers = torch.tensor([1] + [0] * (experts - 1), device="cpu")
    result = run(row, numbers, aliases)
    in_graph = [param for param, alias in zip(parameters, aliases, strict=True) if lead_graphs_to([alias])]
    return in_graph if result.requires_grad else []


def _run_each_source(
    arrived: torch.Tensor, here: torch.Tensor, run: RunExperts, parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """As `_run_together`, on the rows of one rank after the other. See [Note: Experts in virtual shards]."""
    anchors, aliases = [], [list(parameters) for _ in here]
    if torch.is_grad_enabled() and _trained(parameters):
        anchor, *flat = _ForEachSource.apply(_a_leaf(arrived), len(here), parameters)
        anchors.append(anchor)
        for own, of_source in zip(aliases, _in_parts(flat, len(here)), strict=True):
            for number, alias in zip(_trained(parameters), of_source, strict=True):
                own[number] = alias
    if torch.is_grad_enabled() and arrived.requires_grad:
        anchors.append(arrived)
    parts = arrived.split(here.sum(1).tolist())
    computed = torch.cat([run(*each) for each in zip(parts, here, aliases, strict=True)])
    for anchor in anchors:
        computed = _Connected.apply(computed, anchor)
    return computed


def _in_parts(values: Sequence[Any], number: int) -> list[Sequence[Any]]:
    size = len(values) // number
    return [values[first : first + size] for first in range(0, len(values), size)]


def _trained(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [number for number, param in enumerate(parameters) if param.requires_grad]


def _gathered(counts: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Returns the counts of all ranks, on the host; the one place where the host waits for the device."""
    counts = counts.to(context().device) if comm.backend == "nccl" else counts.cpu()
    by_rank = counts.new_empty((comm.size, len(counts)))
    with current_engine(context()).waiting("experts", "tokens"):
        comm.all_gather(by_rank, counts, "experts.counts").wait()
    return by_rank.cpu()


class _Rows(torch.autograd.Function):
    """``x[index]``, for an index that has each row of ``x`` ``times`` times: the gradient is a sum in a fixed order.

    ``inverse`` has, row by row of ``x``, the places of the copies of that row in the result.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, times: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.times = times
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        rows = grad.index_select(0, inverse)
        if ctx.times > 1:
            rows = rows.view(len(rows) // ctx.times, ctx.times, *rows.shape[1:]).sum(1)
        return rows, None, None, None


class _Connected(torch.autograd.Function):
    """``computed`` as it is, in the graph of ``anchor`` and ``unused``, the parameters of experts without tokens.

    Experts without tokens may return zeros that depend on nothing. Backward sends gradients through the exchanges of
    all ranks, so each rank must have both exchanges in its graph; and a parameter that other ranks use, or experts of
    theirs in the same tensor, has a gradient of zeros, which weight decay and momentum take.
    """

    @staticmethod
    def forward(
        ctx: Any, computed: torch.Tensor, anchor: torch.Tensor, *unused: torch.Tensor
    ) -> torch.Tensor:
        ctx.shapes = [param.shape for param in unused]
        ctx.like = [param.new_zeros(()) for param in unused]
        return computed.view_as(computed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, *map(torch.Tensor.expand, ctx.like, ctx.shapes)


class _ForEachSource(torch.autograd.Function):
    """Aliases of the trained parameters for each source of rows; their gradients go to the virtual shards' sums.

    Returns an anchor, by which backward comes here on all ranks, and the aliases, source by source.
    """

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, number: int, parameters: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.trained = [parameters[index] for index in _trained(parameters)]
        ctx.number = number
        return leaf.detach(), *[param.detach() for _ in range(number) for param in ctx.trained]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor, *gradients: torch.Tensor) -> Any:
        virtual = current_engine(context()).virtual
        for full, *own in zip(ctx.trained, *_in_parts(gradients, ctx.number), strict=True):
            source = source_of(full)  # outside blocks
            virtual.of_experts(full if source is None else source, own)
        return None, None, None


def _a_leaf(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0).requires_grad_()


class _Exchange(torch.autograd.Function):
    """Rows sent to, and received from, each rank of a group; backward sends gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], comm: Communicator
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.comm = received, sent, comm
        return _exchanged(rows, received, sent, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _exchanged(grad, ctx.sent, ctx.received, ctx.comm), None, None, None


def _exchanged(rows: torch.Tensor, received: list[int], sent: list[int], comm: Communicator) -> torch.Tensor:
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    width = rows.shape[1:].numel()
    work = comm.all_to_all_uneven(
        result,
        rows.detach().contiguous(),
        [number * width for number in received],
        [number * width for number in sent],
        "experts.rows",
    )
    with current_engine(context()).waiting("experts", "tokens"):
        work.wait()
    return result
