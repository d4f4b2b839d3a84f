"""State dicts of sharded modules: full tensors go out, full tensors come in, whatever lies between.

The same two functions serve :class:`bmtrain.DistributedModule` (as overrides) and the plain modules inside a Block (as
state-dict hooks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..global_var import config
from ..parameter import DistributedParameter, full_value, shard_of

__all__ = ["give_full_values", "install_hooks", "take_local_parts"]

_HOOKED = "_bmtrain_state_dict_hooks"


def give_full_values(module: torch.nn.Module, destination: dict[str, Any], prefix: str) -> None:
    """Replaces the shards of the module's own parameters in ``destination`` by full tensors. Collective."""
    for name, param in module._parameters.items():
        if isinstance(param, DistributedParameter):
            destination[prefix + name] = _for_saving(full_value(param))
    for name, buffer in module._buffers.items():
        if buffer is not None and prefix + name in destination:
            destination[prefix + name] = _for_saving(buffer.detach())


def take_local_parts(
    module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, error_msgs: list[str]
) -> dict[str, Any]:
    """A copy of ``state_dict`` in which the module's own sharded parameters stand as this rank's parts.

    A tensor of the wrong shape is reported in ``error_msgs`` and leaves the parameter as it is.
    """
    state_dict = dict(state_dict)
    for name, param in module._parameters.items():
        key = prefix + name
        if not isinstance(param, DistributedParameter) or key not in state_dict:
            continue
        value = state_dict[key]
        if tuple(value.shape) != tuple(param._tp_original_shape):
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {tuple(value.shape)} from checkpoint, the shape "
                f"in current model is {tuple(param._tp_original_shape)}."
            )
            state_dict[key] = param.detach()
            continue
        full = value if isinstance(value, torch.Tensor) else value.broadcast()
        state_dict[key] = shard_of(param, full.detach())
        param._load_count += 1
    return state_dict


def install_hooks(module: torch.nn.Module) -> None:
    """Makes a plain module that holds distributed parameters save and load full tensors."""
    if _HOOKED in module.__dict__ or not any(
        isinstance(p, DistributedParameter) for p in module._parameters.values()
    ):
        return
    module.__dict__[_HOOKED] = True
    module.register_state_dict_post_hook(_after_save)
    module.register_load_state_dict_pre_hook(_before_load)


def _after_save(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    give_full_values(module, state_dict, prefix)


def _before_load(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    state_dict.update(take_local_parts(module, state_dict, prefix, error_msgs))


def _for_saving(value: torch.Tensor) -> torch.Tensor:
    return value.cpu() if config["save_param_to_cpu"] else value
