"""Build a wheel that needs no compiler: one core for each release of torch, for this version of Python.

    python csrc/packaging/build_wheel.py [--output FOLDER] [--machine MACHINE] [VERSION ...]

Headers and libraries of each torch VERSION (`installed` is the one that is installed) are taken from its package, which
is downloaded and not installed. With a CUDA toolkit the cores have kernels (BMTRAIN_CUDA=1 requires them, 0 leaves them
out), and the CUDA runtime in them. The wheel is for manylinux_2_28: auditwheel checks that nothing of newer systems
is used. Needs torch, setuptools, ninja, auditwheel, patchelf and g++, for another machine (aarch64, as of Grace Hopper)
its cross compiler (Debian: g++-aarch64-linux-gnu).

[Note: An old glibc on a new system]
A library asks for the newest version of each function that it finds where it is linked. So the core is linked with
stand-ins first: libraries with the names of the system's, which have the functions that changed since, in the version
that manylinux_2_28 knows. What did not exist then is in old_glibc.cpp, which is part of cores in wheels alone.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "wheel"
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
ARCHITECTURES = "7.5;8.0;9.0+PTX"  # all that CUDA 13 supports: later ones by PTX
LIBRARIES = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so")
PLATFORM = "manylinux_2_28"
HERE = os.uname().machine
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}  # of this platform


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a wheel with a core for each release of torch.")
    parser.add_argument("versions", nargs="*", default=TORCHES, metavar="VERSION", help="of torch")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for the wheel")
    parser.add_argument("--machine", choices=("x86_64", "aarch64"), default=HERE, help="default: this one")
    arguments = parser.parse_args()
    machine: str = arguments.machine
    if machine != HERE:
        os.environ.update(cross_environment(machine))
    wheel = build([fetch(version, machine) for version in arguments.versions], machine)
    repaired = repair(wheel, arguments.output, machine)
    print(f"{repaired}: {repaired.stat().st_size / 2**20:.1f} MiB")
    with zipfile.ZipFile(repaired) as archive:
        for file in archive.infolist():
            if file.filename.endswith(".so"):
                print(f"    {file.filename}: {file.file_size / 2**20:.1f} MiB")


def cross_environment(machine: str) -> dict[str, str]:
    """What compilers, setuptools and nvcc read when they build for another machine."""
    tools = f"{machine}-linux-gnu"
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX")).replace(HERE, machine)
    return {
        "CC": f"{tools}-gcc",
        "CXX": f"{tools}-g++",
        "LDCXXSHARED": f"{tools}-g++ -shared",
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
    }


def fetch(version: str, machine: str) -> Path:
    """The package of a torch, as far as the build needs it."""
    if version == "installed":
        import torch

        return Path(torch.__file__).parent
    abi = str(sysconfig.get_config_var("SOABI")).replace(HERE, machine)
    wanted = ("torch/include/", "torch/version.py", *(f"torch/lib/{name}" for name in LIBRARIES))
    return unpack(f"torch=={version}", machine, wanted, PLACE / f"torch-{version}-{abi}") / "torch"


def fetch_cuda_runtime(version: str, machine: str) -> Path:
    """The folder of the static CUDA runtime of another machine; `version` is the toolkit's."""
    package = f"nvidia-cuda-runtime=={version}.*"
    libraries = f"nvidia/cu{version.partition('.')[0]}/lib"
    return unpack(package, machine, (libraries,), PLACE / f"cuda-{version}-{machine}") / libraries


def unpack(requirement: str, machine: str, wanted: tuple[str, ...], folder: Path) -> Path:
    """Files of a package whose names begin with one of `wanted`, in `folder`; downloaded at the first call."""
    if folder.is_dir():
        return folder
    # --no-deps: the packages of CUDA, gigabytes, are not needed to compile and link.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q"]
    if machine != HERE:
        older = (f"manylinux2014_{machine}", f"manylinux_2_27_{machine}", f"{PLATFORM}_{machine}")
        command += ["--only-binary=:all:", *(f"--platform={name}" for name in older)]
    with tempfile.TemporaryDirectory(dir=made(PLACE)) as download:
        run(*command, "-d", download, requirement)
        [wheel] = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(wanted)]
            archive.extractall(Path(download, "unpacked"), names)
        Path(download, "unpacked").rename(folder)
    return folder


