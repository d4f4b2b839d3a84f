"""Numbers of tokens, summed over the batches of a step."""

from __future__ import annotations

import torch

from .._C import ReduceOp
from .._ranks.context import Group
from ..global_var import context
from .engine import current_engine


def total_over_batches(numbers: torch.Tensor, needed_by: str) -> torch.Tensor:
    """Returns the sum over all ranks divided by `tp_size`, in fp64 on the run device. Collective.

    So a loss is right whether the tensor-parallel ranks that share it all have its tokens, or a part of them each.

    Raises:
        RuntimeError: within :func:`bmtrain.virtual_shards`: one micro-step has some of the step's tokens, how many
            depends on the number of ranks; or in a pipeline, whose stages do not make this call together.
    """
    ctx = context(needed_by)
    if ctx.engine.is_summing_virtual_shards:
        raise RuntimeError(
            f"{needed_by} needs the tokens of all virtual shards at once; use it without virtual_shards()"
        )
    return _total(numbers, ctx.world, needed_by) / ctx.topology.tp_size


def tokens_of_a_loss(numbers: torch.Tensor, needed_by: str) -> torch.Tensor:
    """Returns the divisor with which a rank's sum over its tokens is its share of a mean. Collective.

    The mean of the ranks' shares is over the tokens of the step; within :func:`bmtrain.virtual_shards`, over the tokens
    of the virtual shard, which sequence and tensor-parallel ranks have parts of.
    """
    ctx = context(needed_by)
    if ctx.engine.is_summing_virtual_shards:
        for group in (ctx.groups["sp"], ctx.groups["tp"]):
            numbers = _total(numbers, group, needed_by) / group.size
        return numbers
    return total_over_batches(numbers, needed_by) / ctx.groups["tp_zero"].size


def _total(numbers: torch.Tensor, group: Group, label: str) -> torch.Tensor:
    if current_engine(context(label)).rows is not None:
        raise RuntimeError(
            f"{label} needs the tokens of all micro-batches at once, and was called in a pipeline's layer or head: "
            "give the number of tokens, num_items_in_batch of shard_sequence(), to the head with the labels"
        )
    # On a CPU tensor of a GPU run, too: batches may be in host memory.
    total = numbers.detach().to(context(label).device, torch.float64, copy=True).reshape(-1)
    group.comm.all_reduce(total, ReduceOp.SUM, label).wait()
    return total.view(numbers.shape)
