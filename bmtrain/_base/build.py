"""The build configuration of the compiled core, and a clear error when it does not match the running torch."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch

from .._version import __version__

_PACKAGE = Path(__file__).parents[1]
#: Beside the extension, written by setup.py. In a wheel both are in a folder for each release of torch.
_CONFIG = "_build_config.json"
_CORES = "_cores"
_REMEDY = (
    "Rebuild bmtrain with the torch that is installed now: in its source tree, run `pip install "
    "--force-reinstall --no-deps .`, or for a development tree `pip install -e . --no-build-isolation`."
)


def build_info() -> dict[str, object]:
    """Returns the configuration of this build.

    Returns:
        `version` of bmtrain; `torch` (in a wheel the release, such as 2.13), `cuda` (None: built without, or for
        another CUDA than the running torch's), `cuda_arch_list`, `compiler`, `python`, `platform` and `flags` of
        the build and the compiler's `warnings`, a list (None where the build left no record); `extension`, the file
        that was loaded; and `running_torch`.

    >>> build_info()["version"] == bmtrain.__version__
    True
    """
    recorded = _read_config()
    if not _uses_kernels(recorded, torch.version.cuda):
        recorded = {**recorded, "cuda": None, "cuda_arch_list": None}
    names = ("torch", "cuda", "cuda_arch_list", "compiler", "python", "platform", "flags", "warnings")
    return {
        "version": __version__,
        **{name: recorded.get(name) for name in names},
        "extension": load_extension().__file__,
        "running_torch": str(torch.__version__),
    }


def load_extension() -> ModuleType:
    """Imports `bmtrain._C`, in a wheel the one for the running torch, and lets it use its CUDA kernels.

    Raises:
        ImportError: if it was not built, or was built for another torch; the error names the remedy.
    """
    folder = _core_folder()
    if not folder.is_dir():
        raise ImportError(_no_core_for(str(torch.__version__)))
    recorded = _read_config()
    mismatch = _mismatch(recorded, str(torch.__version__), torch.version.cuda)
    if mismatch:
        raise ImportError(f"bmtrain's compiled core was built for {mismatch}. {_REMEDY}")
    places = sys.modules[__package__.partition(".")[0]].__path__
    if str(folder) not in places:
        places.append(str(folder))
    try:
        core = importlib.import_module("bmtrain._C")
    except ModuleNotFoundError as error:
        if error.name != "bmtrain._C":
            raise
        raise ImportError(
            f"bmtrain's compiled core is not built for this Python: {_where_to_build()}"
        ) from None
    except ImportError as error:  # the dynamic linker: a symbol or a library that is not there
        raise ImportError(
            f"bmtrain's compiled core does not load with torch {torch.__version__}: {error}. {_REMEDY}"
        ) from error
    if _uses_kernels(recorded, torch.version.cuda):
        core.use_cuda_kernels()
    return core


def is_for(built: str, running: str) -> bool:
    """Whether a core that was built for one version of torch runs with another.

    C++ interfaces of torch change between releases. Builds of one release (+cpu, +cu130) share them. A core of a wheel
    names the release without its last number, whose corrections leave these interfaces as they are.

    >>> [is_for("2.13.0+cpu", "2.13.0+cu130"), is_for("2.13.0", "2.13.1"), is_for("2.13", "2.13.1")]
    [True, False, True]
    """
    numbers = built.partition("+")[0].split(".")
    return running.partition("+")[0].split(".")[: max(len(numbers), 2)] == numbers


def _core_folder() -> Path:
    """The folder of the core. A wheel has one for each release of torch, perhaps none for the running one."""
    cores = _PACKAGE / _CORES
    release = "_".join(str(torch.__version__).split(".")[:2])
    return cores / f"torch{release}" if cores.is_dir() else _PACKAGE


def _no_core_for(version: str) -> str:
    folders = (_PACKAGE / _CORES).glob("torch*")
    releases = [folder.name.removeprefix("torch").replace("_", ".") for folder in folders]
    releases.sort(key=lambda release: [int(number) for number in release.split(".")])
    return (
        f"this wheel of bmtrain has compiled cores for torch {', '.join(releases)}, but torch {version} is running. "
        f"Install one of these, or compile bmtrain for torch {version}: in its source tree, run `pip install "
        "--force-reinstall --no-deps .`"
    )


def _where_to_build() -> str:
    """The remedy for a missing core. Python imports from the current folder first: in a clone, the bare sources."""
    sources = Path(__file__).parents[2]
    if not (sources / "setup.py").is_file():
        return "in its source tree, run `pip install .`."
    return (
        f"these are its sources, in {sources}. If bmtrain is installed, start Python in another folder; else run "
        "`pip install -e . --no-build-isolation` here."
    )


def _read_config() -> dict[str, str | None]:
    try:
        text = (_core_folder() / _CONFIG).read_text(encoding="utf-8")
    except FileNotFoundError:  # built by other means than setup.py
        return {}
    config: dict[str, str | None] = json.loads(text)
    return config


def _mismatch(built: dict[str, str | None], torch_version: str, torch_cuda: str | None) -> str:
    """Names the torch that the core was built for if another one is running; empty if it matches.

    The CUDA parts of a core need a torch with the same major version of CUDA. A core of a wheel runs without them.
    """
    recorded = built.get("torch")
    if recorded is None:
        return ""
    if not is_for(recorded, torch_version):
        return f"torch {recorded}, but torch {torch_version} is running"
    cuda = built.get("cuda")
    if cuda is not None and not is_of_wheel(built) and not _uses_kernels(built, torch_cuda):
        return (
            f"torch {recorded} with CUDA {cuda}, but torch {torch_version} with CUDA {torch_cuda} is running"
        )
    return ""


def is_of_wheel(built: Mapping[str, object]) -> bool:
    """Whether a record is of a core that came in a wheel for several releases of torch."""
    return str(built.get("torch")).count(".") == 1


def _uses_kernels(built: dict[str, str | None], torch_cuda: str | None) -> bool:
    """Whether the core has CUDA kernels that the driver and the contexts of the running torch fit."""
    cuda = built.get("cuda")
    return cuda is not None and torch_cuda is not None and _major(cuda) == _major(torch_cuda)


def _major(version: str) -> str:
    return version.partition(".")[0]
