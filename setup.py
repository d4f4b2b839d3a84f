"""Builds `bmtrain._C` against the torch of the environment that bmtrain is installed into.

Everything static is in pyproject.toml. Environment variables: BMTRAIN_CUDA=0 or 1 (default: CUDA where torch
and a toolkit have it), BMTRAIN_TESTING=0 or 1 (the machinery of tests in csrc/testing; default: in a checkout),
BMTRAIN_SANITIZE=address,undefined (for tests/fault/sanitize.sh), BMTRAIN_TORCHES (of csrc/packaging/build_wheel.py:
packages of torch, each of which gets a core of its own), MAX_JOBS (compilers at a time) and TORCH_CUDA_ARCH_LIST.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "csrc" / "packaging"))
from compiler_output import CompilerOutput  # noqa: E402

SETUPTOOLS_MINIMUM = 77  # of pyproject.toml, which pip sees to and a call of this file does not
TORCH_MINIMUM = (2, 11)
TORCH_TO_INSTALL = "torch==2.13.0"
CONFIG_FILE = "_build_config.json"  # read by bmtrain/_base/build.py
BUILDING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop"}
# Folders, and files of csrc/bindings, compiled as one with another: most of the time goes to torch's headers.
JOINED = {"guard": "comm", **dict.fromkeys(["common", "disk", "module", "ops", "optim"], "shard")}
# Nodes of autograd, like c10d, bring the declarations of all operators of torch.
JOINED |= dict.fromkeys(["shard/graph.cpp", "shard/products.cpp"], "comm")


def require_setuptools() -> None:
    """Say what is too old, before a page about the pyproject.toml that it cannot read does."""
    version = str(setuptools.__version__)
    if int(version.partition(".")[0]) < SETUPTOOLS_MINIMUM:
        raise SystemExit(
            f"bmtrain needs setuptools >= {SETUPTOOLS_MINIMUM}, {sys.executable} has {version}. First run\n"
            f"    {sys.executable} -m pip install 'setuptools>={SETUPTOOLS_MINIMUM},<82'\n"
            "then the same command again, or pip install --no-deps -e . in its place, which brings its own."
        )


def require_torch() -> None:
    """Make the torch that bmtrain will run with importable; under build isolation it is in the environment around."""
    if not find_torch():
        sys.path += [path for path in outer_path() if path not in sys.path]
    if not find_torch():
        raise SystemExit(
            f"bmtrain is compiled against the torch it runs with, and {sys.executable} has none.\n"
            f"First run\n    {sys.executable} -m pip install {TORCH_TO_INSTALL}\n"
            "then the same command again. With a tool that builds in an environment of its own (uv, "
            "python -m build), turn that isolation off."
        )
    try:
        require_recent(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:  # a torch without metadata: import_torch looks at it
        return


def require_recent(version: str) -> None:
    """Refuse an old torch, before pip downloads a new one (gigabytes) for a build that then uses the old one."""
    if tuple(map(int, version.split(".")[:2])) < TORCH_MINIMUM:
        minimum = ".".join(map(str, TORCH_MINIMUM))
        raise SystemExit(
            f"bmtrain needs torch >= {minimum}, {sys.executable} has {version}. First run\n"
            f"    {sys.executable} -m pip install {TORCH_TO_INSTALL}\nthen the same command again."
        )


def find_torch() -> bool:
    """Whether torch could be imported, without the seconds that importing it takes."""
    importlib.invalidate_caches()
    return importlib.util.find_spec("torch") is not None


def import_torch() -> Any:
    """The torch to build against."""
    import torch

    require_recent(torch.__version__)
    return torch


def outer_path() -> list[str]:
    """What sys.path would be without the isolation: as another process of the same interpreter sees it."""
    hidden = {"PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    interpreters = [sys.executable]
    if "VIRTUAL_ENV" in os.environ:
        interpreters.append(os.path.join(os.environ["VIRTUAL_ENV"], "bin", "python"))
    found: list[str] = []
    for interpreter in interpreters:
        command = [
            interpreter,
            "-c",
            "import json, sys; print(json.dumps([sys.version_info[:2], sys.path[1:]]))",
        ]
        answer = subprocess.run(
            command, env=environment, cwd="/", capture_output=True, text=True, check=False
        )
        if answer.returncode == 0:
            version, path = json.loads(answer.stdout)
            found += path if tuple(version) == sys.version_info[:2] else []
    return found


def require_compiler() -> None:
    """Say what is missing, before a page of compiler output does."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        raise SystemExit(
            f"bmtrain needs a C++20 compiler, and there is no {compiler} (Debian: apt-get install g++)"
        )
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise SystemExit(f"Python.h of {sys.executable} is missing (Debian: apt-get install python3-dev)")


