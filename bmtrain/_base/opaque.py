"""Exclusion of functions from tracing by torch.compile.

Blocks gather, communicate and keep records of calls, which cannot be part of a graph. By default, dynamo would trace
into them and run the pieces between its graph breaks from generated code.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_REASON = "bmtrain gathers and communicates here; compile what is inside blocks with block_module.compile()"


def opaque(function: _Function) -> _Function:
    """A function that a compiled one calls as it is, whatever it calls in turn: the graph breaks there.

    As `torch.compiler.disable`, but without a frame around each call, and without importing the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return _skip(function, with_callees=True)


def untraced_by_itself(function: _Function) -> _Function:
    """A function that is traced as a part of what calls it, but never alone, after a graph break in that."""
    return _skip(function, with_callees=False)


def constant_while_traced(function: _Function) -> _Function:
    """A function that the compiler calls, and whose result it takes for a constant.

    As `torch.compiler.assume_constant_result`, but without importing the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _skip(function: _Function, with_callees: bool) -> _Function:
    from torch._C._dynamo import eval_frame

    assert isinstance(function, FunctionType)
    skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
    strategy = eval_frame._FrameExecStrategy(skip, skip if with_callees else default)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function
