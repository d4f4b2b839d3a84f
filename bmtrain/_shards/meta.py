"""Parameters on the meta device, without values until they are initialised or loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from .._C import materialize
from ..global_var import context

if TYPE_CHECKING:
    from .sharded import Sharded


def make_shard(param: Sharded) -> None:
    """Allocates the shard (zeros) of a parameter on the meta device, in its Block's storage if it has one. Local.

    The parameter stays the same object, which optimizers may hold. A parameter that has its shard is unchanged.
    """
    if not param.is_meta:
        return
    block = param._block() if param._block is not None else None
    place = None if block is None else block._place_of(param)
    if place is not None:
        place[0].make_shard(place[1])
    else:
        local = torch.zeros(param._spec.local_part[1], dtype=param.dtype, device=context().device)
        materialize(param, local)  # type: ignore[arg-type]


def make_moved_shards(module: torch.nn.Module, function: Any) -> None:
    """Allocates shards of the parameters below ``module`` that ``function`` moves from the meta device. Local.

    ``function`` is the argument of ``Module._apply``: the one of ``to_empty()`` allocates, the one of ``half()``
    does not. One that moves parameters with values to the meta device raises ValueError.
    """
    goes_to_meta: dict[torch.device, bool] = {}  # by device of the parameters
    for param in module.parameters():
        if not hasattr(param, "_original_shape"):
            continue
        if param.device not in goes_to_meta:
            goes_to_meta[param.device] = function(
                torch.empty(0, dtype=param.dtype, device=param.device)
            ).is_meta
        if goes_to_meta[param.device] and not param.is_meta:
            raise ValueError(
                "device: expected one with memory for a model that is sharded already, got meta, on which parameter of "
                f"shape {tuple(param._original_shape)} and all others would lose their values; to have a model "
                'without values, build it under torch.device("meta")'
            )
        if param.is_meta and not goes_to_meta[param.device]:
            make_shard(param)  # type: ignore[arg-type]


def no_values(name: str, shape: torch.Size) -> str:
    """Returns the error for a use of a parameter without values."""
    return (
        f"parameter {name + ' ' if name else ''}of shape {tuple(shape)} is on the meta device and has no values yet; "
        "initialise it (bmtrain.init_parameters, given an init_method) or load it (bmtrain.load, load_state_dict) first"
    )


class Placeholder(torch.Tensor):
    """Result of reading a parameter without values, for modules that inspect or write parameters in their constructor.

    Operations that combine it (or tensors computed from it) with tensors that have values raise an error.
    """

    _parameter: Sharded
    _label: str

    @classmethod
    def of(cls, param: Sharded, label: str, value: torch.Tensor) -> Placeholder:
        """Returns ``value``, computed from ``param``, as a placeholder; ``label`` names the parameter."""
        made = value.as_subclass(cls)
        made._parameter, made._label = param, label
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            known = next(tensor for tensor in tensors if isinstance(tensor, cls))
            if not (_writes(func.__name__) or all(tensor.is_meta for tensor in tensors)):
                known._parameter.require_data(known._label)
            result = func(*args, **(kwargs or {}))
            if type(result) is torch.Tensor and result.is_meta:
                return cls.of(known._parameter, known._label, result)
            return result


def _writes(name: str) -> bool:
    """Whether a tensor method writes in place, or selects a part to write to."""
    return name in ("__getitem__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
