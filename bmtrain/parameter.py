"""Sharded parameters: one shard per rank."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from sys import _getframe
from typing import TYPE_CHECKING, Any

import torch

from ._base.tensors import TORCH_DATA, data_of
from ._ranks.context import require_gathering, require_intact
from ._shards import penalties
from ._shards.at_rest import show, show_together
from ._shards.data_version import DataVersion
from ._shards.draws import ShardData, adapt_methods, drawing_whole, refuse_shard
from ._shards.foreign import refuse_fsdp, refuse_replicated, warn_of_flatness
from ._shards.full_values import copy_of_part, full_value, gather_flat, load_full_value, shard_of, whole_shape
from ._shards.gather import OpAllGather
from ._shards.gradient import ParameterWithGradient
from ._shards.initializer import ParameterInitializer
from ._shards.meta import no_values
from ._shards.sharding import ShardSpec, merge_slices, merged_shape
from ._shards.stage import spec_from_portable
from .global_var import context

if TYPE_CHECKING:
    from ._ranks.context import Group

__all__ = [
    "DistributedParameter",
    "OpAllGather",
    "ParameterInitializer",
    "full_value",
    "gather_flat",
    "load_full_value",
    "shard_of",
    "whole_shape",
]


class DistributedParameter(ParameterWithGradient):
    """A parameter of which each rank keeps one shard: seen as a tensor, it is the 1-D local shard.

    Args:
        data: the full tensor, of any shape and device (for a tensor-parallel parameter, this rank's slice). This rank's
            part is copied to the run device; there is no communication. On the meta device it has no values, and may
            come before :func:`bmtrain.init_distributed`: the parameter keeps the full shape and no memory until
            :func:`bmtrain.init_parameters` or loading makes the shard.
        requires_grad: whether it is trained. Integer data need ``requires_grad=False``.
        init_method: called by :func:`bmtrain.init_parameters` on a full-size ordinary tensor.
        group: a label, used by :func:`bmtrain.grouped_parameters`.
        tp_mode: shard over the ranks that hold the same tensor-parallel slice.
        tp_split_dim: dimension along which the tensor-parallel slices are concatenated to the logical tensor; -1 if
            every slice is the whole.
        ep_mode: the data are this rank's experts, stacked along dim 0: shard them over the ranks that hold the same
            ones.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`.
        ValueError: both ``tp_mode`` and ``ep_mode``, or no such dimension.
        TypeError: ``data`` is not a tensor, or complex or in 8 bits though trained; ``init_method`` cannot be called.

    Example:
        >>> p = bmtrain.DistributedParameter(torch.ones(4, 3))
        >>> p.numel(), p.gather().shape  # 12 elements on one rank, 3 on each of four
        (12, torch.Size([4, 3]))
    """

    #: Number in order of construction, which is the same on all ranks.
    _number: int
    _tp_original_shape: torch.Size
    _init_method: Callable[[torch.Tensor], Any] | None
    _group: str | None
    _tp_mode: bool
    _tp_split_dim: int
    _ep_mode: bool = False
    #: Number of possible writes that no version counter counts: loads, and writes through ``data``.
    _unversioned_writes: int = 0
    #: Checksum of a whole that ranks were given each; None after writes of this rank. See `_engine/replaced.py`.
    _given: int | None = 0
    _given_at: tuple[int, int, int] | None = None  # writes till then, if a later one drops the checksum
    #: Whether the data are temporarily the full tensor. See [Note: Writing to a whole parameter].
    _is_whole: bool = False
    _is_reread: bool  # a forward has read it more than once
    #: Whether it was trained when its Block was built; the Block's copies, and itself when built again, are cut alike.
    _trains_in_block: bool
    #: Version of a parameter outside Blocks, once its ``data`` was read.
    _data_version: DataVersion | None = None
    #: Place and version of the gradients that gathers have sent; None: not watched (`_shards/penalties.py`).
    _reduced: list[tuple[int, int]] | None
    _refuse_shard = refuse_shard

    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = True,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        group: str | None = None,
        tp_mode: bool = False,
        tp_split_dim: int = -1,
        ep_mode: bool = False,
    ) -> DistributedParameter:
        if not isinstance(data, torch.Tensor):
            raise TypeError(f"data: expected a torch.Tensor, got {type(data).__name__}")
        if init_method is not None and not callable(init_method):
            raise TypeError(f"init_method: expected a function of a tensor, or None, got {init_method!r:.80}")
        if requires_grad:
            _check_can_train(data.dtype)
        shape = data.shape
        if tp_split_dim >= max(data.dim(), 1) or tp_split_dim < -1:
            raise ValueError(
                f"tp_split_dim: expected -1 to {data.dim() - 1} for shape {tuple(shape)}, got {tp_split_dim}"
            )
        if ep_mode and (tp_mode or data.dim() == 0):
            raise ValueError(
                f"ep_mode: expected experts along dim 0 and no tp_mode, got shape {tuple(shape)}, tp_mode {tp_mode}"
            )
        slices = "ep" if ep_mode else "tp" if tp_mode else None
        local = data.detach() if data.is_meta else copy_of_part(data, slices)
        param = cls._from_local(local, requires_grad)
        param._original_shape = shape
        param._init_method = init_method
        param._group = "tp" if tp_mode else group
        param._tp_mode = tp_mode
        param._tp_split_dim = 0 if ep_mode else tp_split_dim if tp_mode else -1
        param._ep_mode = ep_mode
        return param

    def __getattr__(self, name: str) -> Any:
        """Computes attributes that depend on the groups of ranks at their first use."""
        if name == "_spec":
            self._spec = ShardSpec(self._original_shape, context().zero_group(self._slices))
        elif name == "_label":
            self._label = f"parameter {self._number} of shape {tuple(self._original_shape)}"
        elif name == "_tp_original_shape":
            number = self._slice_group.size
            self._tp_original_shape = merged_shape(self._original_shape, self._tp_split_dim, number)
        else:
            refuse_fsdp(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__[name]

    @classmethod
    def _from_local(cls, local: torch.Tensor, requires_grad: bool) -> DistributedParameter:
        param = torch.Tensor._make_subclass(cls, local, requires_grad)
        param._number = next(_NUMBERS)
        param._is_reread = False
        param._block = None
        param._gradient_hooks = None
        param._accumulated_hooks = None
        penalties.watch(param)
        return param

    @property
    def _slices(self) -> str | None:
        """The family of the ranks that have a slice of the parameter each; None if it is not sliced."""
        return "ep" if self._ep_mode else "tp" if self._tp_mode else None

    @property
    def _slice_group(self) -> Group:
        return context().groups[self._slices or "tp"]

    @property
    def data(self) -> torch.Tensor:
        """This rank's shard, without autograd. It may be written to, also with random numbers; optimizers detect it."""
        if self._stored is not None:
            show(self)
        self._unversioned_writes += 1
        owner = self if self._block is None else self._block
        if owner._data_version is None:
            owner._data_version = DataVersion()
        data = owner._data_version.counted(data_of(self))
        return data if self.shape == self._original_shape else ShardData.of(self, data)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._unversioned_writes += 1
        block = self._block
        if block is not None and block.is_bound:  # a write in a forward, which is lost
            block._data_version = block._data_version or DataVersion()
            block._data_version.note_replaced()
        elif block is None and self._data_version is not None:
            self._data_version.note_replaced()
        TORCH_DATA.__set__(self, value)

    #: The mark of compiled optimizer steps for tensors whose address stays: ignored, as a Block moves its parameters.
    _dynamo_static_input_type = property(lambda _: None, lambda _, kind: None)

    def dim(self) -> int:
        """As a tensor's: 1 of a shard, of which a script that asks is warned."""
        number = super().dim()
        if number < len(self._original_shape) and not torch.compiler.is_dynamo_compiling():
            warn_of_flatness(_getframe(1))
        return number

    ndim = property(dim)

    @property
    def group(self) -> str | None:
        """The label of the parameter; ``"tp"`` for a tensor-parallel one."""
        return self._group

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the full parameter, without communication; ``shape`` is the shape of this rank's shard."""
        return self._original_shape

    @property
    def full_numel(self) -> int:
        """The number of elements in :attr:`full_shape`."""
        return self._original_shape.numel()

    @property
    def _start_partition(self) -> int:
        return self._spec.local_part[0]

    @property
    def _end_partition(self) -> int:
        return sum(self._spec.local_part)

    @property
    def _in_block(self) -> bool:
        return self._block is not None

    _in_checkpoint_block = _in_block

    def gather(self) -> torch.Tensor:  # type: ignore[override]
        """Returns the full tensor, differentiable; its gradient is summed over the ranks into the shard. Collective.

        Returns:
            A tensor with the shape of the constructor's ``data`` (for a tensor-parallel parameter, its slice).

        Raises:
            RuntimeError: the parameter is on the meta device, or DistributedDataParallel has replicated the shard.
        """
        self.require_data()
        if self._is_full():
            return self.view_as(self)
        require_gathering("gather()")
        refuse_replicated(self)
        show_together(self)
        full: torch.Tensor = OpAllGather.apply(self)
        return full

    def tp_gather(self) -> torch.Tensor:
        """Concatenates the full tensors over the ranks that have a slice each. Collective over these."""
        return merge_slices(self.gather(), self._tp_split_dim, self._slice_group)

    def gather_all(self) -> torch.Tensor:
        """Returns the full tensor, with tensor-parallel slices and experts of all ranks merged. Collective."""
        return self.gather() if self._tp_split_dim < 0 else self.tp_gather()

    def load(self, full: torch.Tensor) -> None:
        """Copies this rank's part of ``full`` into the shard; optimizers use it. All ranks pass the same tensor.

        Args:
            full: of the shape that :meth:`gather_all` returns; any device, and any dtype, which is converted.

        Raises:
            ValueError: it has another shape.
        """
        load_full_value(self, full)
        self._spec.make_replicas_equal(self, self._label)

    def _is_full(self) -> bool:
        """Whether the data are the full tensor: in a running Block, or assigned by the user in place of the shard."""
        if self._is_whole:
            return True
        block = self._block
        if block is None or self.is_meta or self.shape != self._original_shape:
            return False
        if block.is_bound or self.untyped_storage()._cdata in block.homes:
            return block.is_bound
        # The whole of a small parameter is the shard of one rank, and the other ranks know it as a shard.
        return self.dim() != 1 or self._spec.local_part[1] != self.numel() or not block.has_shards

    def require_data(self, name: str = "") -> None:
        """Raises if the parameter is still on the meta device; ``name`` names it in the error."""
        if self.is_meta:
            raise RuntimeError(no_values(name, self._original_shape))

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedParameter:
        clone = type(self)._from_local(self._own_part().clone(), self.requires_grad)
        memo[id(self)] = clone
        for name, value in self.__dict__.items():
            if name in _NOT_COPIED:
                continue
            clone.__dict__[name] = value if name == "_spec" else copy.deepcopy(value, memo)
        return clone

    def __reduce_ex__(self, protocol: Any) -> Any:
        require_intact("pickling a parameter")
        attributes = {k: v for k, v in self.__dict__.items() if k not in ("_spec", *_NOT_COPIED)}
        spec = self._spec.portable(self.element_size())
        return _rebuild, (type(self), self._own_part().clone(), self.requires_grad, spec, attributes)

    def _own_part(self) -> torch.Tensor:
        show(self)
        return self._spec.slice_of(data_of(self).reshape(-1)) if self._is_full() else data_of(self)

    def share_memory_(self) -> DistributedParameter:
        """As a tensor's, whose processes share one memory, which a parameter on a drive does not keep."""
        stored = None if self._stored is None else self._stored()
        if stored is not None and stored.parameters is not None:
            raise RuntimeError(
                f"{self._label or 'parameter'}: is on a drive, where share_memory_() has no memory to share"
            )
        super().share_memory_()
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        local = repr(self.detach())
        return (
            f"DistributedParameter(shape={tuple(self._original_shape)}, local={local}, "
            f"requires_grad={self.requires_grad})"
        )


adapt_methods(DistributedParameter, drawing_whole)
DistributedParameter.requires_grad = penalties.REQUIRES_GRAD  # type: ignore[assignment]
DistributedParameter.requires_grad_ = penalties.require_grad  # type: ignore[assignment]


def _check_can_train(dtype: torch.dtype) -> None:
    if dtype.is_complex:
        raise TypeError(
            f"data: expected a real dtype for a parameter that is trained, got {dtype}; keep torch.view_as_real(data) "
            "and use torch.view_as_complex(parameter)"
        )
    if dtype.is_floating_point and dtype not in _TRAINED:
        raise TypeError(
            f"data: expected float32, float16, bfloat16 or float64 for a parameter that is trained, got {dtype}; give "
            "requires_grad=False"
        )


#: Dtypes of gradients that can be summed over ranks.
_TRAINED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_NUMBERS = itertools.count()
_NOT_COPIED = (
    "_number",
    "_label",
    "_block",
    "_data_version",
    "_gradient_hooks",
    "_accumulated_hooks",
    "_reduced",
    "_sent",
    "_stored",
    "_is_whole",
)


def _rebuild(
    cls: type[DistributedParameter],
    local: torch.Tensor,
    requires_grad: bool,
    spec: tuple[Any, ...],
    attributes: dict[str, Any],
) -> DistributedParameter:
    param = cls._from_local(local if local.is_meta else local.to(context().device), requires_grad)
    param.__dict__.update(attributes)
    param._spec = spec_from_portable(spec, context())
    if not local.is_meta and local.numel() != param._spec.local_part[1]:
        raise ValueError(
            f"a pickled shard of {local.numel()} elements of a parameter of shape {tuple(param._original_shape)} "
            f"cannot be used here: this rank ({param._spec.group.rank} of {param._spec.group.size}) owns "
            f"{param._spec.local_part[1]}; save() and load() move parameters between numbers of ranks"
        )
    return param
