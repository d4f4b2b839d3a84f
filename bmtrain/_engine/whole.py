"""Full parameters outside of a forward, for reading and writing.

[Note: Writing to a whole parameter]
A read outside of Blocks returns a gathered copy, and a write to it changes no shard. For writing, the parameter object
itself gets the full tensor as its data; when its shard is restored, this rank's part of the written values is copied
into it. Every rank writes its own copy: if all ranks write the same, the result is the same as in one process. Gathered
buffers of Blocks cannot be used, because the ranks of a host may share them, and because their dtype may differ from
the parameter's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch

from .._base.tensors import TORCH_DATA, data_of
from .._ranks.context import require_gathering
from .._shards.at_rest import show_together
from ..parameter import DistributedParameter
from .block_state import BlockState

#: Methods by which modules write the first values of their parameters.
_INITIALISING = ("reset_parameters", "_reset_parameters", "init_weights")
WRITES = "_bmtrain_writes"  # attribute of functions that get whole parameters


class WholeParameters:
    """Parameters that hold their full tensors, until :meth:`restore`."""

    def __init__(self) -> None:
        self._shards: list[tuple[DistributedParameter, torch.Tensor]] = []

    @torch.no_grad()
    def add(self, param: DistributedParameter) -> None:
        """Gathers a parameter; a parameter that is whole already stays unchanged. Collective."""
        if param._is_full():
            return
        param.require_data()
        require_gathering("reading a whole parameter")
        show_together(param)
        shard = data_of(param)
        full = param._spec.gather(shard, param._label).view(param._original_shape)
        param._is_whole = True
        TORCH_DATA.__set__(param, full)
        self._shards.append((param, shard))

    @torch.no_grad()
    def restore(self, *, written: bool) -> None:
        """Makes the parameters shards again. Collective if ``written``.

        Args:
            written: copy this rank's parts of the full tensors into the shards.

        Raises:
            RuntimeError: the data of a parameter were replaced by a tensor of another shape.
        """
        misfits = []
        for param, shard in self._shards:
            full = data_of(param)
            del param._is_whole
            TORCH_DATA.__set__(param, shard)
            if not written:
                continue
            if full.shape != param._original_shape:
                misfits.append(f"{tuple(full.shape)} instead of {tuple(param._original_shape)}")
                continue
            param.copy_(param._spec.slice_of(full.reshape(-1)))
            param._given = 0
            param._unversioned_writes += 1
            param._spec.make_replicas_equal(param, param._label)
        self._shards.clear()
        if misfits:
            raise RuntimeError(f"data of whole parameters were replaced, with shape {', '.join(misfits)}")


@contextmanager
def holding_whole(params: Iterable[DistributedParameter], *, write: bool) -> Iterator[None]:
    """Makes parameters whole, with gradients off. Collective.

    Blocks whose parameters are all in ``params`` may run meanwhile, as plain modules.

    Args:
        params: the parameters, each once.
        write: keep the written values, unless an exception is raised.

    Raises:
        RuntimeError: a Block runs, or its parameters are whole already; or a parameter has no values.
    """
    params = list(params)
    given = {id(param) for param in params}
    runtimes = []
    for runtime in _runtimes_of(params):
        if runtime.is_bound:
            raise RuntimeError(
                f"the parameters of {runtime.label} are full already: contexts do not nest, and open around the call "
                "of a Block rather than in its forward"
            )
        members = runtime.reference.members if runtime.reference is not None else ()
        if given.issuperset(id(member()) for member in members):
            runtimes.append(runtime)
    held = WholeParameters()
    is_done = False
    try:
        for param in params:
            held.add(param)
        for runtime in runtimes:
            runtime.is_bound = True
        with torch.no_grad():
            yield
        is_done = True
    finally:
        for runtime in runtimes:
            runtime.is_bound = False
        held.restore(written=write and is_done)


def _runtimes_of(params: Iterable[DistributedParameter]) -> list[BlockState]:
    found: dict[int, BlockState] = {}
    for param in params:
        runtime = None if param._block is None else param._block.runtime()
        if runtime is not None:
            found[id(runtime)] = runtime
    return list(found.values())


#: State of the innermost :func:`writable`.
_writable: ContextVar[WholeParameters | None] = ContextVar("writable", default=None)
#: Returns the parameters held by the innermost :func:`writable`, or None.
writable_now = _writable.get


@contextmanager
def writable() -> Iterator[WholeParameters]:
    """Context manager in which modules that read parameters outside of a forward get them whole, to be written.

    Parameters read in an inner one are written back at its end.
    """
    held = WholeParameters()
    token = _writable.set(held)
    is_done = False
    try:
        yield held
        is_done = True
    finally:
        _writable.reset(token)
        held.restore(written=is_done)


def give_whole_to_initialisers(cls: type) -> None:
    """Makes the methods of ``cls`` that initialise parameters get them whole."""
    for name in _INITIALISING:
        method = getattr(cls, name, None)
        if isinstance(method, FunctionType) and not hasattr(method, WRITES):
            setattr(cls, name, _writing_method(method))


def _writing_method(method: FunctionType) -> FunctionType:
    @functools.wraps(method)
    def write(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with writable():
            return method(self, *args, **kwargs)

    setattr(write, WRITES, True)
    return write  # type: ignore[return-value]


def writing_function(function: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
    """Wraps a module's method so that it gets whole parameters. See [Note: Writing to a whole parameter]."""
    if hasattr(function, WRITES):
        return function

    @functools.wraps(function, updated=())
    def write(module: torch.nn.Module) -> None:
        with writable() as held:
            if not getattr(type(module), "_handles_shards", False):  # a Block forwards its attributes
                parameters: Any = module._parameters
                for param in parameters.values():
                    if hasattr(param, "_original_shape") and not param.is_meta:
                        held.add(param)  # reads by a plain module cannot be detected
            function(module)

    setattr(write, WRITES, True)
    return write
