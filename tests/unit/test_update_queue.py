"""The queue of background updates under ThreadSanitizer: no report, and every chunk computed once."""

from __future__ import annotations

from pathlib import Path

from harness.sanitized import build_driver, run_driver

SOURCES = (
    "tests/cpp/update_queue_driver.cpp",
    "csrc/optim/update_queue.cpp",
)


def test_queue_has_no_data_race(tmp_path: Path) -> None:
    run_driver(build_driver(tmp_path, SOURCES, "thread"))
