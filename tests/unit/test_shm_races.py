"""The link of ranks that share memory under the sanitizers: no report, and every byte where it belongs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness.sanitized import compile_or_skip, compiler, run_driver
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).parents[2]
COMM = ROOT / "csrc" / "comm"
# What is compiled in one go: torch's headers are most of the work. (Names of the heap are also those of others.)
UNITS = {
    "link": ["shm_link*.cpp", "shm_ring.cpp", "shm_segment.cpp", "host_tensor.cpp"],
    "heap": ["shm_heap*.cpp"],
}
SANITIZERS = {"thread": "-O1", "address,undefined": "-O0"}  # what compiles and runs in the shortest time


def build(program: str, sanitizers: str, folder: Path) -> Path:
    """The driver, the link, and torch's libraries as they are."""
    folder.mkdir()
    flags = ["-std=c++20", SANITIZERS[sanitizers], "-g1", "-pthread"]
    flags += [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    flags += [f"-I{ROOT / 'csrc'}", *(f"-isystem{path}" for path in include_paths())]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    sources = {name: [f for pattern in UNITS[name] for f in sorted(COMM.glob(pattern))] for name in UNITS}
    sources["link"].append(ROOT / "tests" / "cpp" / "shm_link_driver.cpp")
    for name, files in sources.items():
        (folder / f"{name}.cpp").write_text("".join(f'#include "{file}"\n' for file in files))
        compile_or_skip([program, *flags, "-c", str(folder / f"{name}.cpp"), "-o", str(folder / f"{name}.o")])
    libraries = [f"-L{path}" for path in library_paths()] + [f"-Wl,-rpath,{path}" for path in library_paths()]
    libraries += ["-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-Wl,--wrap=mmap", "-Wl,--wrap=munmap"]
    objects = [str(folder / f"{name}.o") for name in sources]
    compile_or_skip([program, *flags, *objects, *libraries, "-o", str(folder / "driver")])
    return folder / "driver"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The driver with each sanitizer, compiled at the same time."""
    found, folder = compiler(), tmp_path_factory.mktemp("driver")
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda name: build(found, name, folder / name), SANITIZERS)
        return dict(zip(SANITIZERS, made, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", SANITIZERS)
def test_no_report(sanitizers: str, programs: dict[str, Path]) -> None:
    # torch's own libraries free nothing at their end.
    environment = {"ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin"}
    run_driver(programs[sanitizers], environment)
