"""How the level of the CPU kernels is chosen, and that it costs nothing but speed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_levels import LEVELS, level

from bmtrain import _C


def run(isa: str, code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BMTRAIN_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100
    )


def test_environment_forces_a_level_down() -> None:
    result = run("base", "import torch; from bmtrain import _C; print(_C.cpu_isa())")
    assert result.stdout.split() == ["base"], result.stderr


def test_unknown_level_is_an_error() -> None:
    code = "import torch; from bmtrain import _ops; _ops.squared_sum([torch.ones(1)])"
    result = run("sse9", code)
    assert result.returncode != 0
    assert "BMTRAIN_CPU_ISA: expected base, avx2 or avx512, got 'sse9'" in result.stderr


def test_unsupported_level_is_an_error() -> None:
    missing = {"base", "avx2", "avx512"} - set(LEVELS)
    if not missing:
        pytest.skip("this machine has every level")
    for name in missing:
        with pytest.raises(ValueError, match=f"expected a level this machine has .*, got {name}"):
            _C.force_cpu_isa(name)


def test_level_of_a_process_is_the_highest_unless_forced() -> None:
    if "BMTRAIN_CPU_ISA" not in os.environ:
        assert _C.cpu_isa() == _C.highest_cpu_isa() == LEVELS[-1]
    with level("base"):
        assert _C.cpu_isa() == "base"
    with pytest.raises(ValueError, match="level: expected base, avx2 or avx512, got 'neon'"):
        _C.force_cpu_isa("neon")


def test_base_object_needs_no_wide_registers() -> None:
    """What every processor must be able to run contains no AVX: checked where the object files are kept."""
    root = Path(_C.__file__).parent.parent
    objects = sorted(root.glob("build/**/csrc/cpu/base.o"))
    if not objects:
        pytest.skip("no object files beside the package")
    try:
        listing = subprocess.run(
            ["objdump", "-d", str(objects[-1])], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except FileNotFoundError:
        pytest.skip("no objdump")
    assert "xmm" in listing
    assert "ymm" not in listing
    assert "zmm" not in listing
