"""Updates of parameters on a device under ThreadSanitizer: no report, and every weight right at every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.sanitized import build_with_torch, run_driver, torch_environment

UNITS = {
    "driver": [
        "tests/cpp/staged_copies_driver.cpp",
        *(
            f"csrc/optim/{name}.cpp"
            for name in (
                "staged_copies", "sent_gradients", "staging_lane", "update_queue", "step_tensors",
                "offload_update", "momentum", "step_check", "step_journal",
            )
        ),
        *(
            f"csrc/common/{name}.cpp"
            for name in (
                "thread_pool", "latch", "tensor_dtype", "race_point", "device_event",
            )
        ),
        "csrc/testing/disturbance.cpp",
    ]  # one unit: torch's headers take longer to compile than all of these
}  # fmt: skip
# at::Tensor::copy_ and zero_, which torch was not compiled with the sanitizer for.
WRAPPED = ("_ZN2at4_ops5copy_4callERNS_6TensorERKS2_b", "_ZN2at4_ops5zero_4callERNS_6TensorE")


@pytest.mark.slow
def test_no_data_race(tmp_path: Path) -> None:
    run_driver(build_with_torch(tmp_path, UNITS, "thread", WRAPPED), torch_environment())
