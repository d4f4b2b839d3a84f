"""Run a command on a simulated CUDA device: torch's own CUDA build, and no GPU.

    python tests/cuda/simulate.py [--devices N] [--delay MICROSECONDS] [--protect] COMMAND ...

torch (a build with CUDA) is real, with its allocator, streams, events and checks, and so is this library but for its
kernels, which tests/cuda/emulate runs. Simulated are the CUDA runtime (tests/cuda/simulated/runtime.cpp), what torch's
kernels compute (operators.cpp, on the host), and NCCL (nccl.cpp, between processes). Streams are threads, so what no
event orders goes wrong. Times mean nothing.

The command runs in a copy of this checkout under build/simulated, whose core is linked with the emulated kernels.
Needs nvcc, whose objects are compiled as ever, for a first run about six minutes of one processor.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "simulated"
CHECKOUT, LIBRARIES = PLACE / "checkout", PLACE / "lib"
SIMULATED = CHECKOUT / "tests" / "cuda" / "simulated"
TOOLKIT = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=1, help="devices that each process sees (default: 1)")
    parser.add_argument("--memory", type=int, default=4 << 30, help="bytes of each (default: 4 GiB)")
    parser.add_argument(
        "--delay", type=int, default=0, help="longest delay of work in a stream, in microseconds"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the delays")
    parser.add_argument("--serial", action="store_true", help="every call waits until its work is done")
    parser.add_argument(
        "--protect", action="store_true", help="end processes whose host touches device memory"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("no command")
    copy_checkout()
    build()
    with tempfile.TemporaryDirectory(prefix="simulated-nccl-", dir="/dev/shm") as folder:
        environment = {**os.environ, **surroundings(folder)}
        for name in ("devices", "memory", "delay", "seed"):
            environment[f"SIMULATED_CUDA_{name.upper()}"] = str(getattr(arguments, name))
        for name in ("serial", "protect"):
            environment[f"SIMULATED_CUDA_{name.upper()}"] = str(int(getattr(arguments, name)))
        return subprocess.run(arguments.command, cwd=CHECKOUT, env=environment, check=False).returncode


def surroundings(folder: str) -> dict[str, str]:
    """What makes a process of any program see the simulated devices."""
    return {
        "LD_PRELOAD": f"{LIBRARIES / 'libcudart.so.13'} {LIBRARIES / 'libcuda.so.1'}",
        "SIMULATED_CUDA_OPERATORS": str(LIBRARIES / "liboperators.so"),
        "SIMULATED_NCCL_FOLDER": folder,
        "BMTRAIN_NCCL_LIBRARY": str(LIBRARIES / "libnccl.so"),
        "CUDA_HOME": str(TOOLKIT),
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def copy_checkout() -> None:
    """Bring the copy up to date; files that have not changed keep their times, so that little is compiled again."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    wanted = {name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()}
    for name in wanted:
        source, copy = ROOT / name, CHECKOUT / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy)
    for folder in ("bmtrain", "csrc", "tests", "example"):
        for copy in (CHECKOUT / folder).rglob("*.[pch]*"):
            if copy.suffix != ".pyc" and copy.is_file() and str(copy.relative_to(CHECKOUT)) not in wanted:
                copy.unlink()


def build() -> None:
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    toolkit = [f"-I{TOOLKIT / 'include'}"]
    runtime = [SIMULATED / name for name in ("runtime.cpp", "device.cpp", "not_simulated.cpp")]
    version = f"-Wl,-Bsymbolic,-soname,libcudart.so.13,--version-script={SIMULATED / 'runtime.map'}"
    link("libcudart.so.13", runtime, [*toolkit, version, "-lpthread", "-ldl"])
    link("libcuda.so.1", [SIMULATED / "driver.cpp"], [*toolkit, "-Wl,-soname,libcuda.so.1"])
    with_runtime = [f"-L{TOOLKIT / 'lib64'}", "-lcudart"]
    link("libnccl.so", [SIMULATED / "nccl.cpp"], [*toolkit, f"-I{CHECKOUT / 'csrc'}", *with_runtime])
    torch = torch_folder()
    headers = [f"-isystem{torch / 'include' / name}" for name in ("", "torch/csrc/api/include")]
    libraries = [
        f"-L{torch / 'lib'}",
        *(f"-l{name}" for name in ("c10", "c10_cuda", "torch_cpu", "torch_cuda")),
    ]
    link(
        "liboperators.so",
        [SIMULATED / "operators.cpp"],
        [*headers, f"-isystem{TOOLKIT / 'include'}", *libraries],
    )
    build_core(torch)


def build_core(torch: Path) -> None:
    """The extension as setup.py builds it, linked again with the emulated kernels."""
    environment = {**os.environ, "BMTRAIN_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=CHECKOUT, env=environment, check=True)
    (core,) = (CHECKOUT / "bmtrain").glob(f"_C.{sys.implementation.cache_tag}-*.so")
    (plan,) = (CHECKOUT / "build").glob(f"core-*-{sys.implementation.cache_tag}-torch*/build.ninja")
    csrc, emulate = CHECKOUT / "csrc", CHECKOUT / "tests" / "cuda" / "emulate"
    built = re.findall(r"^build (\S+\.o):", plan.read_text(), flags=re.MULTILINE)
    kept = [path for path in map(Path, built) if path.parts[-3:-1] != ("csrc", "cuda")]
    common = ["-ffp-contract=off", "-fvisibility=hidden", f"-I{csrc}", f"-I{emulate}"]
    kernel = [*common, f"-I{emulate / 'include'}", "-Wno-unknown-pragmas", "-Wno-unused-function", "-xc++"]
    runtime = [*common, f"-I{TOOLKIT / 'include'}"]
    parts = dict.fromkeys((csrc / "cuda").glob("*.cu"), kernel)
    parts |= {emulate / "machine.cpp": common, SIMULATED / "kernels.cpp": runtime}
    for source, flags in parts.items():
        kept.append(LIBRARIES / f"{source.stem}.o")
        run([*FLAGS, *flags, "-c", str(source), "-o", str(kept[-1])], kept[-1], [source])
    names = ("c10", "torch", "torch_cpu", "torch_python", "cudart")
    places = [f"-L{torch / 'lib'}", f"-L{TOOLKIT / 'lib64'}"]
    core.unlink()  # a process may have it mapped
    run(["-shared", *map(str, kept), *places, *(f"-l{name}" for name in names), "-o", str(core)], core, kept)


def torch_folder() -> Path:
    import torch

    if torch.version.cuda is None:
        raise SystemExit(
            f"simulate.py needs a torch built with CUDA 13, and torch {torch.__version__} is not"
        )
    return Path(torch.__file__).parent


def link(name: str, sources: Sequence[Path], flags: Sequence[str]) -> None:
    """A shared library of `sources`."""
    command = [*FLAGS, "-shared", *map(str, sources), *flags, "-o", str(LIBRARIES / name)]
    run(command, LIBRARIES / name, sources)


def run(arguments: Sequence[str], target: Path, sources: Sequence[Path]) -> None:
    """Call the compiler unless `target` is newer than its sources and all headers."""
    headers = [path for folder in ("csrc", "tests/cuda") for path in (CHECKOUT / folder).rglob("*.h")]
    newest = max(path.stat().st_mtime for path in [*sources, *headers])
    if target.exists() and target.stat().st_mtime > newest:
        return
    subprocess.run([os.environ.get("CXX", "c++"), *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
