"""Division of layers over tensor-parallel and expert-parallel ranks, and checks of their arguments."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch

from .._base.arguments import require_dtype, require_integer, require_tensor
from .._base.opaque import opaque
from .._C import ReduceOp
from .._engine.engine import current_engine
from ..global_var import context
from ..parameter import DistributedParameter, ParameterInitializer

#: Layers whose input in training was compared.
_compared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def check_layer(dtype: Any, **sizes: Any) -> None:
    """Raises TypeError or ValueError unless all sizes are integers of 0 or more, and the dtype is one of floats."""
    for name, size in sizes.items():
        require_integer(name, size, 0)
    require_dtype("dtype", dtype)


def check_features(name: str, x: Any, weight: torch.Tensor, width: int) -> None:
    """Raises TypeError or ValueError unless ``x`` has a last dim of ``width`` and a dtype that fits the weight."""
    require_tensor(name, x)
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(f"{name}: expected a last dim of {width}, got shape {tuple(x.shape)}")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name}: expected {weight.dtype} as of weight, got {x.dtype}")


@opaque
def expect_replicas(layer: torch.nn.Module, x: torch.Tensor) -> None:
    """Raises RuntimeError on all tensor-parallel ranks if the layer's first input in training is not the same on them.

    Collective. Some values are compared, and rounding is allowed.
    """
    tp, is_real = context().groups["tp"], type(x) is torch.Tensor and x.numel() > 0
    if tp.size == 1 or not (layer.training and is_real) or layer in _compared:
        return
    _compared.add(layer)
    some = x.detach().flatten()[:: -(-x.numel() // 1024)].float().nan_to_num(0, 0, 0)
    ends = torch.stack([some, -some])
    tp.reduce_comm.all_reduce(ends, ReduceOp.MAX, "tp.compare").wait()
    if (ends.sum(0).max() > 0.01 * ends.abs().max()).item():
        raise RuntimeError(
            f"{type(layer).__name__}: expected the same input on all tensor-parallel ranks, got other values (other "
            "samples, or dropout of ranks that were seeded differently): give them one batch and one seed, or rows of "
            "their own to a layer with gather_input=True"
        )


def _empty(shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    """Allocates a parameter before it is sharded; out of memory raises torch's own class with a remedy."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size() / 2**30
        raise type(error)(
            f"no memory for a parameter of shape {shape}, {size:,.1f} GiB, which is allocated in full before it is "
            'sharded. Build the model with `with torch.device("meta"):`; init_parameters() or loading then allocates '
            "only shards. `python -m bmtrain plan` predicts the memory"
        ) from None


def divided(name: str, size: int) -> int:
    """Returns ``size`` divided by the number of tensor-parallel ranks; ValueError if it does not divide."""
    require_integer(name, size, 0)
    tp_size = context().groups["tp"].size
    if size % tp_size:
        raise ValueError(f"{name}: expected a multiple of tp_size {tp_size}, got {size}")
    return size // tp_size


def tp_parameter(
    shape: tuple[int, ...], split_dim: int, dtype: Any, init: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns a tensor-parallel parameter of which this rank's slice has ``shape``."""
    initializer = ParameterInitializer(init, *args, **kwargs)
    return _uninitialised(shape, dtype, initializer, tp_mode=True, tp_split_dim=split_dim)


def expert_parameter(shape: tuple[int, ...], dtype: Any, init: Any) -> Any:
    """Returns the parameter of this rank's experts, of which ``shape`` is for all ranks; ``init`` gets one expert's."""

    def each(experts: torch.Tensor) -> None:
        for expert in experts:
            init(expert)

    own = (shape[0] // context().groups["ep"].size, *shape[1:])
    return _uninitialised(own, dtype, each, ep_mode=True)


def parameter(shape: tuple[int, ...], dtype: Any, init: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns a parameter of ``shape``, without values until ``init_parameters`` calls ``init``."""
    return _uninitialised(shape, dtype, ParameterInitializer(init, *args, **kwargs))


def _uninitialised(shape: tuple[int, ...], dtype: Any, init: Any, **division: Any) -> DistributedParameter:
    param = DistributedParameter(_empty(shape, dtype), init_method=init, **division)
    if not param.is_meta:
        current_engine(context()).reads.uninitialised.add(param)
    return param
