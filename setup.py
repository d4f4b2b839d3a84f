"""Builds `bmtrain._C` against the torch of the environment that bmtrain is installed into.

Everything static is in pyproject.toml. Environment variables: BMTRAIN_CUDA=0 or 1 (default: CUDA where torch
and a toolkit have it), BMTRAIN_TESTING=0 or 1 (the machinery of tests in csrc/testing; default: in a checkout),
BMTRAIN_SANITIZE=address,undefined (for tests/fault/sanitize.sh), MAX_JOBS (compilers at a time) and
TORCH_CUDA_ARCH_LIST.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import select
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SETUPTOOLS_MINIMUM = 77  # of pyproject.toml, which pip sees to and a call of this file does not
TORCH_MINIMUM = (2, 11)
TORCH_TO_INSTALL = "torch==2.13.0"
CONFIG_FILE = "_build_config.json"  # read by bmtrain/_base/build.py
BUILDING = {"build", "build_ext", "bdist_wheel", "editable_wheel", "develop"}
BINDINGS_GROUP_SIZE = 3  # sources compiled as one; each takes as long as other folders


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
    if asked == "" and torch.version.cuda is not None and missing:
        sys.stderr.write(
            f"bmtrain: the core is built WITHOUT CUDA kernels, though torch {torch.__version__} has CUDA: what is "
            f"missing is {' and '.join(missing)}. torch's operations take their place on GPUs. BMTRAIN_CUDA=1 makes "
            "this an error, BMTRAIN_CUDA=0 silences it\n"
        )
    return asked != "0" and not missing


def wants_testing(arguments: list[str]) -> bool:
    """Whether to build csrc/testing: by default in a checkout (in place), whose tests use it, and nowhere else."""
    asked = os.environ.get("BMTRAIN_TESTING", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"BMTRAIN_TESTING: expected 0 or 1, got {asked!r}")
    return asked == "1" or (
        asked == "" and bool({"--inplace", "-i", "editable_wheel", "develop"} & set(arguments))
    )


def find_sources(cuda: bool, testing: bool) -> list[str]:
    """Files in csrc/cuda and files named *_cuda.cpp are for CUDA builds, those in csrc/testing for builds with it."""
    found = []
    for path in sorted(ROOT.glob("csrc/**/*")):
        folders = path.relative_to(ROOT).parts[:-1]
        only_cuda = "cuda" in folders or path.stem.endswith("_cuda")
        if not testing and "testing" in folders:
            continue
        if path.suffix in ({".cpp", ".cu"} if cuda else {".cpp"}) and (cuda or not only_cuda):
            found.append(path.relative_to(ROOT).as_posix())
    return found


def group_sources(sources: list[str], folder: Path) -> list[str]:
    """Compile the files of a folder as one: most of their time goes to torch's headers, which they share.

    The kernels of an instruction set stay alone, and so does what is CUDA's.

    Args:
        sources: relative to the tree.
        folder: for the files that include them.

    Returns:
        The files to compile instead.
    """
    alone, folders = [], {}
    for source in sources:
        path = Path(source)
        if path.suffix != ".cpp" or path.stem.endswith("_cuda") or path.parent.name in ("cpu", "cuda"):
            alone.append(source)
        else:
            folders.setdefault(path.parent, []).append(path)
    folder.mkdir(parents=True, exist_ok=True)
    for place, paths in folders.items():
        count = -(-len(paths) // BINDINGS_GROUP_SIZE) if place.name == "bindings" else 1
        for n in range(count):
            part = paths[n * len(paths) // count : (n + 1) * len(paths) // count]
            text = "".join(f'#include "{path.relative_to("csrc").as_posix()}"\n' for path in part)
            group = folder / f"{'_'.join(place.parts[1:]) or 'csrc'}_{n}.cpp"
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


def make_extension(cuda: bool, testing: bool) -> Extension:
    """The one extension. torch's headers are system headers, so that warnings are about our own files."""
    from torch.utils import cpp_extension as torch_build

    device = "cuda" if cuda else "cpu"
    toolkit = find_toolkit() if cuda else None
    headers = None if toolkit is None else find_headers(toolkit)
    # torch knows the usual folders.
    conda = [] if toolkit is None or headers is None or headers == toolkit / "include" else [headers]
    system = [f"-isystem{path}" for path in [*torch_build.include_paths(device), *conda]]
    warnings = ["-Wall", "-Wextra"]  # tests/run.sh fails if there were any, see CompilerOutput
    # -ffp-contract=off: a multiply and an add are fused where a kernel says so, not where a compiler likes
    # to, so that all instruction sets give the same bits.
    common = ["-O3", "-std=c++20", *(["-DBMTRAIN_WITH_CUDA"] if cuda else [])]
    host = [
        *system,
        *warnings,
        "-DAT_PER_OPERATOR_HEADERS",  # torch's own headers then include the operators they use, not all of them
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
        find_sources(cuda, testing),
        include_dirs=[str(ROOT / "csrc")],
        depends=[path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*") if path.is_file()],
        library_dirs=[*torch_build.library_paths(device), *(str(path.parent / "lib") for path in conda)],
        libraries=[
            *("c10", "torch", "torch_cpu", "torch_python"),
            *(("cudart", "c10_cuda", "torch_cuda") if cuda else ()),
        ],
        # Kernels see no torch, so nvcc needs none of its headers (and knows -isystem in another spelling).
        extra_compile_args={"cxx": [*common, *host, *checks], "nvcc": [*common, "--fmad=false"]},
        extra_link_args=checks,
        language="c++",
    )


def make_build_command(torch: Any, cuda: bool, testing: bool) -> type:
    """torch's build_ext, with objects kept between builds and a record of what was built."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildCore(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # pip gives an editable build a folder that it deletes afterwards; here ninja finds what is done.
            # What changes every compiler call has a folder of its own, so that going back and forth is quick.
            kind = ("-cuda" if cuda else "") + ("-sanitized" if os.environ.get("BMTRAIN_SANITIZE") else "")
            name = f"core-{sysconfig.get_platform()}-{sys.implementation.cache_tag}-torch{torch.__version__}"
            self.build_temp = str(ROOT / "build" / (name + kind))

        def build_extensions(self) -> None:
            temporary = Path(self.build_temp)
            [core] = self.extensions
            core.sources = group_sources(core.sources, temporary / "groups")
            with CompilerOutput(temporary / "warnings.json"):
                super().build_extensions()

        def run(self) -> None:
            super().run()
            found = Path(self.build_temp, "warnings.json")
            config = {
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda if cuda else None,
                "cuda_arch_list": os.environ["TORCH_CUDA_ARCH_LIST"] if cuda else None,
                "testing": testing,
                "compiler": compiler_version(self.compiler.compiler_so[0]),
                "python": platform.python_version(),
                "platform": sysconfig.get_platform(),
                "flags": " ".join(
                    f for f in self.extensions[0].extra_compile_args["cxx"] if "-isystem" not in f
                ),
                "warnings": list(json.loads(found.read_text()).values()) if found.exists() else [],
            }
            folders = [Path(self.build_lib, "bmtrain"), *([ROOT / "bmtrain"] if self.inplace else [])]
            for folder in folders:
                (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")

    return BuildCore


class CompilerOutput:
    """Says how far ninja is instead of showing its commands, and keeps the warnings of every object.

    Warnings of objects that an earlier build compiled are part of it too: tests/run.sh fails on them without other
    flags, for which everything would be compiled again.

    Args:
        path: of the warnings, object -> text.
    """

    _SILENCE = 8  # seconds
    _STATUS = re.compile(r"@compiled (\d+) (\d+) (.*)")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warnings: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        self._object = ""
        self._done = self._all = ""

    def __enter__(self) -> None:
        os.environ["NINJA_STATUS"] = "@compiled %f %t "
        sys.stdout.flush()
        self._began = self._told = time.monotonic()
        self._screen = os.dup(1)
        self._output, end = os.pipe()
        os.dup2(end, 1)
        os.close(end)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __exit__(self, *error: object) -> None:
        sys.stdout.flush()
        os.dup2(self._screen, 1)
        self._reader.join()
        os.close(self._output)
        os.close(self._screen)
        found = {name: text for name, text in self._warnings.items() if "warning" in text}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1))

    def _read(self) -> None:
        rest = b""
        while True:
            if not select.select([self._output], [], [], self._SILENCE)[0]:
                self._tell()
                continue
            data = os.read(self._output, 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines if data else [rest]:
                self._take(line.decode(errors="replace"))
            if not data:
                return

    def _take(self, line: str) -> None:
        status = self._STATUS.match(line)
        if status is None:
            self._warnings[self._object] = self._warnings.get(self._object, "") + line + "\n"
            if line and not line.startswith(("ninja: no work", "ninja: Entering")):
                os.write(self._screen, f"{line}\n".encode())
            return
        self._done, self._all, command = status.groups()
        built = re.search(r" -o (\S+)", command)
        self._object = built[1] if built else command
        self._warnings.pop(self._object, None)
        if self._done == self._all or time.monotonic() - self._told > 2:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        what = f"{self._done} of {self._all} files" if self._all else "the first files"
        os.write(self._screen, f"compiling: {what}, {self._told - self._began:.0f} s\n".encode())


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
        testing = wants_testing(sys.argv[1:])
        extensions = [make_extension(cuda, testing)]
        commands["build_ext"] = make_build_command(torch, cuda, testing)
    setup(ext_modules=extensions, cmdclass=commands)


if __name__ == "__main__":
    main()
