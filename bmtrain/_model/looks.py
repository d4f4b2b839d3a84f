"""Reads of a parameter that need no values: for printing a module, and ``model.layer.weight.shape``.

Reading a parameter outside of forwards gathers it, which all ranks must do. One rank alone may look at a model, so the
bytecode of the reading line decides: an attribute of `_LOOKS`, ``is None`` and `hasattr` need no gather.
"""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType

import torch

from ..parameter import DistributedParameter

_SIZES = ("shape", "size", "numel", "nelement", "dim", "ndim", "ndimension", "full_shape", "full_numel")
_KINDS = ("dtype", "device", "element_size", "is_cuda", "is_cpu", "is_floating_point")
_LOOKS = (*_SIZES, *_KINDS)
_BETWEEN = ("CACHE", "PRECALL", "EXTENDED_ARG", "NOT_TAKEN", "TO_BOOL")


def description(param: DistributedParameter) -> torch.Tensor:
    """Returns a tensor with the shape, dtype and device of the whole parameter; its values only on a single rank."""
    if param._spec.group.size == 1:
        whole = param.gather().detach()
    else:
        value = float("nan") if param.is_floating_point() else 0
        whole = torch.full((), value, dtype=param.dtype, device=param.device).expand(param._original_shape)
    whole.full_shape, whole.full_numel = param.full_shape, param.full_numel  # type: ignore[attr-defined]
    return whole


def only_looks(frame: FrameType, name: str) -> bool:
    """Whether the code of ``frame``, which reads the attribute ``name`` of a module, uses no values of the result."""
    return _only_looks(frame.f_code, frame.f_lasti, name)


@functools.lru_cache(4096)
def _only_looks(code: CodeType, position: int, name: str) -> bool:
    steps = [(step.offset, step.opname, step.argval) for step in dis.get_instructions(code)]
    steps = [step for step in steps if step[0] == position or step[1] not in _BETWEEN]
    before = [step for step in steps if step[0] < position][-8:]
    here = next((opcode for at, opcode, _ in steps if at == position), "")
    after = [step[1:] for step in steps if step[0] > position][here == "PRECALL" :][:2]
    if here.startswith(("CALL", "PRECALL")):  # Python 3.11 makes a call in one or the other
        called = next((value for *_, value in before[::-1] if value in ("hasattr", "getattr")), None)
        if called is None or name not in [value for *_, value in before[-2:]]:
            return False
        if called == "hasattr":
            return True
    elif here != "LOAD_ATTR":
        return False
    opcode, value = after[0]
    if opcode in ("LOAD_ATTR", "LOAD_METHOD"):
        return value in _LOOKS
    return "_NONE" in opcode or (after[0] == ("LOAD_CONST", None) and after[1][0] == "IS_OP")
