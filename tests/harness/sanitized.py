"""Programs of C++ that drive a part of the core under a sanitizer of the compiler."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

__all__ = ["build_driver", "compile_or_skip", "compiler", "run_driver"]

ROOT = Path(__file__).parents[2]


def compiler() -> str:
    """The C++ compiler; skips the test where there is none."""
    found = shutil.which("g++") or shutil.which("c++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def compile_or_skip(command: Sequence[str]) -> None:
    """Compile; skips the test if the compiler came without the sanitizer's library."""
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0 and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no such sanitizer: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr


def build_driver(folder: Path, sources: Sequence[str], sanitizers: str, options: Sequence[str] = ()) -> Path:
    """A program of sources, named from the top of the tree; ``options`` come after them."""
    program = folder / "driver"
    flags = ["-std=c++20", "-O1", "-g1", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    files = [str(ROOT / source) for source in sources]
    compile_or_skip([compiler(), *flags, f"-I{ROOT / 'csrc'}", *files, *options, "-o", str(program)])
    return program


def run_driver(program: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run it: it must print ``ok``, and no sanitizer may report anything."""
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, env=environment)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("ThreadSanitizer cannot run with this kernel's address space layout")
    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", "")
