"""The pool of threads for loops over memory under ThreadSanitizer: no report, and every task run once."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.sanitized import build_with_torch, run_driver

UNITS = {
    "driver": [
        "tests/cpp/thread_pool_driver.cpp",
        "csrc/common/thread_pool.cpp",
        "csrc/common/latch.cpp",
        "csrc/common/race_point.cpp",
        "csrc/testing/disturbance.cpp",
    ]
}


@pytest.mark.slow
def test_pool_has_no_data_race(tmp_path: Path) -> None:
    run_driver(build_with_torch(tmp_path, UNITS, "thread"))
