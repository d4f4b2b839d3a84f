"""NCCL's numbers for dtypes and reductions (nccl.h), for programs that use them by name."""

from __future__ import annotations

import torch

from .._ranks.comm import reduce_op

__all__ = [
    "dtype2nccl",
    "ncclAvg",
    "ncclBfloat16",
    "ncclChar",
    "ncclDouble",
    "ncclFloat",
    "ncclFloat16",
    "ncclFloat32",
    "ncclFloat64",
    "ncclHalf",
    "ncclInt",
    "ncclInt8",
    "ncclInt32",
    "ncclInt64",
    "ncclMax",
    "ncclMin",
    "ncclProd",
    "ncclSum",
    "ncclUint8",
    "ncclUint32",
    "ncclUint64",
    "op2nccl",
]

ncclInt8 = ncclChar = 0
ncclUint8 = 1
ncclInt32 = ncclInt = 2
ncclUint32 = 3
ncclInt64 = 4
ncclUint64 = 5
ncclFloat16 = ncclHalf = 6
ncclFloat32 = ncclFloat = 7
ncclFloat64 = ncclDouble = 8
ncclBfloat16 = 9

ncclSum = 0
ncclProd = 1
ncclMax = 2
ncclMin = 3
ncclAvg = 4

_DTYPES = {
    torch.int8: ncclInt8,
    torch.uint8: ncclUint8,
    torch.bool: ncclUint8,
    torch.int32: ncclInt32,
    torch.int64: ncclInt64,
    torch.float16: ncclFloat16,
    torch.float32: ncclFloat32,
    torch.float64: ncclFloat64,
    torch.bfloat16: ncclBfloat16,
}
_OPS = {"sum": ncclSum, "prod": ncclProd, "max": ncclMax, "min": ncclMin, "avg": ncclAvg}


def dtype2nccl(dtype: torch.dtype) -> int:
    """NCCL's number of a torch dtype; bool travels as uint8.

    Raises:
        TypeError: NCCL has no such type.

    Example:
        >>> dtype2nccl(torch.bfloat16)
        9
    """
    if dtype not in _DTYPES:
        raise TypeError(f"dtype: expected one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    return _DTYPES[dtype]


def op2nccl(op: str) -> int:
    """NCCL's number of a reduction.

    Raises:
        ValueError: not one of ``sum avg max min prod``.

    Example:
        >>> op2nccl("max")
        2
    """
    reduce_op(op)
    return _OPS[op]
