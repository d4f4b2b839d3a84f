"""The parts of the core that need no torch, compiled for 64-bit Arm and run by an emulator.

The emulator runs on one processor's memory model, so it shows results, not whether a barrier is missing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from harness.sanitized import ROOT, compile_or_skip, compile_unit, compiler

DRIVER = ("tests/cpp/kernels_driver.cpp", "csrc/disk/checksum.cpp")
KERNELS = (*DRIVER, "csrc/cpu/isa.cpp", "csrc/cpu/base.cpp")
#: Objects of the core that runs the tests; levels of other processors are empty.
FOLDER = f"core-{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch{torch.__version__}"
OBJECTS = ROOT / "build" / FOLDER / "csrc" / "cpu"
LEVELS = ("isa", "base", "avx2", "avx512", "neon")
DRIVERS = {
    "update queue": (
        "tests/cpp/update_queue_driver.cpp",
        "csrc/optim/update_queue.cpp",
    ),
    "watchdog": (
        "tests/cpp/watchdog_driver.cpp",
        "csrc/comm/guard/watchdog.cpp",
        "csrc/comm/guard/flight_recorder.cpp",
    ),
}


def build(
    command: str, level: str, sources: Sequence[str], folder: Path, objects: Sequence[Path] = ()
) -> Path:
    """A program of sources, each compiled by itself, and of objects."""
    folder.mkdir()
    flags = [command, "-std=c++20", level, "-ffp-contract=off", "-pthread"]
    made = [compile_unit(folder, Path(source).stem, [source], flags) for source in sources]
    compile_or_skip([*flags, *made, *map(str, objects), "-o", "driver"], folder)
    return folder / "driver"


def compile_for_arm(
    sources: Sequence[str], folder: Path
) -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Compiles a program; what is returned runs it with an argument."""
    cross, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if cross is None or emulator is None:
        pytest.skip("no compiler for aarch64, or no emulator (Debian: g++-aarch64-linux-gnu, qemu-user)")
    program = build(cross, "-O1", sources, folder / "arm")
    command = [emulator, "-L", "/usr/aarch64-linux-gnu", str(program)]
    return lambda argument: subprocess.run([*command, argument], capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_kernels_have_the_bits_of_x86(tmp_path: Path) -> None:
    run = compile_for_arm([*KERNELS, "csrc/cpu/neon.cpp"], tmp_path)
    objects = [OBJECTS / f"{level}.o" for level in LEVELS]
    compiled = all(made.exists() for made in objects)
    sources = () if compiled else [f"csrc/cpu/{level}.cpp" for level in LEVELS]
    here = build(compiler(), "-O0", [*DRIVER, *sources], tmp_path / "here", objects if compiled else ())
    expected = subprocess.run([here, "base"], capture_output=True, text=True, check=True).stdout
    assert len(expected.splitlines()) > 50
    for level in ("base", "neon"):
        result = run(level)
        assert (result.stdout, result.stderr) == (expected, ""), level
    assert "expected base or neon, got 'avx2'" in run("avx2").stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", list(DRIVERS))
def test_threads(name: str, tmp_path: Path) -> None:
    result = compile_for_arm(DRIVERS[name], tmp_path)("")
    assert (result.stdout, result.stderr) == ("ok\n", "")
