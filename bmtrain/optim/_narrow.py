"""Arrays of moments narrower than fp32: in 16 bits, or in 8 with an exponent for each block of 32 elements.

`csrc/cpu/kernels.h` describes the formats ([Note: Moments in bf16], [Note: Moments in 8 bits]) and `csrc/cpu` has the
kernels. Here is the same in operations of torch, for state dicts and for GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..parameter import DistributedParameter

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
#: Moments without a sign; their codes have one bit more for the exponent.
_UNSIGNED = ("exp_avg_sq",)
_BLOCK = 32
_BELOW_CODE = 20  # bits of fp32 below those that a code has
_NOT_FINITE = 255  # exponent of a block


def read_state_dtype(value: Any) -> torch.dtype:
    """Returns the dtype that an argument ``state_dtype`` names, or raises TypeError."""
    name = str(value).removeprefix("torch.") if isinstance(value, (str, torch.dtype)) else ""
    if name not in _DTYPES:
        raise TypeError(
            f"state_dtype: expected torch.float32, torch.bfloat16 or torch.int8, or a name of these, got {value!r}"
        )
    return _DTYPES[name]


def dtype_for(p: Tensor, state_dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the arrays of a parameter's moments; uint8 for codes and exponents.

    Outside Blocks a parameter may be cut at any element, which would leave a block of elements to two ranks. There
    moments have 16 bits instead of 8, for any number of ranks.
    """
    if state_dtype is not torch.int8:
        return state_dtype
    is_outside = isinstance(p, DistributedParameter) and p._block is None
    return torch.bfloat16 if is_outside else torch.uint8


def stored_shape(shape: torch.Size, dtype: torch.dtype) -> torch.Size:
    """Returns the shape of an array for a parameter of ``shape``."""
    if dtype is not torch.uint8:
        return shape
    return torch.Size([shape.numel() + -(-shape.numel() // _BLOCK)])


def values_of(array: Tensor, name: str, shape: torch.Size) -> Tensor:
    """Returns the values of an array in the shape of its parameter: itself, or decoded to bf16, which is exact."""
    if array.dtype is not torch.uint8:
        return array
    codes = array[: shape.numel()].int()
    exponents = _of_elements(array[shape.numel() :].int(), shape.numel())
    top = _top(name)
    magnitude = codes & top
    bits = (exponents << 23) + ((magnitude - top) << _BELOW_CODE)
    bits = torch.where(magnitude == 0, 0, bits | (codes & ~top) << 24)
    bits = torch.where(exponents == _NOT_FINITE, 0x7FC00000, bits)
    return bits.view(torch.float32).bfloat16().view(shape)


def store_values(array: Tensor, values: Tensor, name: str, random: Tensor | None = None) -> None:
    """Copies values to an array.

    Args:
        array: the array.
        values: in the shape of the parameter.
        name: of the moment.
        random: what `random_bits` returned for the array; None rounds to nearest.
    """
    if array.dtype is torch.uint8:
        _encode(array, values.to(array.device, torch.float32).reshape(-1), name, random)
    elif random is None or array.dtype is torch.float32:
        array.copy_(values)
    else:
        noise = _shifted(random, 16)
        if name in _UNSIGNED:
            noise = (random ^ noise) & 0xFFFF
        rounded = (_bits(values) + noise) >> 16
        array.copy_(rounded.short().view(torch.bfloat16).view(array.shape))


def _encode(array: Tensor, values: Tensor, name: str, random: Tensor | None) -> None:
    numel, top = values.numel(), _top(name)
    bits = _finite_bits(values)
    noise = 1 << (_BELOW_CODE - 1) if random is None else _shifted(random, 32 - _BELOW_CODE)
    magnitude = ((bits & 0x7FFFFFFF) + noise) >> _BELOW_CODE
    blocks = torch.nn.functional.pad(magnitude, (0, -numel % _BLOCK)).view(-1, _BLOCK)
    largest = blocks.amax(1) if numel else blocks[:, 0]
    exponents = ((largest + 7) >> 3).clamp_(min=33)
    spread = _of_elements(exponents, numel)
    codes = (magnitude - (spread << 3) + top).clamp_(min=0)
    if name in _UNSIGNED:
        codes = torch.maximum(codes, magnitude.clamp(max=1))
    else:
        codes |= bits >> 24 & 0x80
    array[:numel].copy_(torch.where(spread == _NOT_FINITE, 0, codes))
    array[numel:].copy_(exponents)


def _of_elements(blocks: Tensor, numel: int) -> Tensor:
    return blocks.repeat_interleave(_BLOCK)[:numel]


def _top(name: str) -> int:
    """Returns the largest code of a magnitude."""
    return 255 if name in _UNSIGNED else 127


def random_bits(dtype: torch.dtype, weight: Tensor, exp_avg: Tensor, step: int) -> Tensor:
    """Returns the random bits of a step for arrays of ``dtype``, int32.

    They are a hash of the weight before and the first moment after the step, for each element: the same for any bounds
    of shards.
    """
    if dtype is torch.uint8:
        bits = weight.reshape(-1).view(torch.int32) ^ _finite_bits(exp_avg)
    else:
        bits = _finite_bits(weight) ^ _bits(exp_avg)
    return (bits ^ _signed(step * 0x9E3779B1)) * _signed(0x85EBCA77)


def _finite_bits(x: Tensor) -> Tensor:
    """Returns the bits of fp32 numbers, flat, every NaN as infinity."""
    bits = x.reshape(-1).view(torch.int32)
    return torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F800000, bits)


def _bits(x: Tensor) -> Tensor:
    """Returns the bits of fp32 numbers, flat, with one NaN for all."""
    bits = x.reshape(-1).view(torch.int32)
    return torch.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits)


def _shifted(bits: Tensor, by: int) -> Tensor:
    return bits >> by & (1 << 32 - by) - 1


def _signed(number: int) -> int:
    """Returns an integer modulo 2^32 as int32 has it."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
