"""Flight recorder and watchdog under the sanitizers: no report, one verdict, nobody forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.sanitized import build_driver, run_driver

SOURCES = (
    "tests/cpp/watchdog_driver.cpp",
    "csrc/comm/guard/watchdog.cpp",
    "csrc/comm/guard/flight_recorder.cpp",
)


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_no_report(sanitizers: str, tmp_path: Path) -> None:
    run_driver(build_driver(tmp_path, SOURCES, sanitizers))
