"""Runs clang-tidy over the C++ core with the checks of ``.clang-tidy``, contracts of mutexes among them.

    python tests/tidy.py

Most of the time goes to torch's headers, so the sources of several folders are checked as one unit. The kernels, which
are compiled for several instruction sets, and CUDA sources are left out. Exit status 1 if there is a warning.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Patterns of sources, checked at the same time. Files of one unit must not define the same names.
UNITS = {
    "comm": ("comm/**/*.cpp", "common/*.cpp"),
    "shard": ("shard/*.cpp", "optim/*.cpp", "ops/ops*.cpp", "disk/*.cpp"),
}
WARNINGS = ("-Wall", "-Wextra", "-Wthread-safety")


def flags() -> list[str]:
    from torch.utils.cpp_extension import include_paths

    system = [*include_paths(), sysconfig.get_path("include")]
    defines = ["-DAT_PER_OPERATOR_HEADERS", "-DTORCH_EXTENSION_NAME=_C"]
    return ["-std=c++20", f"-I{ROOT / 'csrc'}", *(f"-isystem{path}" for path in system), *defines, *WARNINGS]


def check(unit: Path) -> str:
    """Warnings of one unit."""
    command = [str(Path(sys.executable).with_name("clang-tidy")), "--quiet", "--warnings-as-errors=*"]
    command += [f"--config-file={ROOT / '.clang-tidy'}", str(unit), "--", *flags()]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr if result.returncode != 0 else ""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        units = []
        for name, patterns in UNITS.items():
            sources = [source for pattern in patterns for source in sorted((ROOT / "csrc").glob(pattern))]
            sources = [source for source in sources if not source.stem.endswith("_cuda")]
            units.append(Path(folder, f"{name}.cpp"))
            units[-1].write_text("".join(f'#include "{source}"\n' for source in sources))
        found = [output for output in pool.map(check, units) if output]
    print("\n".join(found), end="", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