def build(torches: list[Path], machine: str) -> Path:
    """A wheel of this tree, without any file of an earlier one."""
    for name in ("lib", "egg", "raw"):
        shutil.rmtree(PLACE / name, ignore_errors=True)
    link_flags = ["-s", "-Wl,--exclude-libs,ALL,--no-as-needed", *map(str, stand_ins())]
    if machine != HERE and (version := cuda_version()):
        link_flags.append(f"-L{fetch_cuda_runtime(version, machine)}")  # before the toolkit's own
    environment = {
        "TORCH_CUDA_ARCH_LIST": ARCHITECTURES,
        **os.environ,
        "BMTRAIN_TORCHES": os.pathsep.join(map(str, torches)),
        "BMTRAIN_TESTING": "0",
        "LDFLAGS": " ".join(link_flags),
    }
    commands = [
        *("egg_info", "--egg-base", made(PLACE / "egg")),
        *("build", "--build-lib", PLACE / "lib"),
        *("bdist_wheel", "--skip-build", "--dist-dir", PLACE / "raw"),
    ]
    run(sys.executable, "-Wignore", "setup.py", "--quiet", *commands, environment=environment)
    [wheel] = (PLACE / "raw").glob("*.whl")
    return wheel


def cuda_version() -> str | None:
    """That of the toolkit that setup.py will use, such as 13.0."""
    setup_script = runpy.run_path(str(ROOT / "setup.py"))
    toolkit = setup_script["find_toolkit"]()
    if toolkit is None or os.environ.get("BMTRAIN_CUDA") == "0":
        return None
    os.environ["CUDA_HOME"] = str(toolkit)
    return str(setup_script["cuda_version"]())


def repair(wheel: Path, output: Path, machine: str) -> Path:
    """Have auditwheel check and name the wheel. torch's libraries are those of the torch that runs."""
    command = [
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--exclude",
        "libtorch*.so",
        "--exclude",
        "libc10*.so",
    ]
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        # Of other machines auditwheel knows no platform by its name: it finds the oldest that fits.
        platform = f"{PLATFORM}_{machine}" if machine == HERE else "auto"
        run(*command, "--plat", platform, "--only-plat", "--wheel-dir", folder, wheel)
        [repaired] = Path(folder).iterdir()
        versions = [(2, int(minor)) for minor in re.findall(r"manylinux_2_(\d+)_", repaired.name)]
        if not versions or min(versions) > NEWEST["GLIBC"]:
            raise SystemExit(f"the wheel needs a newer system than {PLATFORM}: {repaired.name}")
        return Path(shutil.move(repaired, made(output) / repaired.name))


def stand_ins() -> list[Path]:
    """What the core is linked with first. See [Note: An old glibc on a new system]."""
    folder = made(PLACE / "old")
    return [stand_in(name, folder) for name in ("libc.so.6", "libm.so.6", "libstdc++.so.6")]


def stand_in(name: str, folder: Path) -> Path:
    """A library like the system's, but with those functions alone that have newer versions, in the old ones."""
    found = run(compiler(), f"-print-file-name={name}").strip()
    table = run("readelf", "--dyn-syms", "--wide", found)
    names: dict[str, list[str]] = {}  # version -> functions
    for function, versions in functions_of(table).items():
        old = [version for version in versions if is_old(version)]
        if old and not is_old(versions[0]):
            names.setdefault(max(old, key=numbers_of), []).append(function)
    functions = [function for of_version in names.values() for function in of_version]
    text = "".join(
        f".globl {function}\n.type {function},%function\n{function}: ret\n" for function in functions
    )
    (folder / "functions.s").write_text(f'.text\n{text}.section .note.GNU-stack,"",%progbits\n')
    exports = (
        f"{version} {{ global: {'; '.join(of_version)}; }};\n" for version, of_version in names.items()
    )
    (folder / "versions.map").write_text("".join(exports))
    options = [f"-Wl,-soname,{name}", f"-Wl,--version-script={folder / 'versions.map'}"]
    run(compiler(), "-shared", "-nostdlib", *options, folder / "functions.s", "-o", folder / name)
    return folder / name


def functions_of(table: str) -> dict[str, list[str]]:
    """Functions that a library has, each with its versions: first the one that programs are linked with."""
    functions: dict[str, list[str]] = {}
    for line in table.splitlines():
        found = re.search(r" I?FUNC +(?:GLOBAL|WEAK) +DEFAULT +\d+ (\w+)(@@?)([\w.]+)", line)
        if found:
            versions = functions.setdefault(found[1], [])
            versions.insert(0 if found[2] == "@@" else len(versions), found[3])
    return functions


def is_old(version: str) -> bool:
    """Whether the platform has this version of functions.

    >>> is_old("GLIBC_2.2.5"), is_old("GLIBC_2.34"), is_old("GLIBC_PRIVATE")
    (True, False, False)
    """
    numbers = numbers_of(version)
    return bool(numbers) and numbers <= NEWEST.get(version.partition("_")[0], ())


def numbers_of(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    """Runs a program in the tree, showing what it says where it fails. Returns what it prints."""
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


if __name__ == "__main__":
    main()
