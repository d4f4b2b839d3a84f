"""The pool of threads for loops over memory under ThreadSanitizer: no report, and every task run once."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.sanitized import build_driver, run_driver
from torch.utils.cpp_extension import include_paths, library_paths

SOURCES = (
    "tests/cpp/thread_pool_driver.cpp",
    "csrc/common/thread_pool.cpp",
    "csrc/common/delays.cpp",
    "csrc/common/float_environment.cpp",
)


@pytest.mark.slow
def test_pool_has_no_data_race(tmp_path: Path) -> None:
    options = [f"-isystem{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
    options += [f"-Wl,-rpath,{path}" for path in library_paths()]
    options += ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
    run_driver(build_driver(tmp_path, SOURCES, "thread", options))
