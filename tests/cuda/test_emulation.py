"""The emulated device finds out what a kernel must not do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_gpu import EMULATOR, EmulatedGpu, LaunchFailure


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    return EmulatedGpu(tmp_path_factory.mktemp("faults"), [Path(EMULATOR / "faults.cu")], [])


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("beyond_the_end", r"4 bytes out of bounds, at byte \d+ of output 0 \(17 bytes\)"),
        ("misaligned", "16 bytes at byte 4 of output 0 .* not aligned"),
        ("barrier_of_half", "32 threads wait at a barrier, 0 at a shuffle, 32 have ended"),
        ("shuffle_of_half", "0 threads wait at a barrier, 32 at a shuffle, 32 have ended"),
        ("no_barrier", "a race on shared memory|that no thread of the block has written"),
        ("second_write_too_early", "a race on shared memory"),
        ("never_written", "that no thread of the block has written"),
        ("same_place", "two threads at byte 0 of output 0"),
    ],
)
def test_faults(faulty: EmulatedGpu, kernel: str, message: str) -> None:
    x = torch.zeros(17, dtype=torch.uint8)
    with pytest.raises(LaunchFailure, match=message):
        faulty.launch(f"run_{kernel}", x, 5, writes=[x])


def test_input_is_not_written(faulty: EmulatedGpu) -> None:
    x = torch.zeros(4)
    with pytest.raises(LaunchFailure, match="block 0, thread .*: a write to byte 0 of input 0"):
        faulty.launch("run_writes_input", x, 4, reads=[x])


def test_a_right_kernel_runs(faulty: EmulatedGpu) -> None:
    x = torch.zeros(4)
    traffic = faulty.launch("run_right", x, 4, writes=[x])
    assert x.tolist() == [4.0] * 4
    assert (traffic.read, traffic.written) == ([0], [16])
