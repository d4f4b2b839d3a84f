"""Numbers of tokens, summed over the batches of a step."""

from __future__ import annotations

import torch

from .._C import ReduceOp
from ..global_var import context


def total_over_batches(numbers: torch.Tensor, needed_by: str) -> torch.Tensor:
    """Returns the sum over all ranks divided by `tp_size`, in fp64 on the run device. Collective.

    So a loss is right whether the tensor-parallel ranks that share it all have its tokens, or a part of them each.

    Raises:
        RuntimeError: within :func:`bmtrain.virtual_shards`: one micro-step has some of the step's tokens, how many
            depends on the number of ranks.
    """
    ctx = context(needed_by)
    if ctx.engine.is_summing_virtual_shards:
        raise RuntimeError(
            f"{needed_by} needs the tokens of all virtual shards at once; use it without virtual_shards()"
        )
    # On a CPU tensor of a GPU run, too: batches may be in host memory.
    total = numbers.detach().to(ctx.device, torch.float64, copy=True).reshape(-1)
    ctx.world.comm.all_reduce(total, ReduceOp.SUM, needed_by).wait()
    return total.view(numbers.shape) / ctx.topology.tp_size
