"""Redirection of CUDA devices to the CPU.

[Note: How a call is redirected]
PyTorch shows every function of tensors and every maker of tensors or devices to a `TorchFunctionMode`: the mode below
replaces cuda devices in their arguments. Other functions (`torch.cuda.*`, autocast, `torch.load`, process groups) are
replaced by name, until the redirection ends. Modules of torch and of bmtrain still see no GPU; the script and
all other libraries see one GPU for each local rank.
"""

from __future__ import annotations

import collections
import contextlib
from typing import Any

from . import stand_ins
from .function_mode import CudaToCpu

__all__ = ["Redirection"]


class Redirection:
    """Redirects while it is entered. Not re-entrant; one at a time in a process.

    Example:
        >>> import torch
        >>> with Redirection() as redirection:
        ...     x = torch.ones(2, device="cuda").cuda()
        ...     torch.cuda.synchronize()
        >>> x.device, torch.cuda.is_available.__module__
        (device(type='cpu'), 'torch.cuda')
        >>> print(redirection.report("script.py"))
        bmtrain run --cpu: script.py ran on the CPU; redirected:
          1 x ones(device="cuda")
          1 x .cuda()
          1 x torch.cuda.synchronize
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._undo = contextlib.ExitStack()

    def count(self, what: str) -> None:
        """Counts a redirected call."""
        self.counts[what] += 1

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Gives a module or class another attribute until the redirection ends."""
        missing = object()
        before = owner.__dict__.get(name, missing)
        if before is missing:
            self._undo.callback(delattr, owner, name)
        else:
            self._undo.callback(setattr, owner, name, before)
        setattr(owner, name, value)

    def __enter__(self) -> Redirection:
        with contextlib.ExitStack() as failed:
            failed.callback(self._undo.close)
            stand_ins.install(self)
            failed.pop_all()
        self._undo.enter_context(CudaToCpu(self.count))
        return self

    def __exit__(self, *exception: object) -> None:
        self._undo.close()

    def report(self, script: str) -> str:
        """The redirected calls with their counts, one line each, in the order of first use."""
        if not self.counts:
            return f"bmtrain run --cpu: {script} ran on the CPU; it asked for nothing of CUDA"
        lines = [f"  {number} x {what}" for what, number in self.counts.items()]
        return "\n".join([f"bmtrain run --cpu: {script} ran on the CPU; redirected:", *lines])
