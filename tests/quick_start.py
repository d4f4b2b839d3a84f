"""Lets programs that tests start import torch in less time; copied into the test environment by tests/environment.py.

Torch's objects are never garbage, but the collections during its import, and those at the end of the interpreter, look
at all of them: a second of the three that `python -c "import torch"` takes. Everything else is collected as ever.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _TorchFinder:
    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            gc.disable()
            try:
                execute(module)
            finally:
                gc.freeze()
                gc.enable()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _TorchFinder)
