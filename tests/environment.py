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
from collections.abc import Sequence
from pathlib import Path

__all__ = ["core_is_stale", "main", "missing_requirements"]

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
BUILD_TOOLS = ("setuptools>=77", "ninja")


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
        parsed = re.match(r"\s*([\w.-]+)\s*(?:==\s*([\w.+]+))?", wanted)
        if parsed is None or (extra is not None and extra[1] not in extras):
            continue
        version = installed(parsed[1])
        if version is None or (parsed[2] is not None and version != parsed[2]):
            missing.append(wanted.strip())
    return missing


def development_install_is_current(extras: Sequence[str]) -> bool:
    """Whether `pip install -e` was done with these extras in this tree as pyproject.toml describes it now."""
    try:
        distribution = importlib.metadata.distribution("bmtrain")
    except importlib.metadata.PackageNotFoundError:
        return False
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("url") != ROOT.as_uri() or not origin.get("dir_info", {}).get("editable"):
        return False
    metadata = Path(str(distribution.locate_file(f"bmtrain-{distribution.version}.dist-info/METADATA")))
    if not metadata.exists() or metadata.stat().st_mtime < (ROOT / "pyproject.toml").stat().st_mtime:
        return False
    return not missing_requirements(distribution.requires or [], extras)


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
    sources = [
        ROOT / "setup.py",
        *(ROOT / "csrc").rglob("*"),
    ]  # folders too: their time tells of removed files
    return max(path.stat().st_mtime for path in sources) > core.stat().st_mtime


def run(reason: str, *arguments: str) -> None:
    """Run Python with these arguments, after saying why."""
    print(f"set-up: {reason}", file=sys.stderr, flush=True)
    environment = {"MAX_JOBS": str(os.cpu_count() or 1), **os.environ}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=sys.stderr, check=False
    )
    if result.returncode != 0:
        raise SystemExit(f"set-up: failed ({reason}): {' '.join(arguments)}")


def pip_install(reason: str, *arguments: str) -> None:
    """Install quietly."""
    options = ("-qq", "--disable-pip-version-check", "--no-input", "--root-user-action=ignore")
    run(reason, "-m", "pip", "install", *options, *arguments)


def main(extras: Sequence[str]) -> None:
    if installed("torch") is None:
        pip_install(f"installing {TORCH}", TORCH)
    missing = [tool for tool in BUILD_TOOLS if missing_requirements([tool], extras)]
    setuptools = installed("setuptools")
    if missing or (setuptools is not None and int(setuptools.split(".")[0]) < 77):
        pip_install("installing what the build needs", *BUILD_TOOLS)
    if not development_install_is_current(extras):
        target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
        reason = "installing bmtrain from this tree (compiles its core: a few minutes)"
        pip_install(reason, "--no-build-isolation", "-e", target)
    elif core_is_stale(installed("torch")):
        run("building the core", "setup.py", "--quiet", "build_ext", "--inplace")


if __name__ == "__main__":
    main(sys.argv[1:])
