"""Builds `bmtrain._C` against the torch of the environment that bmtrain is installed into.

Everything static is in pyproject.toml. Environment variables: BMTRAIN_CUDA=0 or 1 (default: CUDA where torch
and a toolkit have it), BMTRAIN_WERROR=1 (warnings are errors), BMTRAIN_SANITIZE=address,undefined (for
tests/fault/sanitize.sh), MAX_JOBS (compilers at a time) and TORCH_CUDA_ARCH_LIST.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
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
SETUPTOOLS_MINIMUM = 77  # of pyproject.toml, which pip sees to and a call of this file does not
TORCH_MINIMUM = (2, 11)
TORCH_TO_INSTALL = "torch==2.13.0"
CONFIG_FILE = "_build_config.json"  # read by bmtrain/_build.py
BUILDING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop"}


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
    if find_torch():
        return
    sys.path += [path for path in outer_path() if path not in sys.path]
    if not find_torch():
        raise SystemExit(
            f"bmtrain is compiled against the torch it runs with, and {sys.executable} has none.\n"
            f"First run\n    {sys.executable} -m pip install {TORCH_TO_INSTALL}\n"
            "then the same command again. With a tool that builds in an environment of its own (uv, "
            "python -m build), turn that isolation off."
        )


def find_torch() -> bool:
    """Whether torch could be imported, without the seconds that importing it takes."""
    importlib.invalidate_caches()
    return importlib.util.find_spec("torch") is not None


def import_torch() -> Any:
    """The torch to build against."""
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < TORCH_MINIMUM:
        minimum = ".".join(map(str, TORCH_MINIMUM))
        raise SystemExit(f"bmtrain needs torch >= {minimum}, {sys.executable} has {torch.__version__}")
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
        if Path(home, "bin", "nvcc").exists() and Path(home, "include", "cuda_runtime_api.h").exists():
            return Path(home)
    return None


def wants_cuda(torch: Any) -> bool:
    """Whether to build the CUDA sources."""
    asked = os.environ.get("BMTRAIN_CUDA", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"BMTRAIN_CUDA: expected 0 or 1, got {asked!r}")
    missing = []
    if torch.version.cuda is None:
        missing.append(f"a torch built with CUDA (torch {torch.__version__} is not)")
    if find_toolkit() is None:
        missing.append(
            "a CUDA toolkit (nvcc and headers; looked on PATH, in CUDA_HOME and in /usr/local/cuda)"
        )
    if asked == "1" and missing:
        raise SystemExit(f"BMTRAIN_CUDA=1, but what is missing is {' and '.join(missing)}")
    return asked != "0" and not missing


def find_sources(cuda: bool) -> list[str]:
    """Files in csrc/cuda and files named *_cuda.cpp are for CUDA builds; all others for every build."""
    found = []
    for path in sorted(ROOT.glob("csrc/**/*")):
        only_cuda = "cuda" in path.relative_to(ROOT).parts[:-1] or path.stem.endswith("_cuda")
        if path.suffix in ({".cpp", ".cu"} if cuda else {".cpp"}) and (cuda or not only_cuda):
            found.append(path.relative_to(ROOT).as_posix())
    return found


def architectures() -> str:
    """What to compile kernels for: Ampere to Hopper, what comes after by PTX, and older cards that this torch knows."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = {torch.cuda.get_device_capability(n) for n in range(count)}
    known = torch.cuda.get_arch_list() if cards else []
    older = [f"{x}.{y}" for x, y in sorted(cards) if x < 8 and f"sm_{x}{y}" in known]
    return ";".join([*older, "8.0", "9.0+PTX"])


def make_extension(cuda: bool) -> Extension:
    """The one extension. torch's headers are system headers, so that warnings are about our own files."""
    from torch.utils import cpp_extension as torch_build

    device = "cuda" if cuda else "cpu"
    system = [f"-isystem{path}" for path in torch_build.include_paths(device)]
    warnings = ["-Wall", "-Wextra", *(["-Werror"] if os.environ.get("BMTRAIN_WERROR") == "1" else [])]
    # -ffp-contract=off: a multiply and an add are fused where a kernel says so, not where a compiler likes
    # to, so that all instruction sets give the same bits.
    common = ["-O3", "-std=c++20", *(["-DBMTRAIN_WITH_CUDA"] if cuda else [])]
    host = [
        *system,
        *warnings,
        "-ffp-contract=off",
        "-fvisibility=hidden",
        "-fvisibility-inlines-hidden",
        "-g0",
    ]
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
    checks = checks if sanitizers else []
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures())
    return Extension(
        "bmtrain._C",
        find_sources(cuda),
        include_dirs=[str(ROOT / "csrc")],
        depends=[path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*") if path.is_file()],
        library_dirs=torch_build.library_paths(device),
        libraries=[
            *("c10", "torch", "torch_cpu", "torch_python"),
            *(("cudart", "c10_cuda", "torch_cuda") if cuda else ()),
        ],
        # Kernels see no torch, so nvcc needs none of its headers (and knows -isystem in another spelling).
        extra_compile_args={"cxx": [*common, *host, *checks], "nvcc": [*common, "--fmad=false"]},
        extra_link_args=checks,
        language="c++",
    )


def make_build_command(torch: Any, cuda: bool) -> type:
    """torch's build_ext, with objects kept between builds and a record of what was built."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildCore(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # pip gives an editable build a folder that it deletes afterwards; here ninja finds what is done.
            # What changes every compiler call has a folder of its own, so that going back and forth is quick.
            kind = ("-cuda" if cuda else "") + ("-werror" if os.environ.get("BMTRAIN_WERROR") == "1" else "")
            kind += "-sanitized" if os.environ.get("BMTRAIN_SANITIZE") else ""
            name = f"core-{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch{torch.__version__}"
            self.build_temp = str(ROOT / "build" / (name + kind))

        def run(self) -> None:
            super().run()
            config = {
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda if cuda else None,
                "cuda_arch_list": os.environ["TORCH_CUDA_ARCH_LIST"] if cuda else None,
                "compiler": compiler_version(self.compiler.compiler_so[0]),
                "python": platform.python_version(),
                "platform": sysconfig.get_platform(),
                "flags": " ".join(
                    f for f in self.extensions[0].extra_compile_args["cxx"] if "-isystem" not in f
                ),
            }
            folders = [Path(self.build_lib, "bmtrain"), *([ROOT / "bmtrain"] if self.inplace else [])]
            for folder in folders:
                (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

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
        torch = import_torch()
        require_compiler()
        use_ninja_of_this_environment()
        cuda = wants_cuda(torch)
        extensions = [make_extension(cuda)]
        commands["build_ext"] = make_build_command(torch, cuda)
    setup(ext_modules=extensions, cmdclass=commands)


if __name__ == "__main__":
    main()
