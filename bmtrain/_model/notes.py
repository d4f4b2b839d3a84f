"""Notes on errors of torch: the block that raised them, and a remedy."""

from __future__ import annotations

import os
import re
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .._base.tensors import nodes_of
from .._engine.block_state import unreturned_tensor_error
from ..errors import BMTrainError

#: The first missing key, which has a prefix among the unexpected ones.
_PREFIXED = re.compile(r'Missing key[^"]*"([^"]+)"[\s\S]*Unexpected key[^"]*"(module|_orig_mod)\.\1"')
_ENGINE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_engine")


def _add(error: Exception, note: str, unless: str) -> None:
    """Adds a note to the error (from Python 3.11), unless it has a note that contains ``unless``."""
    if hasattr(error, "add_note") and not any(unless in known for known in getattr(error, "__notes__", ())):
        error.add_note(note)


def name_block(error: Exception, label: str, parameters: Any, arguments: Any) -> None:
    """Adds the block whose forward raised, and its operands: torch names dtypes and shapes, but no layer."""
    if isinstance(error, BMTrainError):
        return
    if "saved tensor hooks" in str(error):  # of torch.func
        _add(error, "in a block that recomputes; give it use_checkpoint=False", unless="use_checkpoint")
    if "NestedTensorImpl" in str(error):
        _add(error, "nested tensors in a block need layout=torch.jagged", unless="torch.jagged")
    error.__traceback__ = _without_engine(error.__traceback__)
    kinds = sorted({str(p.dtype) for p in parameters}) or ["none"]
    given = [
        f"{leaf.dtype} {'nested' if leaf.is_nested else tuple(leaf.shape)}"
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, torch.Tensor)
    ]
    _add(
        error,
        f"in the forward of block {label}: parameters in {', '.join(kinds)}; arguments {', '.join(given) or 'none'}",
        unless="in the forward of block",
    )


def _without_engine(trace: TracebackType | None) -> TracebackType | None:
    """Removes frames between the block's call and its module's code, unless the engine itself has raised."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    if not frames or _is_engine(frames[-1]):
        return frames[0] if frames else None
    kept: TracebackType | None = None
    for frame in reversed(frames):
        if not _is_engine(frame):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def _is_engine(trace: TracebackType) -> bool:
    return os.path.dirname(trace.tb_frame.f_code.co_filename) == _ENGINE


def remedy_of_keys(problems: str) -> str:
    """Returns the remedy for keys that are missing or unexpected."""
    if found := _PREFIXED.search(problems):
        remove = f"torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, '{found[2]}.')"
        return f"the keys have the prefix of DistributedDataParallel or torch.compile: remove it by {remove}"
    return "strict=False loads the keys that match, and returns the missing and the unexpected ones"


def name_strict(error: RuntimeError) -> None:
    """Adds a remedy for keys that are missing or unexpected."""
    if "key(s) in state_dict" in str(error):
        _add(error, remedy_of_keys(str(error)), unless="the keys")


def name_unreturned(error: BaseException, loss: torch.Tensor) -> None:
    """Adds to an error of ``loss.backward()`` that ``loss`` leads into a Block other than through its results.

    Where what was left in an attribute was computed from parameters, these are shards again, and torch's error is one
    of shapes.
    """
    if not isinstance(error, RuntimeError) or "did not return" in str(error):
        return
    if any(node.name() == "bmtrain::GradientSink" for node in nodes_of([loss])):
        _add(error, unreturned_tensor_error("a Block"), unless="did not return")
