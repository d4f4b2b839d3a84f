"""A state dict that rank 0 holds and every rank reads, one tensor at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .._base.arguments import require_tensor
from .._ranks.agree import broadcast_json, failing_together
from .._ranks.comm import wire_device
from ..global_var import context
from ..parameter import DistributedParameter, shard_of

#: The element types that state dicts commonly hold. (Others that torch can save are accepted as well.)
DTYPE_LIST: list[torch.dtype] = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]

_LABEL = "state dict"


class DistributedTensorWrapper:
    """A tensor that rank 0 holds. Where torch expects a tensor, its :meth:`broadcast` value is used.

    Args:
        tensor: the tensor, on rank 0; ignored elsewhere.
        shape, dtype: shape and dtype of rank 0's tensor; may be left out on rank 0.
    """

    is_meta = False
    requires_grad = False

    def __init__(
        self,
        tensor: torch.Tensor | None,
        shape: torch.Size | tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if tensor is None and (shape is None or dtype is None):
            raise ValueError(f"shape, dtype: expected both where there is no tensor, got {shape} and {dtype}")
        if tensor is not None:
            require_tensor("tensor", tensor)
        self._tensor = tensor if context().topology.rank == 0 else None
        self.shape = torch.Size(tensor.shape if shape is None else shape)  # type: ignore[union-attr]
        self.dtype: torch.dtype = tensor.dtype if dtype is None else dtype  # type: ignore[union-attr]

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def broadcast(self) -> torch.Tensor:
        """The full tensor, a new one, on the run device of every rank. Collective."""
        current = context()
        comm = current.world.comm
        if self._tensor is None:
            full = torch.empty(self.shape, dtype=self.dtype, device=current.device)
        else:
            full = self._tensor.detach().to(current.device, copy=True).contiguous()
        if comm.size > 1 and full.numel():
            wire = full.to(wire_device(comm))
            comm.broadcast(_bytes(wire), 0, _LABEL).wait()
            if wire is not full:
                full.copy_(wire)
        return full

    def part_of(self, param: DistributedParameter) -> torch.Tensor:
        """This rank's part, in the order and dtype of the parameter's shard; no other rank gets more. Collective."""
        current = context()
        group = param._spec.group
        comm = current.world.comm
        # Tensor-parallel or a pipeline stage: the parts depend on more than the rank.
        if group.size != comm.size:
            return shard_of(param, self.broadcast()).to(param.dtype, copy=True)
        if self._tensor is not None:
            flat = self._tensor.detach().reshape(-1)
            for rank in range(1, comm.size):
                begin, count = param._spec.part(rank)
                if count:
                    part = flat.narrow(0, begin, count).to(wire_device(comm), param.dtype, copy=True)
                    comm.send(_bytes(part), rank, _LABEL).wait()
            return param._spec.slice_of(flat).to(current.device, param.dtype, copy=True)
        mine = torch.empty(param._spec.local_part[1], dtype=param.dtype, device=wire_device(comm))
        if mine.numel():
            comm.recv(_bytes(mine), 0, _LABEL).wait()
        return mine.to(current.device)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.broadcast()[index]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(
            lambda leaf: leaf.broadcast() if isinstance(leaf, DistributedTensorWrapper) else leaf,
            (args, kwargs or {}),
        )
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"DistributedTensorWrapper(shape={tuple(self.shape)}, dtype={self.dtype})"


class DistributedStateDictWrapper(Mapping[str, Any]):
    """Rank 0's state dict, readable on all ranks without a copy of their own. Collective.

    ``load_state_dict`` of any module accepts it.

    Args:
        state_dict: the real one on rank 0; ignored elsewhere.

    Raises:
        TypeError: on every rank, if rank 0's is not a mapping of names to tensors and plain values.

    Example:
        >>> model = bmtrain.nn.Linear(2, 3, bias=False)
        >>> state = {"weight": torch.ones(3, 2)} if bmtrain.rank() == 0 else {}  # torch.load(...) on rank 0
        >>> model.load_state_dict(bmtrain.store.DistributedStateDictWrapper(state))
        <All keys matched successfully>
    """

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        is_source = context("DistributedStateDictWrapper").topology.rank == 0
        entries: list[Any] = []
        metadata: Any = None
        nested: list[torch.Tensor] = []  # inside values that are no tensors themselves
        with failing_together(_LABEL):
            if is_source:
                entries = [(key, _entry(key, value, nested)) for key, value in _items(state_dict)]
                metadata = encode(getattr(state_dict, "_metadata", None), nested)
        entries, metadata, nested_specs = broadcast_json(
            (entries, metadata, [_spec(tensor) for tensor in nested]), label=_LABEL
        )
        extras = [_handle(spec, tensor).broadcast() for spec, tensor in zip_longest(nested_specs, nested)]
        self._values: dict[str, Any] = {}
        for key, (kind, told) in entries:
            if kind == "tensor":
                source = state_dict[key] if is_source else None
                self._values[key] = (
                    source if isinstance(source, DistributedTensorWrapper) else _handle(told, source)
                )
            else:
                self._values[key] = decode(told, extras)
        self._metadata = decode(metadata, extras)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def copy(self) -> DistributedStateDictWrapper:
        """Returns itself, which is immutable."""
        return self


def _items(state_dict: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: expected a mapping on rank 0, got {type(state_dict).__name__}")
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"state_dict: expected names as keys, got {key!r} of type {type(key).__name__}")
        yield key, value


def _check_plain(key: str, value: torch.Tensor) -> None:
    """Refuses tensors that cannot be sent as bytes."""
    if value.layout is not torch.strided:
        raise TypeError(f"state_dict[{key!r}]: expected a dense tensor, got layout {value.layout}")
    if value.device.type == "meta":
        raise TypeError(f"state_dict[{key!r}]: expected a tensor with values, got one on the meta device")
    if value.is_quantized:
        raise TypeError(
            f"state_dict[{key!r}]: expected plain numbers, got a quantised tensor of {value.dtype}"
        )


def _entry(key: str, value: Any, nested: list[torch.Tensor]) -> tuple[str, Any]:
    if isinstance(value, (torch.Tensor, DistributedTensorWrapper)):
        if isinstance(value, torch.Tensor):
            _check_plain(key, value)
        return "tensor", _spec(value)
    try:
        return "value", encode(value, nested)
    except TypeError as error:
        raise TypeError(f"state_dict[{key!r}]: {error}") from None


def _spec(tensor: torch.Tensor | DistributedTensorWrapper) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _handle(spec: Any, tensor: torch.Tensor | None) -> DistributedTensorWrapper:
    shape, dtype = spec
    return DistributedTensorWrapper(tensor, tuple(shape), getattr(torch, dtype))


def encode(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A value as JSON; the tensors in it are put into ``tensors`` and referred to."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        kind = "ordered" if isinstance(value, OrderedDict) else "dict"
        return {kind: [[encode(key, tensors), encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encode(item, tensors) for item in value]}
    raise TypeError(
        f"expected tensors, numbers, strings, None, lists, tuples and dicts, got {type(value).__name__}"
    )


def decode(told: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(told, dict):
        return told
    ((kind, content),) = told.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("ordered", "dict"):
        pairs = [(decode(key, tensors), decode(item, tensors)) for key, item in content]
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    items = [decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, as bytes: every dtype travels alike."""
    return tensor.reshape(-1).view(torch.uint8)
