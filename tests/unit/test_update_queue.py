"""The queue of background updates under ThreadSanitizer: no report, and every chunk computed once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = (
    "tests/cpp/update_queue_driver.cpp",
    "csrc/optim/update_queue.cpp",
    "csrc/common/float_environment.cpp",
)


def build(folder: Path) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = folder / "driver"
    flags = ["-std=c++20", "-O1", "-g", "-pthread", "-fsanitize=thread", f"-I{ROOT / 'csrc'}"]
    command = [compiler, *flags, "-o", str(program), *(str(ROOT / source) for source in SOURCES)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0 and "tsan" in built.stderr:
        pytest.skip(f"the compiler has no ThreadSanitizer: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    return program


def test_queue_has_no_data_race(tmp_path: Path) -> None:
    program = build(tmp_path)
    result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("ThreadSanitizer cannot run with this kernel's address space layout")
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr
    assert "ThreadSanitizer" not in result.stderr
