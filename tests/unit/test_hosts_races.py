"""The communicators of several hosts and, below it, over Gloo under the sanitizers: no report, and every byte right."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.sanitized import build_with_torch, run_driver, torch_environment

# Most files include torch's headers, which take longer to compile than they do: they are one unit.
UNITS = {
    "driver": [
        "tests/cpp/shared_mappings.cpp",
        "tests/cpp/thread_backend.cpp",
        "tests/cpp/hosts_driver.cpp",
        "csrc/comm/hosts/hosts_communicator.cpp",
        "csrc/comm/gloo/gloo_*.cpp",
        *(
            f"csrc/comm/{name}.cpp"
            for name in ("arguments", "exchange", "exchange_communicator", "ordered_reduce", "transport")
        ),
        "csrc/comm/shm/shm_communicator.cpp",
        "csrc/comm/host_tensor.cpp",
        "csrc/common/tensor_dtype.cpp",
    ],
    "link": ["csrc/comm/shm/shm_link*.cpp", "csrc/comm/shm/shm_ring.cpp", "csrc/comm/shm/shm_segment.cpp"],
    "heap": ["csrc/comm/shm/shm_heap*.cpp"],
}


@pytest.mark.slow
def test_no_data_race(tmp_path: Path) -> None:
    run_driver(build_with_torch(tmp_path, UNITS, "thread", ("mmap", "munmap")), torch_environment())
