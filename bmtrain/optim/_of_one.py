"""Full optimizer state of one parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._ranks.agree import largest
from ..global_var import context
from ..parameter import DistributedParameter

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int64)
_NOTHING, _OTHER = -1.0, float(len(_DTYPES))


@torch.no_grad()
def gather_state(optimizer: torch.optim.Optimizer, param: Tensor, name: str) -> Tensor:
    """Returns an array of the optimizer's state, such as ``"exp_avg"``, for one full parameter. Collective.

    Args:
        optimizer: one of this library or of ``torch.optim``.
        param: one of its parameters.
        name: its key in ``optimizer.state[param]``. The fp32 master of a 16-bit parameter is ``"_param_fp32"``.

    Returns:
        A new tensor of the shape of ``param.gather()``, on the run device.

    Raises:
        KeyError: no rank has such a state, as before the first step.
        ValueError: it is not an array with an element for each of the parameter.

    Example:
        >>> layer = bmtrain.nn.Linear(2, 3)
        >>> optimizer = bmtrain.optim.AdamOptimizer(layer.parameters())
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> bmtrain.optim.gather_state(optimizer, next(layer.parameters()), "exp_avg").shape
        torch.Size([3, 2])
    """
    own = optimizer.state[param].get(name) if param in optimizer.state else None
    dtype = _agreed_dtype(param, name, own)
    if not isinstance(param, DistributedParameter):
        assert own is not None
        copied: Tensor = own.clone()
        return copied
    device = context().device
    local = torch.zeros(param._spec.local_part[1], dtype=dtype, device=device) if own is None else own
    return param._spec.gather(local.to(device).reshape(-1), param._label).view(param.full_shape)


@torch.no_grad()
def load_state(optimizer: torch.optim.Optimizer, param: Tensor, name: str, full: Tensor) -> None:
    """Copies this rank's part of ``full`` into the optimizer's state. Collective: all ranks pass the same tensor.

    Args:
        optimizer: as for :func:`gather_state`, and so are ``param`` and ``name``.
        full: of the shape that :func:`gather_state` returns; any device and dtype.

    Raises:
        KeyError, ValueError: as :func:`gather_state`; or ``full`` has another shape.
    """
    own = optimizer.state[param].get(name) if param in optimizer.state else None
    shape = param.full_shape if isinstance(param, DistributedParameter) else param.shape
    if full.shape != shape:
        raise ValueError(f"full: expected shape {tuple(shape)}, got {tuple(full.shape)}")
    _agreed_dtype(param, name, own)
    if own is not None:
        flat = full.reshape(-1)
        own.copy_(
            (param._spec.slice_of(flat) if isinstance(param, DistributedParameter) else flat).view(own.shape)
        )


def _agreed_dtype(param: Tensor, name: str, own: Any) -> torch.dtype:
    """Returns the dtype of a state that a rank lacks if it holds no element of the parameter.

    Raises:
        KeyError, ValueError: on all ranks, as :func:`gather_state`.
    """
    kind = _NOTHING if own is None else _OTHER
    if isinstance(own, Tensor) and own.numel() == param.numel() and own.dtype in _DTYPES:
        kind = float(_DTYPES.index(own.dtype))
    if isinstance(param, DistributedParameter):
        kind = largest([kind], "optimizer state", context("gather_state").world.comm)[0]
    if kind == _NOTHING:
        raise KeyError(
            f"name: the optimizer has no state {name!r} of this parameter; it is made by the first step"
        )
    if kind == _OTHER:
        raise ValueError(
            f"name: expected an array with an element for each of the parameter, such as 'exp_avg', got {name!r}: "
            "read it from optimizer.state[param]"
        )
    return _DTYPES[int(kind)]
