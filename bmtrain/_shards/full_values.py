"""Conversions between tensors that are sharded like a parameter and full tensors."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from ..global_var import context
from .at_rest import show, show_together
from .meta import make_shard
from .sharding import ShardSpec, merge_slices


def _is_sharded(param: torch.Tensor) -> TypeGuard[Any]:
    return hasattr(param, "_original_shape")


def whole_shape(tensor: torch.Tensor) -> torch.Size:
    """Shape of the full value (slices merged); the shape of a tensor that is not sharded."""
    return tensor._tp_original_shape if _is_sharded(tensor) else tensor.shape


def copy_of_part(data: torch.Tensor, slices: str | None) -> torch.Tensor:
    """Returns a copy of this rank's shard of ``data``, on the run device; ``slices`` as of `Context.zero_group`."""
    ctx = context()
    part = ShardSpec(data.shape, ctx.zero_group(slices)).slice_of(data.detach().reshape(-1))
    with torch.inference_mode(False):  # so that a parameter built in inference mode can be trained
        return torch.empty(part.numel(), dtype=data.dtype, device=ctx.device).copy_(part)


def gather_flat(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Gathers a tensor that is sharded like ``param``.

    Args:
        param: a distributed parameter (any other tensor: ``local`` is returned flattened).
        local: 1-D, one element for each element of this rank's shard; any dtype, host or run device.

    Returns:
        The full 1-D tensor in the parameter's element order, slices merged, on ``local``'s device.
        Collective.
    """
    if not _is_sharded(param):
        return local.reshape(-1)
    device = local.device
    flat = param._spec.gather(local.to(context().device), param._label)
    if param._tp_split_dim >= 0:
        slices = flat.view(param._original_shape)
        flat = merge_slices(slices, param._tp_split_dim, param._slice_group).reshape(-1)
    result: torch.Tensor = flat.to(device)
    return result


def shard_of(param: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a full tensor (slices merged): 1-D, on ``full``'s device. Local.

    Raises:
        ValueError: if the number of elements is not the parameter's.
    """
    if not _is_sharded(param):
        return full.reshape(-1)
    expected = param._tp_original_shape
    if full.numel() != expected.numel():
        raise ValueError(
            f"full: expected {expected.numel()} elements for shape {tuple(expected)}, got {full.numel()}"
        )
    if param._tp_split_dim >= 0:
        group = param._slice_group
        full = full.reshape(expected).chunk(group.size, dim=param._tp_split_dim)[group.rank]
    part: torch.Tensor = param._spec.slice_of(full.reshape(-1))
    return part


@torch.no_grad()
def full_value(param: torch.Tensor) -> torch.Tensor:
    """Returns the full value (slices merged), detached, on the run device. Collective."""
    if not _is_sharded(param):
        return param.detach()
    param.require_data()
    show_together(param)
    own = param._own_part().detach().to(context().device)
    return gather_flat(param, own).view(param._tp_original_shape)


@torch.no_grad()
def load_full_value(param: torch.Tensor, full: torch.Tensor) -> None:
    """Copies this rank's part of ``full`` into the parameter, converting the dtype. Local.

    Raises:
        ValueError: if the shape is not the parameter's full shape.
    """
    if not _is_sharded(param):
        param.copy_(full)
        return
    if full.shape != param._tp_original_shape:
        raise ValueError(f"full: expected shape {tuple(param._tp_original_shape)}, got {tuple(full.shape)}")
    make_shard(param)
    show(param)
    param.copy_(shard_of(param, full))
    param._given = 0
    param._unversioned_writes += 1
