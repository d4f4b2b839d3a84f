"""The build configuration of the compiled core, and a clear error when it does not match the running torch."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import torch

from .._version import __version__

_CONFIG = Path(__file__).parents[1] / "_build_config.json"  # written by setup.py beside the extension
_REMEDY = (
    "Rebuild bmtrain with the torch that is installed now: in its source tree, run `pip install "
    "--force-reinstall --no-deps .`, or for a development tree `pip install -e . --no-build-isolation`."
)


def build_info() -> dict[str, object]:
    """Returns the configuration of this build.

    Returns:
        `version` of bmtrain; `torch`, `cuda` (None: built without), `cuda_arch_list`, `compiler`, `python`,
        `platform` and `flags` of the build and the compiler's `warnings`, a list (None where the build left no
        record); `extension`, the file that was loaded; and `running_torch`.

    >>> build_info()["version"] == bmtrain.__version__
    True
    """
    recorded = _read_config()
    names = ("torch", "cuda", "cuda_arch_list", "compiler", "python", "platform", "flags", "warnings")
    return {
        "version": __version__,
        **{name: recorded.get(name) for name in names},
        "extension": load_extension().__file__,
        "running_torch": str(torch.__version__),
    }


def load_extension() -> ModuleType:
    """Imports `bmtrain._C`.

    Raises:
        ImportError: if it was not built, or was built for another torch; the error names the remedy.
    """
    mismatch = _mismatch(_read_config(), str(torch.__version__), torch.version.cuda)
    if mismatch:
        raise ImportError(f"bmtrain's compiled core was built for {mismatch}. {_REMEDY}")
    try:
        return importlib.import_module("bmtrain._C")
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
        config: dict[str, str | None] = json.loads(_CONFIG.read_text(encoding="utf-8"))
    except FileNotFoundError:  # built by other means than setup.py
        return {}
    return config


def _mismatch(built: dict[str, str | None], torch_version: str, torch_cuda: str | None) -> str:
    """Names the torch that the core was built for if another one is running; empty if it matches.

    C++ interfaces of torch change between releases. Builds of one release (+cpu, +cu130) share them, except
    that the CUDA parts need a torch with the same major version of CUDA.
    """
    recorded = built.get("torch")
    if recorded is None:
        return ""
    if recorded.partition("+")[0] != torch_version.partition("+")[0]:
        return f"torch {recorded}, but torch {torch_version} is running"
    cuda = built.get("cuda")
    if cuda is not None and (torch_cuda is None or cuda.partition(".")[0] != torch_cuda.partition(".")[0]):
        return (
            f"torch {recorded} with CUDA {cuda}, but torch {torch_version} with CUDA {torch_cuda} is running"
        )
    return ""
