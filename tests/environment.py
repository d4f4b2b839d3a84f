"""Bring the running interpreter's environment up to date for this checkout: `environment.py EXTRA...`.

Installs torch if there is none, the named optional dependencies, and this tree's bmtrain in development mode
with its core built. It looks before it acts: with nothing to do it takes a fraction of a second. Needs nothing
but Python.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["core_is_stale", "main", "missing_requirements"]

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
TORCH_MINIMUM = (2, 11)  # of setup.py
BUILD_TOOLS = ("setuptools>=77", "ninja", "numpy")  # torch warns at every start without NumPy
# For one test, in a folder of its own: accelerate and transformers change what they do where they find DeepSpeed.
DEEPSPEED = ("deepspeed==0.19.8", "einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "py-cpuinfo==9.0.0")


def installed(name: str) -> str | None:
    """The version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_requirements(requirements: Sequence[str], extras: Sequence[str]) -> list[str]:
    """Those without an extra, or of one of `extras`, that are not installed, or not at the pinned version."""
    missing = []
    for requirement in requirements:
        wanted, _, marker = requirement.partition(";")
        extra = re.search(r"extra == ['\"]([^'\"]+)", marker)
        parsed = re.match(r"\s*([\w.-]+)(?:\[[\w, -]+\])?\s*(?:==\s*([\w.+]+))?", wanted)
        if parsed is None or (extra is not None and extra[1] not in extras):
            continue
        version = installed(parsed[1])
        if version is None or (parsed[2] is not None and version != parsed[2]):
            missing.append(wanted.strip())
    return missing


def development_install() -> importlib.metadata.Distribution | None:
    """What `pip install -e` left of this tree; None if it did not, or pyproject.toml has changed since."""
    try:
        distribution = importlib.metadata.distribution("bmtrain")
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("url") != ROOT.as_uri() or not origin.get("dir_info", {}).get("editable"):
        return None
    metadata = Path(str(distribution.locate_file(f"bmtrain-{distribution.version}.dist-info/METADATA")))
    if not metadata.exists() or metadata.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        return None
    return distribution


def core_is_stale(torch_version: str | None) -> bool:
    """Whether the core in this tree is missing, older than its sources, or built for something else."""
    core = ROOT / "bmtrain" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    record = ROOT / "bmtrain" / "_build_config.json"
    if not core.exists() or not record.exists():
        return True
    built = json.loads(record.read_text())
    asked = os.environ.get("BMTRAIN_CUDA", "")
    if built["torch"] != torch_version or (asked and (asked == "1") != (built["cuda"] is not None)):
        return True
    if not built.get("testing") and os.environ.get("BMTRAIN_TESTING") != "0":
        return True  # its tests need csrc/testing
    # Folders too: their time tells of removed files. csrc/packaging is for wheels, and gets byte code of Python.
    folders = [folder for folder in (ROOT / "csrc").iterdir() if folder.name != "packaging"]
    sources = [
        ROOT / "setup.py",
        ROOT / "csrc",
        *folders,
        *(path for each in folders for path in each.rglob("*")),
    ]
    return max(path.stat().st_mtime for path in sources) > core.stat().st_mtime


def run(reason: str, *arguments: str, ticks: int = 10_000) -> None:
    """Run Python with these arguments, after saying why; say up to `ticks` times, every 8 s, that it goes on."""
    print(f"set-up: {reason}", file=sys.stderr, flush=True)
    environment = {"MAX_JOBS": str(os.cpu_count() or 1), **os.environ}
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=sys.stderr
    ) as process:
        while True:
            try:
                status = process.wait(8 if ticks else None)
                break
            except subprocess.TimeoutExpired:
                ticks -= 1
                begin = "\r\033[K" if sys.stderr.isatty() else ""  # in place of a bar of pip's
                seconds = time.monotonic() - began
                print(f"{begin}set-up: {reason}: {seconds:.0f} s", file=sys.stderr, flush=True)
    if status != 0:
        raise SystemExit(f"set-up: failed ({reason}): {' '.join(arguments)}")


def pip_install(reason: str, *arguments: str) -> None:
    """Install, with pip's bars for what is large. Python compiles what is imported when it is, a part of it all."""
    options = ("--disable-pip-version-check", "--no-input", "--no-compile", "--root-user-action=ignore")
    run(reason, "-m", "pip", "install", *options, *arguments)


def quicken_starts() -> None:
    """Installs `quick_start.py` for interpreters that find the variable set, which tests/conftest.py does."""
    folder, name = Path(sysconfig.get_path("purelib")), "bmtrain_quick_start"
    line = f'import os; "{name.upper()}" in os.environ and __import__("{name}")\n'
    texts = {f"{name}.py": (ROOT / "tests" / "quick_start.py").read_text(), f"{name}.pth": line}
    for file, text in texts.items():
        if not (folder / file).exists() or (folder / file).read_text() != text:
            (folder / file).write_text(text)


def main(extras: Sequence[str]) -> None:
    version = installed("torch")
    if version is None:
        pip_install(f"installing {TORCH}", TORCH)
    elif tuple(map(int, version.split(".")[:2])) < TORCH_MINIMUM:
        raise SystemExit(
            f"set-up: bmtrain needs torch >= {'.'.join(map(str, TORCH_MINIMUM))}, {sys.executable} has {version}; "
            f"run {sys.executable} -m pip install {TORCH}"
        )
    missing = [tool for tool in BUILD_TOOLS if missing_requirements([tool], extras)]
    setuptools = installed("setuptools")
    if missing or (setuptools is not None and int(setuptools.split(".")[0]) < 77):
        pip_install("installing what the build needs", *BUILD_TOOLS)
    if core_is_stale(installed("torch")):
        run(
            "compiling the core (a few minutes the first time)",
            "setup.py",
            "--quiet",
            "build_ext",
            "--inplace",
            ticks=1,  # then it says itself how far it is
        )
    if development_install() is None:  # finds the core compiled
        options = ("--no-build-isolation", "--no-deps", "-q", "-e", str(ROOT))
        pip_install("installing bmtrain from this tree", *options)
    distribution = development_install()
    requirements = missing_requirements(distribution.requires or [] if distribution else [], extras)
    if requirements:
        pip_install(f"installing {', '.join(requirements)}", *requirements)
    quicken_starts()
    folder = ROOT / "build" / "deepspeed"
    if "deepspeed" in extras and not (folder / f"{DEEPSPEED[0].replace('==', '-')}.dist-info").exists():
        pip_install("installing DeepSpeed", "--no-deps", "--upgrade", "--target", str(folder), *DEEPSPEED)


if __name__ == "__main__":
    main(sys.argv[1:])
