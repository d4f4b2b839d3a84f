"""The pool of threads for loops over memory under ThreadSanitizer: no report, and every task run once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).parents[2]
SOURCES = (
    "tests/cpp/thread_pool_driver.cpp",
    "csrc/common/thread_pool.cpp",
    "csrc/common/delays.cpp",
    "csrc/common/float_environment.cpp",
)


@pytest.mark.slow
def test_pool_has_no_data_race(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "driver"
    flags = ["-std=c++20", "-O1", "-g1", "-pthread", "-fsanitize=thread", f"-I{ROOT / 'csrc'}"]
    flags += [f"-isystem{path}" for path in include_paths()]
    libraries = [f"-L{path}" for path in library_paths()] + [f"-Wl,-rpath,{path}" for path in library_paths()]
    libraries += ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
    sources = [str(ROOT / source) for source in SOURCES]
    built = subprocess.run(
        [compiler, *flags, *sources, *libraries, "-o", str(program)], capture_output=True, text=True
    )
    if built.returncode != 0 and "tsan" in built.stderr:
        pytest.skip(f"the compiler has no ThreadSanitizer: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("ThreadSanitizer cannot run with this kernel's address space layout")
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr
    assert "ThreadSanitizer" not in result.stderr
