"""The link of ranks that share memory under the sanitizers: no report, and every byte where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.sanitized import build_with_torch, run_driver, torch_environment

# Names of the heap are also those of others.
UNITS = {
    "link": [
        *(f"csrc/comm/{name}.cpp" for name in ("shm/shm_link*", "shm/shm_ring", "shm/shm_segment")),
        *(f"csrc/comm/{name}.cpp" for name in ("arguments", "exchange", "host_tensor", "transport")),
        "tests/cpp/shared_mappings.cpp",
        "tests/cpp/shm_link_driver.cpp",
    ],
    "heap": ["csrc/comm/shm/shm_heap*.cpp"],
}


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_no_report(sanitizers: str, tmp_path: Path) -> None:
    wrapped = ("mmap", "munmap", "fallocate")
    run_driver(build_with_torch(tmp_path, UNITS, sanitizers, wrapped), torch_environment())
