"""Reads of parameters outside blocks in one forward.

[Note: Reads of one forward]
The outermost forward of a distributed module, and each run of a block's forward, is a *scope* of reads. The first read
in a scope gathers all small parameters below the scope's module that no Block holds, in one message for each dtype and
group of ranks. One autograd node returns them, and its backward sums all their gradients in one message. A parameter
read again in the same scope is the same tensor, so its gradients add before the reduction. The gathered set depends on
the modules alone, so all ranks send the same messages. Large parameters are gathered one by one when they are read;
parameters read more than once (tied weights) stay until the scope's end.

A block's run is a scope of its own because its nodes must lie inside its island, and in backward it runs again. A
parameter of a block that does not run is gathered by itself when a forward outside of it reads it, or a trainer's step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from .._ranks.context import require_gathering
from ..parameter import DistributedParameter
from .outside import Results
from .uninitialised import Uninitialised


class Scope:
    """One running forward of ``root``, and the results of its reads."""

    __slots__ = ("_outer", "_reads", "_results", "_root")

    def __init__(self, root: torch.nn.Module, reads: Reads) -> None:
        self._root, self._reads = root, reads
        self._results: Results | None = None
        self._outer: Scope | None = None

    def __enter__(self) -> None:
        self._outer, self._reads.innermost = self._reads.innermost, self

    def __exit__(self, *_: object) -> None:
        self._reads.innermost, self._outer = self._outer, None

    def read(self, param: DistributedParameter) -> torch.Tensor:
        self._results = self._results or Results(self._root)
        return self._results.read(param)


class Reads:
    """The open scopes.

    Attributes:
        innermost: the scope of the innermost running forward.
        in_step: whether a trainer runs the code of a step.
        uninitialised: parameters without values.
        check_call: called before a forward that no other one encloses, with its module and arguments.
    """

    def __init__(self) -> None:
        self.innermost: Scope | None = None
        self.in_step = False
        self.uninitialised = Uninitialised()
        self.check_call: Callable[..., None] | None = None
        self.outside: weakref.WeakValueDictionary[int, DistributedParameter] = weakref.WeakValueDictionary()

    def scope(self, root: torch.nn.Module) -> AbstractContextManager[None]:
        """Context manager for a forward of ``root``."""
        if self.innermost is None and torch.compiler.is_exporting():
            require_gathering(type(root).__name__)  # which would read parts of parameters that are copies
        if self.uninitialised.before_forward and self.innermost is None:
            self.uninitialised.check_forward(root)
        return Scope(root, self)

    def read(self, param: DistributedParameter) -> torch.Tensor:
        """Returns the full tensor of a parameter that has values. Collective."""
        require_gathering("reading a DistributedParameter")
        self.outside[param._number] = param
        return self.innermost.read(param) if self.innermost is not None else param.gather()
