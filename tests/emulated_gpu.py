"""Running the CUDA kernels on the host: every thread of every block, every access to memory looked at.

``tests/cuda/emulate/machine.h`` says what is checked. A launch that does what a device would not do right raises
`LaunchFailure`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["EMULATOR", "EmulatedGpu", "LaunchFailure", "Traffic", "dtype_number", "sparse_memory"]

ROOT = Path(__file__).resolve().parents[1]
EMULATOR = ROOT / "tests" / "cuda" / "emulate"
NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}

FLAGS = ("-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
# #pragma unroll is nvcc's, and a kernel file need not use all that its headers define.
KERNEL_FLAGS = ("-fsanitize=thread", "-Wno-unknown-pragmas", "-Wno-unused-function", "-xc++")


class LaunchFailure(Exception):
    """What a thread did that it must not do."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that the threads of a launch moved, for each tensor that it was given."""

    read: list[int]
    written: list[int]


def dtype_number(tensor: Tensor) -> int:
    """The kernels' number of a tensor's dtype."""
    return NUMBERS[tensor.dtype]


def sparse_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros of which only the pages that somebody touches take memory."""
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python does not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)


class EmulatedGpu:
    """Kernels of ``csrc/cuda``, or of other files, on an emulated device.

    Args:
        folder: where to build.
        kernels: CUDA sources.
        entries: C++ sources that define what `launch` calls.
    """

    def __init__(self, folder: Path, kernels: Sequence[Path], entries: Sequence[Path]) -> None:
        includes = [f"-I{ROOT / 'csrc'}", f"-I{EMULATOR}", f"-I{EMULATOR / 'include'}"]
        compiler = os.environ.get("CXX", "c++")
        plain = [*entries, EMULATOR / "machine.cpp", EMULATOR / "accesses.cpp"]

        def compiled(source: Path) -> Path:
            out = folder / f"{source.name}.o"
            extra = KERNEL_FLAGS if source in kernels else ()
            command = [compiler, *FLAGS, *includes, *extra, "-c", str(source), "-o", str(out)]
            subprocess.run(command, check=True, timeout=300)
            return out

        with ThreadPoolExecutor(2) as pool:
            objects = list(pool.map(compiled, [*kernels, *plain]))
        library = folder / "emulated.so"
        subprocess.run([compiler, "-shared", *map(str, objects), "-o", str(library)], check=True, timeout=300)
        self._library = ctypes.CDLL(str(library))
        self._library.emulate_failure.restype = ctypes.c_char_p
        self._seed = 0

    def only_blocks(self, *blocks: int) -> None:
        """Run these blocks of each later launch; without an argument all."""
        self._library.emulate_only_blocks((ctypes.c_uint * len(blocks))(*blocks), len(blocks))

    def launch(
        self, name: str, *arguments: object, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> Traffic:
        """Call a host function that launches kernels, in another order of threads each time.

        Args:
            name: the function.
            arguments: its arguments; tensors and None are pointers, ints 64 bits wide.
            reads: memory that the kernels may read.
            writes: memory that they may read and write.

        Returns:
            What they moved: in the tensors of `reads`, then of `writes`.

        Raises:
            LaunchFailure: a kernel did what it must not do.
            ValueError: the function returned cudaErrorInvalidValue.
        """
        library = self._library
        self._seed += 1
        library.emulate_seed(ctypes.c_uint64(self._seed))
        try:
            given = [(t, False) for t in reads] + [(t, True) for t in writes]
            for index, (tensor, is_writable) in enumerate(given):
                size = ctypes.c_int64(tensor.numel() * tensor.element_size())
                label = f"{'output' if is_writable else 'input'} {index}".encode()
                library.emulate_give(ctypes.c_void_p(tensor.data_ptr()), size, int(is_writable), label)
            code = library[name](*map(_argument, arguments))
            if failure := library.emulate_failure().decode():
                raise LaunchFailure(f"{name}: {failure}")
            if code != 0:
                raise ValueError(f"{name}: CUDA error {code}")
            counts = [self._counts(index) for index in range(len(given))]
            return Traffic([read for read, _ in counts], [written for _, written in counts])
        finally:
            library.emulate_take_back()

    def sector_share(self, name: str, *arguments: object, **memory: Sequence[Tensor]) -> float:
        """Launch; return which share of the sectors that its warps asked for the threads used."""
        library = self._library
        library.emulate_count_requests(1)
        try:
            self.launch(name, *arguments, **memory)
            used, fetched = ctypes.c_int64(), ctypes.c_int64()
            library.emulate_requests(ctypes.byref(used), ctypes.byref(fetched))
            return used.value / fetched.value
        finally:
            library.emulate_count_requests(0)

    def _counts(self, index: int) -> tuple[int, int]:
        read, written = ctypes.c_int64(), ctypes.c_int64()
        self._library.emulate_counts(index, ctypes.byref(read), ctypes.byref(written))
        return read.value, written.value


def _argument(value: object) -> object:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_double(value)
    return value
