"""Small helpers of training scripts: printing, memory, averages, versions."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, TextIO

import torch

from . import global_var
from ._base.arguments import require_integer, require_number, require_tensor
from ._base.host_memory import resident_bytes
from ._base.said import print_whole
from ._ranks import context

__all__ = [
    "AverageRecorder",
    "check_torch_version",
    "load_nccl_pypi",
    "print_block",
    "print_dict",
    "print_rank",
    "round_up",
    "see_memory",
    "tp_split_tensor",
]

_COLUMNS = 60


def round_up(x: int, d: int) -> int:
    """The smallest multiple of ``d`` that is at least ``x``.

    Example:
        >>> round_up(0, 8), round_up(8, 8), round_up(9, 8)
        (0, 8, 16)

    Raises:
        TypeError: an argument is not an integer.
        ValueError: ``d`` is below 1.
    """
    x, d = require_integer("x", x), require_integer("d", d, 1)
    return (x + d - 1) // d * d


def storage_type_cuda(storage_type: type) -> type:
    """The CUDA storage class for a typed-storage class; on a CPU run, the class itself.

    Raises:
        ValueError: if ``storage_type`` is not a typed-storage class.
    """
    name = getattr(storage_type, "__name__", str(storage_type))
    if not (isinstance(storage_type, type) and name.endswith("Storage") and hasattr(torch, name)):
        raise ValueError(
            f"storage_type: expected a typed storage class such as torch.HalfStorage, got {storage_type!r}"
        )
    if context.context().device.type == "cuda":
        return getattr(torch.cuda, name)  # type: ignore[no-any-return]
    return storage_type


def print_rank(*args: Any, rank: int = 0, **kwargs: Any) -> None:
    """`print` on one rank only; the other arguments are passed to `print`.

    Args:
        rank: the rank that prints. Before `init_distributed` every process is rank 0.

    Example:
        >>> print_rank("loss", 0.5, sep=": ")
        loss: 0.5
        >>> print_rank("only rank 7 prints this", rank=7)
    """
    if global_var.rank() == rank:
        print_whole(*args, **kwargs)


def print_block(title: str, content: str | None = None, file: TextIO | None = None) -> None:
    """Prints a banner of 60 columns and, under it, a text; on every rank that calls it.

    Example:
        >>> print_block("Setup", "two ranks")
        ========================== Setup ===========================
        two ranks
    """
    file = sys.stdout if file is None else file
    print(f" {title} ".center(_COLUMNS, "="), file=file)
    if content is not None:
        print(content, file=file)


def print_dict(title: str, mapping: Mapping[Any, Any], file: TextIO | None = None) -> None:
    """Prints a banner and aligned ``key : value`` lines wrapped at 60 columns; on every rank that calls it.

    Example:
        >>> print_dict("Sizes", {"rank": 0, "world_size": 2})
        ========================== Sizes ===========================
        rank       : 0
        world_size : 2
    """
    width = max((len(str(key)) for key in mapping), default=0)
    lines = []
    for key, value in mapping.items():
        head = f"{key!s:<{width}} : "
        room = max(_COLUMNS - len(head), 10)
        wrapped = [piece for line in str(value).splitlines() for piece in textwrap.wrap(line, room)] or [""]
        lines.append((head + wrapped[0]).rstrip())
        lines.extend(" " * len(head) + piece for piece in wrapped[1:])
    print_block(title, "\n".join(lines) if lines else None, file)


def see_memory(message: str, detail: bool = False) -> None:
    """Prints, on rank 0, a message and the memory in use, then starts a new peak. Never raises.

    Args:
        message: printed first.
        detail: on a GPU, print the allocator's full summary.
    """
    if global_var.rank() != 0:
        return
    try:
        print(f"{message}\n{_memory_report(detail)}")
    except Exception as error:  # a report must not end a training run
        print(f"{message}\nmemory: unknown ({error})")


def _memory_report(detail: bool) -> str:
    current = context.current()
    device = torch.device("cpu") if current is None else current.device
    if device.type == "cpu":
        resident, peak = resident_bytes()
        return f"resident memory: {resident / 2**30:.3f} GB, peak: {peak / 2**30:.3f} GB"
    if detail:
        report = torch.cuda.memory_summary(device)
    else:
        used, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        report = f"allocated memory: {used / 2**30:.3f} GB, peak: {peak / 2**30:.3f} GB"
    torch.cuda.reset_peak_memory_stats(device)
    return report


def load_nccl_pypi() -> None:
    """Makes the NCCL library of the ``nvidia-nccl`` package, or the system's, loadable.

    No script needs it: the library finds NCCL by itself when it first uses it.

    Raises:
        ImportError: no NCCL library was found.
    """
    import ctypes

    from ._ranks.comm_nccl import find_candidates

    for candidate in ("libnccl.so.2", *find_candidates()):
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue
    raise ImportError(
        f"no NCCL library found (libnccl.so.2): run `pip install nvidia-nccl-cu{_cuda_major()}`, or install NCCL"
    )


def _cuda_major() -> str:
    """The CUDA that the running torch was built with; without one, the newest that torch is built with."""
    return (torch.version.cuda or "13").partition(".")[0]


class AverageRecorder:
    """Exponential moving average of recorded values, without the bias towards its start.

    After ``n`` values the average is ``s_n / (1 - alpha**n)`` with ``s_0 = 0`` and
    ``s_n = alpha * s_(n-1) + (1 - alpha) * v_n``, as in Kingma and Ba, Adam (2015), section 3.

    Args:
        alpha: weight of the past, ``0 <= alpha < 1``.
        start_value: the average before anything is recorded.

    Example:
        >>> average = AverageRecorder(alpha=0.5)
        >>> average.record(4)
        >>> average.record(1.0)
        >>> average.value
        2.0
    """

    def __init__(self, alpha: float = 0.9, start_value: float = 0) -> None:
        require_number("alpha", alpha)
        require_number("start_value", start_value)
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha: expected 0 <= alpha < 1, got {alpha!r}")
        self.alpha = alpha
        self.start_value = start_value
        self._sum = 0.0
        self._count = 0

    def record(self, v: float | torch.Tensor) -> None:
        """Takes one more value: a number or a tensor of one element."""
        require_number("v", v)
        self._count += 1
        self._sum = self.alpha * self._sum + (1 - self.alpha) * float(v)

    @property
    def value(self) -> float:
        """The average so far, ``start_value`` before the first value."""
        if self._count == 0:
            return self.start_value
        return self._sum / (1 - self.alpha**self._count)


def check_torch_version(version: str) -> int:
    """At least 0 exactly if the running torch is ``version`` or later; suffixes (``+cu121``) do not count.

    Example:
        >>> check_torch_version("1.10.0") >= 0, check_torch_version("99.0.0") >= 0
        (True, False)
    """
    running, wanted = _version_numbers(torch.__version__), _version_numbers(version)
    return (running > wanted) - (running < wanted)


def _version_numbers(version: str) -> tuple[int, int, int]:
    numbers = [int(number) for number in re.findall(r"\d+", str(version).partition("+")[0])[:3]]
    if not numbers:
        raise ValueError(f"version: expected something like '2.1.0', got {version!r}")
    major, minor, patch = (*numbers, 0, 0)[:3]
    return major, minor, patch


def tp_split_tensor(t: torch.Tensor, dim: int) -> torch.Tensor:
    """This tensor-parallel rank's part of ``t``, a contiguous copy.

    Args:
        t: the whole tensor.
        dim: dimension that is split into ``tp_size`` equal parts.

    Raises:
        IndexError: there is no such dimension.
        TypeError: ``t`` is no tensor, or ``dim`` no integer.
        ValueError: the dimension does not divide by ``tp_size``.
        RuntimeError: before `init_distributed`.

    Example:
        >>> import torch, bmtrain
        >>> bmtrain.init_distributed()
        >>> tp_split_tensor(torch.ones(4, 6), dim=1).shape  # (4, 6 / tp_size)
        torch.Size([4, 6])
    """
    place = global_var.context("tp_split_tensor()").topology
    require_tensor("t", t)
    dim = require_integer("dim", dim)
    if not -t.dim() <= dim < t.dim():
        raise IndexError(f"dim: expected one of {t.dim()} dimensions, got {dim}")
    length = t.shape[dim]
    if length % place.tp_size:
        raise ValueError(
            f"t: expected a size along dim {dim} that divides by tp_size {place.tp_size}, "
            f"got shape {tuple(t.shape)}"
        )
    part = length // place.tp_size
    return t.narrow(dim, place.tp_id * part, part).clone(memory_format=torch.contiguous_format)
