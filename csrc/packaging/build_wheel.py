"""Build a wheel that needs no compiler: one core for each release of torch, for this Python and machine.

    python csrc/packaging/build_wheel.py [--output FOLDER] [VERSION ...]

Headers and libraries of each torch VERSION (`installed` is the one that is installed) are taken from its package, which
is downloaded and not installed. With a CUDA toolkit the cores have kernels (BMTRAIN_CUDA=1 requires them, 0 leaves them
out), and the CUDA runtime in them. The wheel is for manylinux_2_28: auditwheel checks that nothing of newer systems
is used. Needs torch, setuptools, ninja, auditwheel, patchelf and g++.

[Note: An old glibc on a new system]
A library asks for the newest version of each function that it finds where it is linked. So the core is linked with
stand-ins first: libraries with the names of the system's, which have the functions that changed since, in the version
that manylinux_2_28 knows. What did not exist then is in old_glibc.cpp, which is part of cores in wheels alone.
"""

from __future__ import annotations

import argparse
import os
import re
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
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}  # of this platform


def main() -> None:
    parser = argparse.ArgumentParser(description="Build a wheel with a core for each release of torch.")
    parser.add_argument("versions", nargs="*", default=TORCHES, metavar="VERSION", help="of torch")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for the wheel")
    arguments = parser.parse_args()
    wheel = build([fetch(version) for version in arguments.versions])
    repaired = repair(wheel, arguments.output)
    print(f"{repaired}: {repaired.stat().st_size / 2**20:.1f} MiB")
    with zipfile.ZipFile(repaired) as archive:
        for file in archive.infolist():
            if file.filename.endswith(".so"):
                print(f"    {file.filename}: {file.file_size / 2**20:.1f} MiB")


def fetch(version: str) -> Path:
    """The package of a torch, as far as the build needs it."""
    if version == "installed":
        import torch

        return Path(torch.__file__).parent
    folder = PLACE / f"torch-{version}-{sysconfig.get_config_var('SOABI')}" / "torch"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=made(PLACE)) as download:
        # --no-deps: the packages of CUDA, gigabytes, are not needed to compile and link.
        run(sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", download, f"torch=={version}")
        [wheel] = Path(download).glob("torch-*.whl")
        wanted = ("torch/include/", "torch/version.py", *(f"torch/lib/{name}" for name in LIBRARIES))
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(wanted)]
            archive.extractall(Path(download, "unpacked"), names)
        folder.parent.mkdir()
        Path(download, "unpacked", "torch").rename(folder)
    return folder


def build(torches: list[Path]) -> Path:
    """A wheel of this tree, without any file of an earlier one."""
    for name in ("lib", "egg", "raw"):
        shutil.rmtree(PLACE / name, ignore_errors=True)
    environment = {
        "TORCH_CUDA_ARCH_LIST": ARCHITECTURES,
        **os.environ,
        "BMTRAIN_TORCHES": os.pathsep.join(map(str, torches)),
        "BMTRAIN_TESTING": "0",
        "LDFLAGS": " ".join(["-s", "-Wl,--exclude-libs,ALL,--no-as-needed", *map(str, stand_ins())]),
    }
    commands = [
        *("egg_info", "--egg-base", made(PLACE / "egg")),
        *("build", "--build-lib", PLACE / "lib"),
        *("bdist_wheel", "--skip-build", "--dist-dir", PLACE / "raw"),
    ]
    run(sys.executable, "-Wignore", "setup.py", "--quiet", *commands, environment=environment)
    [wheel] = (PLACE / "raw").glob("*.whl")
    return wheel


def repair(wheel: Path, output: Path) -> Path:
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
        platform = f"{PLATFORM}_{os.uname().machine}"
        run(*command, "--plat", platform, "--only-plat", "--wheel-dir", folder, wheel)
        [repaired] = Path(folder).iterdir()
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
        f".globl {function}\n.type {function},@function\n{function}: ret\n" for function in functions
    )
    (folder / "functions.s").write_text(f'.text\n{text}.section .note.GNU-stack,"",@progbits\n')
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
