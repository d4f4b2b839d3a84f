"""The link of ranks that share memory under the sanitizers: no report, and every byte where it belongs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_no_report(sanitizers: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "driver"
    comm = ROOT / "csrc" / "comm"
    sources = [ROOT / "tests" / "cpp" / "shm_link_driver.cpp", *sorted(comm.glob("shm_link*.cpp"))]
    sources += [comm / name for name in ("shm_ring.cpp", "shm_segment.cpp", "shm_heap.cpp")]
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    flags += [f"-I{ROOT / 'tests' / 'cpp' / 'stubs'}", f"-I{ROOT / 'csrc'}"]
    flags += ["-Wl,--wrap=mmap", "-Wl,--wrap=munmap"]
    command = [compiler, *flags, "-o", str(program), *(str(s) for s in sources if s.exists())]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0 and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip(f"the compiler has no such sanitizer: {built.stderr.splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    result = subprocess.run([program], capture_output=True, text=True, timeout=120)
    if "unexpected memory mapping" in result.stderr:
        pytest.skip("ThreadSanitizer cannot run with this kernel's address space layout")
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr
    assert result.stderr == ""