def use_ninja_of_this_environment() -> None:
    """Put ninja's folder on PATH: an environment that is used without being activated is not there."""
    if importlib.util.find_spec("ninja") is not None:
        import ninja

        os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ.get("PATH", os.defpath)])


def find_toolkit() -> Path | None:
    """The CUDA toolkit: nvcc and its headers. (An nvcc on PATH may be a script that stands elsewhere.)"""
    nvcc = shutil.which("nvcc")
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    found = [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    for home in filter(None, [*named, *found, "/usr/local/cuda"]):
        if Path(home, "bin", "nvcc").exists() and find_headers(Path(home)) is not None:
            return Path(home)
    return None


def find_headers(home: Path) -> Path | None:
    """The headers of a toolkit; those of conda lie in a folder of the target, beside its libraries."""
    for folder in (home / "include", home / "targets" / f"{platform.machine()}-linux" / "include"):
        if (folder / "cuda_runtime_api.h").exists():
            return folder
    return None


def find_libraries(home: Path | None) -> list[Path]:
    """The folders of a toolkit's libraries."""
    if home is None:
        return []
    folders = (home / "lib64", home / "lib", home / "targets" / f"{platform.machine()}-linux" / "lib")
    return [folder for folder in folders if any(folder.glob("libcudart*"))]


def cuda_version() -> str:
    """That of the toolkit, such as 13.0."""
    command = [os.path.join(os.environ["CUDA_HOME"], "bin", "nvcc"), "--version"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"release (\d+\.\d+)", told)
    return found[1] if found else "unknown"


def wants_cuda(torch: Any) -> bool:
    """Whether to build the CUDA sources."""
    asked = os.environ.get("BMTRAIN_CUDA", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"BMTRAIN_CUDA: expected 0 or 1, got {asked!r}")
    missing = []
    if torch.version.cuda is None and not wheel_torches():
        missing.append(f"a torch built with CUDA (torch {torch.__version__} is not)")
    if find_toolkit() is None:
        missing.append(
            "a CUDA toolkit (nvcc and headers; looked on PATH, in CUDA_HOME and in /usr/local/cuda)"
        )
    if asked == "1" and missing:
        raise SystemExit(f"BMTRAIN_CUDA=1, but what is missing is {' and '.join(missing)}")
    if asked == "" and torch.version.cuda is not None and missing:
        sys.stderr.write(
            f"bmtrain: the core is built WITHOUT CUDA kernels, though torch {torch.__version__} has CUDA: what is "
            f"missing is {' and '.join(missing)}. torch's operations take their place on GPUs. BMTRAIN_CUDA=1 makes "
            "this an error, BMTRAIN_CUDA=0 silences it\n"
        )
    return asked != "0" and not missing


def wheel_torches() -> list[Path]:
    """The packages of torch that a wheel is built for; empty in a build for the torch that runs."""
    return [Path(folder) for folder in filter(None, os.environ.get("BMTRAIN_TORCHES", "").split(os.pathsep))]


def version_of(folder: Path) -> str:
    """Of a package of torch, which need not be importable."""
    return str(runpy.run_path(str(folder / "version.py"))["__version__"])


def wants_testing(arguments: list[str]) -> bool:
    """Whether to build csrc/testing: by default in a checkout (in place), whose tests use it, and nowhere else."""
    asked = os.environ.get("BMTRAIN_TESTING", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"BMTRAIN_TESTING: expected 0 or 1, got {asked!r}")
    return asked == "1" or (
        asked == "" and bool({"--inplace", "-i", "editable_wheel", "develop"} & set(arguments))
    )


def find_sources(cuda: bool, testing: bool) -> list[str]:
    """Files in csrc/cuda and files named *_cuda.cpp are for CUDA builds, those in csrc/testing for builds with it, and
    those in csrc/packaging for wheels."""
    left_out = {*([] if testing else ["testing"]), *([] if wheel_torches() else ["packaging"])}
    found = []
    for path in sorted(ROOT.glob("csrc/**/*")):
        folders = path.relative_to(ROOT).parts[:-1]
        only_cuda = "cuda" in folders or path.stem.endswith("_cuda")
        if left_out & set(folders):
            continue
        if path.suffix in ({".cpp", ".cu"} if cuda else {".cpp"}) and (cuda or not only_cuda):
            found.append(path.relative_to(ROOT).as_posix())
    return found


@functools.cache
def includes_torch(source: Path) -> bool:
    """Whether a file includes headers of torch or Python, itself or through other files of csrc."""
    text = source.read_text(encoding="utf-8")
    if re.search(r"#include <(torch|ATen|c10|pybind11|Python)\b", text):
        return True
    ours = (ROOT / "csrc" / name for name in re.findall(r'#include "([^"]+)"', text))
    return any(includes_torch(path) for path in ours if path.exists())


def group_sources(sources: list[str], folder: Path) -> list[str]:
    """Compile files as one where they have most headers in common: a folder, its bindings, and what is joined to it.

    The kernels of an instruction set stay alone, and so does what is CUDA's.

    Args:
        sources: relative to the tree.
        folder: for the files that include them.

    Returns:
        The files to compile instead.
    """
    alone, groups = [], {}
    for source in sources:
        path = Path(source)
        if path.suffix != ".cpp" or path.stem.endswith("_cuda") or path.parent.name in ("cpu", "cuda"):
            alone.append(source)
        else:
            name = path.stem if path.parent.name == "bindings" else path.parts[1]
            place = path.relative_to("csrc").as_posix()
            groups.setdefault(JOINED.get(place, JOINED.get(name, name)), []).append(place)
    folder.mkdir(parents=True, exist_ok=True)
    for name, paths in groups.items():
        text = "".join(f'#include "{path}"\n' for path in paths)
        group = folder / f"{name}.cpp"
        if not group.exists() or group.read_text() != text:  # ninja goes by the time of files
            group.write_text(text)
        alone.append(str(group))
    return alone


def architectures() -> str:
    """What to compile kernels for: Ampere to Hopper, what comes after by PTX, and older cards that this torch knows."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = {torch.cuda.get_device_capability(n) for n in range(count)}
    known = torch.cuda.get_arch_list() if cards else []
    older = [f"{x}.{y}" for x, y in sorted(cards) if x < 8 and f"sm_{x}{y}" in known]
    return ";".join([*older, "8.0", "9.0+PTX"])


def compile_flags() -> dict[str, list[str]]:
    """Of files that include no torch; the others have more."""
    # -ffp-contract=off: a multiply and an add are fused where a kernel says so, not where a compiler likes
    # to, so that all instruction sets give the same bits.
    common = ["-O3", "-std=c++20"]
    host = [
        "-Wall",
        "-Wextra",
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-fvisibility-inlines-hidden",
        "-g0",
    ]
    # Kernels see no torch, so nvcc needs none of its headers (and knows -isystem in another spelling).
    return {"cxx": [*common, *host, *sanitizer_flags()], "nvcc": [*common, "--fmad=false"]}


def sanitizer_flags() -> list[str]:
    sanitizers = os.environ.get("BMTRAIN_SANITIZE", "")
    # vptr asks for type information that torch does not export. -O0 and -O3 take too long to run, and to compile.
    checks = [
        f"-fsanitize={sanitizers}",
        "-fno-sanitize=vptr",
        "-fno-omit-frame-pointer",
        "-g1",
        "-O1",
        "-fno-wrapv",
    ]
    return checks if sanitizers else []


def make_extension(folder: Path, cuda: bool, testing: bool) -> Extension:
    """The core for a package of torch, whose headers are system headers: warnings are about our own files."""
    torch_headers = [folder / "include", folder / "include" / "torch" / "csrc" / "api" / "include"]
    flags = compile_flags()
    # AT_PER_OPERATOR_HEADERS: torch's own headers then include the operators they use, not all of them.
    flags["cxx"] += [*(f"-isystem{path}" for path in torch_headers), "-DAT_PER_OPERATOR_HEADERS"]
    name, cuda_libraries = "bmtrain._C", ["cudart"]
    if wheel_torches():
        major, minor = version_of(folder).split(".")[:2]
        # The CUDA runtime is part of the core: it loads without CUDA too.
        name, cuda_libraries = f"bmtrain._cores.torch{major}_{minor}._C", ["cudart_static", "rt", "dl"]
    return Extension(
        name,
        find_sources(cuda, testing),
        include_dirs=[str(ROOT / "csrc")],
        depends=[path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*.[cih]*")],
        library_dirs=[str(folder / "lib"), *map(str, find_libraries(find_toolkit() if cuda else None))],
        libraries=["c10", "torch", "torch_cpu", "torch_python", *(cuda_libraries if cuda else [])],
        extra_compile_args=flags,
        extra_link_args=sanitizer_flags(),
        language="c++",
    )


def make_build_command(torch: Any, folders: dict[str, Path], cuda: bool, testing: bool) -> type:
    """torch's build_ext, with objects kept between builds and a record of what was built.

    Args:
        folders: name of an extension -> the package of torch that it is for.
    """
    from torch.utils import cpp_extension as torch_build

    if cuda:
        home = os.environ["CUDA_HOME"]
        torch_build.CUDA_HOME = home  # a torch without CUDA looks for none
        # No flag, which all files would have: builds with CUDA and without share objects.
        paths = [str(find_headers(Path(home))), os.environ.get("CPLUS_INCLUDE_PATH", "")]
        os.environ["CPLUS_INCLUDE_PATH"] = os.pathsep.join(filter(None, paths))
    # What changes every compiler call has a folder of its own, so that going back and forth is quick.
    kind = "-sanitized" if os.environ.get("BMTRAIN_SANITIZE") else ""
    base = ROOT / "build" / f"core-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    plain_folder = base.with_name(base.name + kind)

    class BuildCore(torch_build.BuildExtension):
        def build_extensions(self) -> None:
            with CompilerOutput(ROOT / "build" / "warnings.json"):
                super().build_extensions()

        def build_extension(self, core: Extension) -> None:
            """Files without torch are compiled once for all extensions; for a single one in the same run of ninja, so
            that all processors are at work."""
            folder = build_folder(folders[core.name])
            plain = [source for source in core.sources if not includes_torch(ROOT / source)]
            others = [source for source in core.sources if source not in plain]
            core.sources = group_sources(others, folder / "groups")
            if len(self.extensions) == 1:
                core.sources += group_sources(plain, folder / "plain")
            else:
                core.extra_objects = self.compiler.compile(
                    group_sources(plain, plain_folder / "groups"),
                    output_dir=str(plain_folder),
                    include_dirs=core.include_dirs,
                    extra_postargs=compile_flags(),
                )
            # pip gives an editable build a folder that it deletes afterwards; here ninja finds what is done.
            self.build_temp = str(folder)
            super().build_extension(core)

        def run(self) -> None:
            super().run()
            for core in self.extensions:
                place = Path(*core.name.split(".")[:-1])
                record = json.dumps(self.describe(core), indent=2) + "\n"
                for root in (Path(self.build_lib), *([ROOT] if self.inplace else [])):
                    (root / place / CONFIG_FILE).write_text(record)

        def describe(self, core: Extension) -> dict[str, object]:
            version = version_of(folders[core.name])
            warnings = json.loads((ROOT / "build" / "warnings.json").read_text())
            parts = {str(plain_folder), str(build_folder(folders[core.name]))}
            flags = core.extra_compile_args["cxx"]
            is_wheel = bool(wheel_torches())
            return {
                "torch": ".".join(version.split(".")[:2]) if is_wheel else version,
                "cuda": (cuda_version() if is_wheel else torch.version.cuda) if cuda else None,
                "cuda_arch_list": os.environ["TORCH_CUDA_ARCH_LIST"] if cuda else None,
                "testing": testing,
                "compiler": compiler_version(self.compiler.compiler_so[0]),
                "python": platform.python_version(),
                "platform": sysconfig.get_platform(),
                "flags": " ".join(f for f in flags if "-isystem" not in f),
                "warnings": [
                    text for name, text in warnings.items() if parts & set(map(str, Path(name).parents))
                ],
            }

    def build_folder(torch_folder: Path) -> Path:
        return base.with_name(f"{base.name}-torch{version_of(torch_folder)}{kind}")

    return BuildCore


def compiler_version(compiler: str) -> str:
    """The compiler's own first line about itself."""
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return (answer.stdout.splitlines() or [compiler])[0]


class BuildPython(build_py):
    """build_py that leaves out modules which a former build had and the tree no longer has."""

    def run(self) -> None:
        if not self.editable_mode:
            for old in Path(self.build_lib).glob("bmtrain/**/*.py"):
                old.unlink()
        super().run()


class Distribution(setuptools.Distribution):
    """bmtrain, which asks for a torch that it has a core for: in a wheel, at most the newest of them."""

    def parse_config_files(self, *arguments: Any, **options: Any) -> None:
        super().parse_config_files(*arguments, **options)
        if torches := wheel_torches():
            major, minor = max(tuple(map(int, version_of(folder).split(".")[:2])) for folder in torches)
            self.install_requires = self.metadata.install_requires = [
                f"{wanted},<{major}.{minor + 1}" if wanted.startswith("torch>=") else wanted
                for wanted in self.install_requires
            ]


def main() -> None:
    os.chdir(ROOT)
    if sys.argv[1:2] == ["install"]:
        raise SystemExit(
            "python setup.py install is no longer how Python packages are installed. Run: pip install ."
        )
    require_setuptools()
    commands: dict[str, type] = {"build_py": BuildPython}
    extensions = []
    if {"dist_info", *BUILDING} & set(sys.argv[1:]):
        # At dist_info too, the first step of pip: having read that bmtrain depends on torch, pip would download one
        # (gigabytes) before it comes to the build.
        require_torch()
    if BUILDING & set(sys.argv[1:]):
        if (toolkit := find_toolkit()) is not None:
            os.environ["CUDA_HOME"] = str(toolkit)  # torch's build reads it when it is imported
        require_compiler()
        torch = import_torch()
        use_ninja_of_this_environment()
        cuda = wants_cuda(torch)
        testing = wants_testing(sys.argv[1:])
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures())
        torches = wheel_torches() or [Path(torch.__file__).parent]
        extensions = [make_extension(folder, cuda, testing) for folder in torches]
        folders = {core.name: folder for core, folder in zip(extensions, torches, strict=True)}
        commands["build_ext"] = make_build_command(torch, folders, cuda, testing)
    setup(ext_modules=extensions, cmdclass=commands, distclass=Distribution)


if __name__ == "__main__":
    main()
