"""Sharding of the model that a trainer was given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .._engine.engine import current_engine
from .._engine.policy import BlockPolicy, Recompute
from .._model.block_build import default_policy
from ..distributed import broadcast
from ..global_var import config, context
from ..layer import DistributedModule
from ..optim._grad_stats import parameters_of
from ..optim._state import load_optimizer_state
from ..parameter import DistributedParameter
from ..wrapper import BMTrainModelWrapper

__all__ = ["plain_tensors", "shard_model", "step_with_whole_parameters"]


@contextmanager
def step_with_whole_parameters() -> Iterator[None]:
    """Parameters of Blocks read as full tensors in the code of a trainer's step too, not in forwards alone."""
    reads = current_engine(context()).reads
    outer, reads.in_step = reads.in_step, True
    try:
        yield
    finally:
        reads.in_step = outer


def plain_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers of modules that are not wrapped, and parameters put into wrapped ones since."""
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tensors: list[torch.Tensor] = [*module.parameters(recurse=False)]
        if not isinstance(module, DistributedModule):
            tensors += module.buffers(recurse=False)
        elif not hasattr(type(module), "_old_class"):  # written for shards, its plain parameters too
            continue
        found |= {id(t): t for t in tensors if not isinstance(t, DistributedParameter)}
    return list(found.values())


def shard_model(
    model: torch.nn.Module, optimizers: Iterable[Any] = (), *, recompute: Recompute = Recompute.OFF
) -> None:
    """Cuts the model into shards, with the values of rank 0; one that has shards stays as it is. Collective.

    Without a policy of the script activations are kept, as in the plain trainers; recomputation inside the layers
    works. Optimizers that were made of its parameters get the shards in their places, and their state is cut likewise.
    """
    if config["sp_size"] > 1:
        raise NotImplementedError(
            f"sp_size {config['sp_size']}: expected 1 with a trainer, which knows no ranks that share a batch; write "
            "the loop with bmtrain.shard_sequence()"
        )
    with torch.no_grad():
        for tensor in plain_tensors(model):
            if not tensor.is_meta:
                value = broadcast(tensor.detach().clone(), 0)
                if not torch.equal(value, tensor):
                    # An expanded buffer, such as a mask, is written once where its elements share memory.
                    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
                    tensor[once].copy_(value[once])
    plain = {id(p): name for name, p in model.named_parameters() if not isinstance(p, DistributedParameter)}
    users = [made for made in optimizers if any(id(p) in plain for p in parameters_of(made.param_groups))]
    states = [made.state_dict() for made in users]
    kept = BlockPolicy(level=context().zero_level, recompute=recompute)
    with default_policy(current_engine(context()).default_policy or kept):
        BMTrainModelWrapper(model)
    shards = dict(model.named_parameters())
    for made, state in zip(users, states, strict=True):
        for group in made.param_groups:
            group["params"] = [shards[plain[id(p)]] if id(p) in plain else p for p in group["params"]]
        if state["state"]:
            made.state.clear()
            load_optimizer_state(made, {**state, "is_whole": True}, 1.0)
