"""Blocks: the unit of gathering, recomputation and gradient scattering."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from sys import _getframe
from typing import Any

import torch

from ._base.arguments import require_integer, require_module
from ._base.deprecate import warn_once
from ._base.layers import run_layers, stacked
from ._base.opaque import opaque
from ._base.stand_in import SHARED, StandIn
from ._C import ShardedBuffer
from ._engine.block_state import BlockState
from ._engine.disk_block import state_of
from ._engine.engine import current_engine
from ._engine.policy import BlockMode, BlockPolicy, Recompute
from ._engine.run_block import run_block
from ._engine.run_state import ModuleState
from ._engine.vertical import VerticalLayers
from ._engine.whole import writing_function
from ._model.block_build import adopt_parameters, dissolve_inner_blocks, packed_again
from ._model.notes import name_block
from ._model.storage import build_storage, keeping_on_host
from ._shards.block_ref import BlockRef
from ._shards.foreign import refuse_listing
from ._shards.meta import make_moved_shards
from .errors import RepeatedBlockError
from .global_var import context
from .param_init import grouped_parameters, init_parameters
from .parameter import DistributedParameter
from .utils import round_up, storage_type_cuda
from .zero_context import ZeroContext

__all__ = [
    "Block",
    "CheckpointBlock",  # noqa: F822 (given by __getattr__)
    "CheckpointBlockContext",  # noqa: F822 (given by __getattr__)
    "TransformerBlockList",
    "round_up",
    "storage_type_cuda",
]

# Attributes that a copy of a Block makes again.
_GIVEN = ("_module", "_policy", "_mode", "_label", "_modules_state")
_NOT_COPIED = (*SHARED, *_GIVEN, "_links", "_shares_with", "_storages", "_runtime")


class Block(StandIn):
    """A module whose parameters are gathered together while it runs.

    Args:
        inner_module: any module; every parameter in it must be a :class:`bmtrain.DistributedParameter`. Blocks inside
            it are dissolved into this one. Values are preserved.
        use_checkpoint: keep only the inputs, and recompute the forward in backward.
        zero_level: 3 frees the full parameters between forward and backward, 2 keeps them. Default: the level of
            ``init_distributed(zero_level=)``, else 3.
        initialized: build no storage: :meth:`reference` will share another Block's.
        mode: ``"BLOCK"``, or ``"PIPE"`` for pipeline lists.
        policy: all options of a Block, in place of ``use_checkpoint`` and ``zero_level``. Default: the policy of
            :func:`bmtrain.default_policy`.

    Raises:
        ValueError: for a parameter that is not distributed (named), a bad ``zero_level`` or ``mode``, or parameters
            that another Block owns.

    Example:
        >>> block = bmtrain.Block(bmtrain.nn.Linear(4, 4), zero_level=2)
        >>> block(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    _runtime: BlockState

    def __init__(
        self,
        inner_module: torch.nn.Module,
        use_checkpoint: bool = True,
        zero_level: int | None = None,
        initialized: bool = False,
        mode: str = "BLOCK",
        *,
        policy: BlockPolicy | None = None,
    ) -> None:
        require_module("inner_module", inner_module)
        if mode not in BlockMode.__members__:
            raise ValueError(f"mode: expected 'BLOCK' or 'PIPE', got {mode!r}")
        if zero_level not in (None, 2, 3):
            raise ValueError(
                f"zero_level: expected 2 or 3, got {zero_level!r}; levels 0 and 1 are for BlockPolicy"
            )
        if policy is None:
            policy = current_engine(context()).default_policy or BlockPolicy(level=context().zero_level)
            policy = replace(
                policy,
                level=policy.level if zero_level is None else zero_level,
                recompute=policy.recompute if use_checkpoint else Recompute.OFF,
            )
        elif zero_level is not None or not use_checkpoint:
            raise ValueError("policy: give either policy= or use_checkpoint= and zero_level=, not both")
        self._begin(dissolve_inner_blocks(inner_module, Block), policy, BlockMode[mode])
        self.__dict__["_need_reference"] = initialized
        if not initialized:
            self._build()

    def _begin(self, inner_module: torch.nn.Module, policy: BlockPolicy, mode: BlockMode) -> None:
        super().__init__()
        self._stand_for(inner_module)
        own = self.__dict__
        own["_policy"] = policy.of_block(current_engine(context()).num_blocks)
        own["_mode"] = mode
        own["_label"] = f"{type(inner_module).__name__}#{current_engine(context()).num_blocks}"
        own["_modules_state"] = ModuleState(inner_module)
        own["_links"] = [None, None]
        own["_shares_with"] = None
        own["_storages"] = []

    @torch.inference_mode(False)  # so that Blocks built in inference mode can be trained
    def _build(self) -> None:
        """(Re)packs the parameters of the inner module into flat storage. Collective."""
        reference = BlockRef(self)
        named = adopt_parameters(self, self._module, reference)
        callers = context().zero_group(pipe=self._mode is BlockMode.PIPE).comm
        comm = callers if "_runtime" in self.__dict__ else None  # else all ranks
        # In place: Blocks that share this storage see the new one.
        self._storages[:] = build_storage(named, self._mode, self._policy, self._label, reference, comm)
        buffers = [storage.shards for storage in self._storages]
        engine = current_engine(context())
        if "_runtime" in self.__dict__:
            engine.replace_buffers(self._runtime, buffers)
        else:
            self.__dict__["_runtime"] = state_of(engine, self._label, buffers, self._policy)
        self._runtime.store([storage.stored for storage in self._storages], callers)
        reference.runtime = weakref.ref(self._runtime)
        self._runtime.reference = reference

    def _place_of(self, param: DistributedParameter) -> tuple[ShardedBuffer, int] | None:
        """The buffer of a parameter and its number there; None if that is on another stage of a pipeline."""
        for storage in self._storages:
            for index, member in enumerate(storage.parameters):
                if member is param:
                    return storage.shards, index
        return None

    def reference(self, block: Block) -> None:
        """Shares another Block's storage; for a Block constructed with ``initialized=True`` around the same module."""
        self.__dict__["_shares_with"] = block
        self.__dict__["_storages"] = block._storages
        self.__dict__["_runtime"] = block._runtime
        self.__dict__["_need_reference"] = False

    # ---- calling

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the inner module's current forward with gathered parameters."""
        return self._run(self._module, *args, **kwargs)

    @opaque
    def _run(self, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        runtime = self._runtime
        if runtime.is_bound:  # called from its own forward, by a replaced forward that wraps the old one
            return self._module(*args, **kwargs)
        try:
            reads = runtime.engine.reads
            if reads.check_call is not None and reads.innermost is None:
                reads.check_call(self, args, kwargs)
            return run_block(runtime, forward, self._modules_state, args, kwargs)
        except Exception as error:
            owned = [param for storage in self._storages for param in storage.parameters]
            name_block(error, self._label, owned, (args, kwargs))
            raise

    def _replaced_forward(self, function: Any) -> Any:
        return _ReplacedForward(self, function)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        refuse_listing(self._label, _getframe(1))
        return super().named_parameters(*args, **kwargs)

    def apply(self, fn: Any) -> Block:
        return super().apply(writing_function(fn))

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Block:
        make_moved_shards(self, fn)
        shards = [param for storage in self._storages for param in storage.parameters if not param._is_full()]
        self._module._apply(keeping_on_host(self._storages, fn), *args, **kwargs)
        if any(
            param.dtype != storage.shards.shard.dtype
            for storage in self._storages
            for param in storage.parameters
        ):
            for param in shards:
                if param._block is not None:
                    param._block.add_home(param)
            with packed_again(self):
                self._build()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {
            "shares_with": self._shares_with,
            "module": self._module,
            "policy": self._policy,
            "mode": self._mode,
            "own": {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED},
        }
        return _new_block, (), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["module"], state["policy"], state["mode"])
        self.__dict__.update(state["own"])
        if state["shares_with"] is None:
            self._build()
        else:
            self.reference(state["shares_with"])

    # ---- documented, rarely used

    def init_parameters(self) -> None:
        """:func:`bmtrain.init_parameters` for this Block."""
        init_parameters(self)

    def grouped_parameters(self) -> Iterator[tuple[str | None, list[Any]]]:
        """:func:`bmtrain.grouped_parameters` for this Block."""
        return grouped_parameters(self)

    def set_pre_module(self, pre_module: Block | None) -> None:
        """Sets the Block that runs before this one. (The order of calls is learnt; the links are informative.)"""
        self._links[0] = None if pre_module is None else weakref.ref(pre_module)
        if pre_module is not None:
            pre_module._links[1] = weakref.ref(self)

    def pre_module(self) -> Block | None:
        """The Block set by :meth:`set_pre_module`."""
        return None if self._links[0] is None else self._links[0]()

    def next_module(self) -> Block | None:
        """The Block of which this one is the ``pre_module``."""
        return None if self._links[1] is None else self._links[1]()

    @property
    def _storage_params(self) -> dict[str, torch.nn.Parameter]:
        """Flat local parameters by kind, with ``.grad`` if there is one."""
        return {storage.kind: storage.flat_parameter() for storage in self._storages}

    @property
    def _storage_info(self) -> dict[str, dict[str, Any]]:
        """Ranks and sizes of the flat buffers by kind."""
        return {storage.kind: storage.info() for storage in self._storages}

    @property
    def _param_info(self) -> list[dict[str, Any]]:
        """Positions of the parameters in the flat buffers."""
        return [info for storage in self._storages for info in storage.parameter_infos()]


# The names of 0.1 and 0.2 in this module; bmtrain.CheckpointBlock is the documented one.
_OLD_NAMES = {"CheckpointBlock": Block, "CheckpointBlockContext": ZeroContext}


def __getattr__(name: str) -> Any:
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    today = "bmtrain.Block" if name == "CheckpointBlock" else "bmtrain.zero_context.ZeroContext"
    warn_once(f"block_layer.{name}", f"block_layer.{name} is deprecated: use {today}")
    return _OLD_NAMES[name]


def _new_block() -> Block:
    return Block.__new__(Block)


class _ReplacedForward:
    """A forward set by ``block.forward = function``, run with gathering and recomputation like the Block's own."""

    def __init__(self, block: Block, function: Any) -> None:
        self.block = block
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.block._runtime.is_bound:
            return self.function(*args, **kwargs)
        return self.block._run(self.function, *args, **kwargs)


class TransformerBlockList(VerticalLayers):
    """Blocks that run one after the other, each on the hidden states of the one before.

    Args:
        modules: Blocks, or plain modules (each wrapped in a Block). A plain module given twice yields two Blocks that
            share their storage.
        num_hidden: number of positional arguments that are hidden states, passed from Block to Block; the rest and all
            keyword arguments are passed to every Block.
        sqrt: accepted for programs of older versions; has no effect.

    Raises:
        ValueError: ``num_hidden`` is below 1, or one Block is given twice.

    Example:
        >>> layers = bmtrain.TransformerBlockList([bmtrain.Block(bmtrain.nn.Linear(4, 4)) for _ in range(3)])
        >>> layers(torch.ones(2, 4)).shape
        torch.Size([2, 4])
        >>> hidden, states = layers(torch.ones(2, 4), return_hidden_states=True)
        >>> states.shape
        torch.Size([3, 2, 4])
    """

    def __init__(
        self, modules: Iterable[torch.nn.Module], num_hidden: int = 1, *, sqrt: bool = False
    ) -> None:
        super().__init__()
        if sqrt:
            warn_once(
                "TransformerBlockList.sqrt", "sqrt= has no effect any more and can be left out", stacklevel=3
            )
        if not isinstance(modules, Iterable):
            raise TypeError(f"modules: expected several, such as a list, got {type(modules).__name__}")
        self.num_hidden = require_integer("num_hidden", num_hidden, 1)
        blocks: dict[int, Block] = {}  # by the identity of the given module
        for index, module in enumerate(modules):
            block = as_block(module, blocks.get(id(module)), index)
            blocks.setdefault(id(module), block)
            self.add_module(str(index), block)
        chain_blocks(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        chain_blocks(self)

    def forward(self, *args: Any, return_hidden_states: bool = False, **kwargs: Any) -> Any:
        """Runs all Blocks.

        Args:
            args: ``num_hidden`` hidden states, then arguments for every Block.
            return_hidden_states: also return, per hidden state, the stacked inputs of all layers.

        Returns:
            The hidden state (a tuple if ``num_hidden > 1``); with ``return_hidden_states`` a tuple of the hidden states
            and then of the stacks, each of shape ``(num_layers, *hidden.shape)``.
        """
        count = self.num_hidden
        hidden, rest = args[:count], args[count:]
        if len(hidden) < count:
            raise ValueError(f"expected {count} hidden states as positional arguments, got {len(hidden)}")
        inputs: list[tuple[torch.Tensor, ...]] | None = [] if return_hidden_states else None
        hidden = run_layers(self._modules, hidden, rest, kwargs, count, inputs)
        if inputs is not None:
            return (*hidden, *(stacked([state[j] for state in inputs]) for j in range(count)))
        return hidden[0] if count == 1 else hidden


def chain_blocks(layers: torch.nn.Module) -> None:
    """Sets the preceding Block of each Block among the children."""
    previous: Block | None = None
    for block in layers._modules.values():
        if type(block) is Block:
            block.set_pre_module(previous)
            previous = block


def as_block(module: torch.nn.Module, earlier: Block | None, index: int) -> Block:
    """Returns the Block for an item of a list; ``earlier`` is the Block of the same item at an earlier position."""
    require_module(f"modules[{index}]", module)
    if type(module) is Block:
        if earlier is not None:
            raise RepeatedBlockError(
                f"modules[{index}]: the same Block ({module._label}) was given twice; to run one layer twice with "
                "shared weights, give the plain module twice"
            )
        return module
    block = Block(module, initialized=earlier is not None)
    if earlier is not None:
        block.reference(earlier)
    return block
