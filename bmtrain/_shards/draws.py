"""Random fills of shards, which are parts of one draw, refusal of their matrix products, warning of positions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from sys import _getframe
from typing import Any

import torch

from .block_ref import multiplied_from_left
from .foreign import warn_of_positions, warn_script
from .full_values import load_full_value

RANDOM = (
    *("normal_", "uniform_", "bernoulli_", "exponential_"),
    *("cauchy_", "log_normal_", "geometric_", "random_"),
)


def drawing_whole(name: str) -> Callable[..., torch.Tensor]:
    """Returns the tensor's method ``name`` for distributed parameters."""
    plain: Callable[..., torch.Tensor] = getattr(torch.Tensor, name)

    @functools.wraps(plain)
    def draw(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.is_meta or self._is_full() or (self.requires_grad and torch.is_grad_enabled()):
            return plain(self, *args, **kwargs)
        load_full_value(self, plain(self.new_empty(self._tp_original_shape), *args, **kwargs))
        drawn: torch.Tensor = self
        return drawn

    return draw


#: Operations of matrices, of which torch makes others for a shard, which is flat.
OF_MATRICES = ("__matmul__", "matmul", "t", "transpose")


def of_matrices(name: str) -> Callable[..., torch.Tensor]:
    """Returns the tensor's method ``name`` for distributed parameters and their data, which refuses shards."""
    plain: Callable[..., torch.Tensor] = getattr(torch.Tensor, name)

    @functools.wraps(plain)
    def operate(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        refuse_shard(self, name.strip("_"))
        return plain(self, *args, **kwargs)

    return operate


def transposed(self: Any) -> torch.Tensor:
    """The tensor's ``T``, for the same."""
    refuse_shard(self, "T")
    turned: torch.Tensor = torch.Tensor.T.__get__(self)  # type: ignore[attr-defined]
    return turned


def refuse_shard(tensor: Any, operation: str) -> None:
    param = tensor
    if isinstance(tensor, ShardData):
        param = tensor.__dict__.get("_param")
        if not tensor._is_still(param):
            return
    if tensor.dim() < len(param._original_shape):
        message = (
            f"{operation} of a parameter: expected a matrix of shape {tuple(param._original_shape)}, got this rank's "
            f"shard of {tensor.numel()} elements, flat; compute with the parameter's gather(), in the forward of its "
            "Block or, without gradients, in `with bmtrain.whole(module, write=True):`"
        )
        if param is tensor or param._spec.group.size > 1:
            raise RuntimeError(message)
        warn_script(_getframe(2), "product", message)


#: Operations that take positions, of which a shard has others than the parameter.
INDEXING = ("__getitem__", "__setitem__")
#: Operations along a dimension, of which a shard has another one; `torch.nn.functional.normalize` calls `norm`.
ALONG = (
    *("norm", "sum", "mean", "std", "var", "amax", "amin", "max", "min", "argmax", "argmin"),
    *("softmax", "log_softmax", "logsumexp", "cumsum", "median", "sort", "flip", "roll"),
)


def by_position(name: str) -> Callable[..., Any]:
    """Returns the tensor's method ``name`` for the same, which warns a script that indexes a shard by positions."""
    plain: Callable[..., Any] = getattr(torch.Tensor, name)

    @functools.wraps(plain)
    def index(self: Any, key: Any, *value: Any) -> Any:
        if any(map(_is_position, key if isinstance(key, tuple) else (key,))):
            _warn_of_shard("index", "an index", self)
        return plain(self, key, *value)

    return index


def along_dimension(name: str) -> Callable[..., Any]:
    """Returns the tensor's method ``name`` for the same, which warns a script that names a dimension of a shard."""
    plain: Callable[..., Any] = getattr(torch.Tensor, name)
    place = {"norm": 1, "roll": 1}.get(name, 0)

    @functools.wraps(plain)
    def operate(self: Any, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else None))
        if isinstance(dim, (int, tuple, list)) and not isinstance(dim, bool):
            _warn_of_shard("along", f"{name}() along a dimension", self)
        return plain(self, *args, **kwargs)

    return operate


def _warn_of_shard(key: str, what: str, tensor: Any) -> None:
    """Warns the script that uses ``what`` on a parameter or its data, if these are a shard."""
    param: Any = tensor.__dict__.get("_param") if isinstance(tensor, ShardData) else tensor
    is_shard = tensor._is_still(param) if isinstance(tensor, ShardData) else not tensor._is_full()
    if is_shard and not tensor.is_meta and tensor.shape != param._original_shape:
        warn_of_positions(key, what, tuple(param._original_shape), _getframe(2))


def _is_position(key: Any) -> bool:
    """Whether an index takes some elements by where they are; a mask takes them by what they are."""
    if isinstance(key, list):
        return any(map(_is_position, key))
    if isinstance(key, bool) or str(getattr(key, "dtype", "")) in ("bool", "torch.bool"):
        return False
    return not (key is None or key is Ellipsis or (isinstance(key, slice) and key == slice(None)))


class Alias(torch.Tensor):
    """A tensor whose class is its own: results of operations, copies and pickles are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def detach(self) -> torch.Tensor:
        """Returns a detached tensor of the same class, without which ``torch.nn.Parameter(alias)`` raises."""
        value = super().detach()
        value.__class__ = type(self)
        return value

    def _plain(self) -> torch.Tensor:
        plain = self.as_subclass(torch.Tensor)
        if isinstance(self, torch.nn.Parameter):  # a parameter made from an alias
            return torch.nn.Parameter(plain.detach(), self.requires_grad)
        return plain

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self._plain(), memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)


class ShardData(Alias):
    """The ``.data`` of a parameter that is a shard, for random fills of it."""

    _refuse_shard = refuse_shard

    @classmethod
    def of(cls, param: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        """Makes ``data`` one of ``param``."""
        data.__class__ = cls
        data.__dict__["_param"] = param
        return data

    def _is_still(self, param: Any) -> bool:
        return param is not None and self.shape == param.shape and self.data_ptr() == param.data_ptr()


def _drawing_into(name: str) -> Callable[..., torch.Tensor]:
    plain: Callable[..., torch.Tensor] = getattr(torch.Tensor, name)

    def draw(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        param = self.__dict__.get("_param")
        if not self._is_still(param):
            return plain(self, *args, **kwargs)
        with torch.no_grad():
            getattr(param, name)(*args, **kwargs)
        drawn: torch.Tensor = self
        return drawn

    return draw


def adapt_methods(kind: Any, drawing: Callable[[str], Callable[..., torch.Tensor]]) -> None:
    """Gives a class of shards its methods; ``drawing`` makes the drawing ones."""
    families = {RANDOM: drawing, OF_MATRICES: of_matrices, INDEXING: by_position, ALONG: along_dimension}
    for names, adapted in families.items():
        for name in names:
            setattr(kind, name, adapted(name))
    kind.T = property(transposed)
    kind.__rmatmul__ = multiplied_from_left


adapt_methods(ShardData, _drawing_into)
