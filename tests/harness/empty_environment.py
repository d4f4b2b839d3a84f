"""An environment of its own, as somebody has who installs bmtrain for the first time."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from pathlib import Path

from . import free_port, run_process

__all__ = ["EmptyEnvironment"]


def _distributions(names: tuple[str, ...]) -> dict[str, importlib.metadata.Distribution]:
    """The installed ones of these, and of all that they need."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = list(names)
    while todo:
        name = todo.pop().lower().replace("_", "-")
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found[name] = distribution
            wanted = [r for r in distribution.requires or [] if "extra ==" not in r]
            todo += [re.split(r"[^\w.-]", requirement)[0] for requirement in wanted]
    return found


def _link(distribution: importlib.metadata.Distribution, target: Path) -> None:
    """Make a distribution visible in another environment's folder of packages."""
    for name in {
        file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")
    }:
        source = Path(str(distribution.locate_file(name)))
        if source.exists() and not (target / name).exists():
            (target / name).symlink_to(source)


class EmptyEnvironment:
    """A new virtual environment, and a folder to work in.

    Args:
        folder: for both.
        present: distributions that are linked from the running environment, with all that they need; nothing is
            downloaded.
    """

    def __init__(self, folder: Path, present: tuple[str, ...]) -> None:
        self.folder = folder
        run_process([sys.executable, "-m", "venv", "--without-pip", folder / "env"], timeout=120)
        self.bin = folder / "env" / "bin"
        [packages] = (folder / "env" / "lib").glob("python*/site-packages")
        self.packages = packages
        (self.bin / "pip").write_text('#!/bin/sh\nexec "${0%/*}/python" -m pip "$@"\n')
        (self.bin / "pip").chmod(0o755)
        for distribution in _distributions(("pip", *present)).values():
            _link(distribution, packages)
        path = [str(self.bin), *([str(Path(found).parent)] if (found := shutil.which("ninja")) else [])]
        self.environment = {
            "PATH": os.pathsep.join([*path, os.environ["PATH"]]),
            "VIRTUAL_ENV": str(folder / "env"),
            "PYTHONPATH": "",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this as: no isolation; the tools of the build are linked
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "MAX_JOBS": str(os.cpu_count() or 1),
            "CUDA_VISIBLE_DEVICES": "",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
        }

    def run(self, line: str, directory: Path, **variables: str) -> str:
        environment = {**self.environment, **variables}
        line = line.replace("torchrun", "python -m torch.distributed.run", 1)  # its script is not linked
        command = ["/bin/bash", "-euc", line]
        return run_process(command, environment=environment, directory=directory, timeout=900).stdout
