"""Calls of torch's functions with CUDA devices in their arguments. See [Note: How a call is redirected]."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CudaToCpu", "called_by_library", "is_cuda", "on_cpu"]

_CPU = "cpu"
_LIBRARIES = ("torch", "bmtrain")
_Call = Callable[..., Any]


def is_cuda(device: object) -> bool:
    """Whether an argument names a CUDA device: ``"cuda:1"``, ``torch.device("cuda")``, or a bare index."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def on_cpu(device: Any) -> Any:
    """The device to use instead of a CUDA device; any other as it is."""
    return torch.device(_CPU) if is_cuda(device) else device


def called_by_library(depth: int = 2) -> bool:
    """Whether the function ``depth`` frames up belongs to torch or bmtrain rather than to the script."""
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return name.partition(".")[0] in _LIBRARIES


class CudaToCpu(TorchFunctionMode):
    """Replaces cuda devices in the arguments of torch's functions."""

    def __init__(self, count: _Call) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self._count, func, args, kwargs)
        if kwargs.get("device") is not None and is_cuda(kwargs["device"]):
            self._count(f'{_name(func)}(device="cuda")')
            kwargs["device"] = torch.device(_CPU)
        if kwargs.get("pin_memory"):
            self._count(f"{_name(func)}(pin_memory=True)")
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))


def _device(count: _Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.device(...)"""
    kind = args[0] if args else kwargs.get("type", kwargs.get("device"))
    if not is_cuda(kind):
        return func(*args, **kwargs)
    count('torch.device("cuda")')
    return func(_CPU)  # without an index: tensors of the CPU have none either


def _move(count: _Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tensor.to(...) and the parser of module.to(...)"""
    first = 0 if func is torch._C._nn._parse_to else 1
    given = list(args)
    if len(given) > first and is_cuda(given[first]):
        given[first] = torch.device(_CPU)
        count('.to("cuda")')
    if kwargs.get("device") is not None and is_cuda(kwargs["device"]):
        kwargs["device"] = torch.device(_CPU)
        count('.to("cuda")')
    return func(*given, **kwargs)


def _cuda(count: _Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tensor.cuda()"""
    count(".cuda()")
    return args[0]


def _cpu(count: _Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tensor.cpu(): a copy for the script, as from a GPU; it may change the original afterwards."""
    x = func(*args, **kwargs)
    return x.clone() if x is args[0] and not called_by_library(depth=3) else x


def _pin(count: _Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tensor.pin_memory()"""
    count(".pin_memory()")
    return args[0]


def _is_cuda(count: _Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tensor.is_cuda: True for the script."""
    if called_by_library(depth=3):
        return func(*args, **kwargs)
    count(".is_cuda")
    return True


def _type(count: _Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """tensor.type("torch.cuda.FloatTensor")"""
    if len(args) > 1 and isinstance(args[1], str) and args[1].startswith("torch.cuda."):
        count('.type("torch.cuda...")')
        args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
    return func(*args, **kwargs)


_SPECIAL: dict[Any, _Call] = {
    torch.device: _device,
    torch.Tensor.to: _move,
    torch._C._nn._parse_to: _move,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.type: _type,
    torch.Tensor.is_cuda.__get__: _is_cuda,  # type: ignore[attr-defined]
}
