"""Sharding of the model that a trainer was given."""

from __future__ import annotations

import torch

from .._engine.default_policy import default_policy
from .._engine.policy import BlockPolicy
from ..distributed import broadcast
from ..global_var import config
from ..parameter import DistributedParameter
from ..wrapper import BMTrainModelWrapper

__all__ = ["shard_model"]


def shard_model(model: torch.nn.Module) -> None:
    """Cuts the model into shards, with the values of rank 0; one that has shards stays as it is. Collective.

    Activations are kept, as in the plain trainers; recomputation inside the layers works.
    """
    if config["sp_size"] > 1:
        raise NotImplementedError(
            f"sp_size {config['sp_size']}: expected 1 with a trainer, which knows no ranks that share a batch; write "
            "the loop with bmtrain.shard_sequence()"
        )
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not isinstance(tensor, DistributedParameter) and not tensor.is_meta:
                tensor.copy_(broadcast(tensor.detach().clone(), 0))
    with default_policy(BlockPolicy(recompute="off")):
        BMTrainModelWrapper(model)
