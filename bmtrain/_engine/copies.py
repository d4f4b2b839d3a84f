"""Gathered copies of parameters, and detection of writes to them, which do not reach shards."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import config as compiled_functions
from torch.utils.hooks import RemovableHandle

from .._base.deprecate import warn_once
from .._base.tensors import TORCH_DATA, TORCH_GRAD, data_of, gradient_of
from .._shards.draws import Alias
from ..global_var import context, rank
from ..parameter import DistributedParameter

# torch looks for operators that return their inputs in the first call of compiled code, and then raises an error for
# tensors of a class that it does not know.
if hasattr(compiled_functions, "check_custom_op_aliasing"):
    compiled_functions.check_custom_op_aliasing = False

#: Folders of the compiler, which looks at ``.grad`` of the tensors that it is given.
_COMPILER = tuple(
    os.path.join(os.path.dirname(torch.__file__), name, "") for name in ("_dynamo", "_subclasses")
)
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_SOURCE = "_bmtrain_source"  # in the __dict__ of a tensor that was gathered
_KEPT = "_bmtrain_source_of_data"  # in the __dict__ of its `.data`


class Source:
    """Origin of a gathered copy. When the copy is freed, it warns of writes to it, and names the parameter."""

    __slots__ = ("_label", "_param", "_watched")

    def __init__(self, param: DistributedParameter, copy: torch.Tensor, label: str) -> None:
        self._param = weakref.ref(param)
        self._label = label
        #: Aliases that share a version counter with the copy, and the version when they were recorded.
        self._watched: list[tuple[torch.Tensor, int]] = []
        copy.__dict__[_SOURCE] = self
        if not copy.is_meta:
            self.watch(copy)

    def watch(self, tensor: torch.Tensor) -> None:
        """Counts writes to ``tensor`` as writes to the copy."""
        if not tensor.is_inference():  # inference tensors have no version
            self._watched.append((tensor.detach(), tensor._version))

    def note_write(self) -> None:
        """Records that the copy's data were replaced."""
        self._watched = [(alias, -1) for alias, _ in self._watched]

    def parameter(self) -> DistributedParameter | None:
        """Returns the parameter, or None if it has been freed."""
        return self._param()

    def __del__(self) -> None:
        if any(alias._version != version for alias, version in self._watched):
            why = "outside of Blocks, reading a distributed parameter gives"
            warn_of_lost_write(self._label, f"a write to {self._label}", why)

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return _no_source, ()


#: References to the entries of state dicts that no load has taken, by identity.
_entries: dict[int, weakref.ref[torch.Tensor]] = {}


def watch_entry(name: str, value: torch.Tensor) -> None:
    """Warns if ``value``, the entry ``name`` of a state dict, is written to and freed before :func:`note_loaded`."""
    if value.is_inference():
        return
    alias, version, key = value.detach(), value._version, id(value)

    def freed(reference: weakref.ref[torch.Tensor]) -> None:
        if _entries.get(key) is reference:
            del _entries[key]
            if alias._version != version and rank() == 0 and not sys.is_finalizing():
                warn_once(
                    "copies.state_dict",
                    f"the entry {name!r} of state_dict() was changed in place and not loaded: entries are gathered "
                    "copies, so the model stays as it was. Give the dict to load_state_dict(); a moving average "
                    "is updated over parameters(), whose shards may be changed in place",
                    category=UserWarning,
                )

    _entries[key] = weakref.ref(value, freed)


def note_loaded(value: object) -> None:
    """Notes that an entry of a state dict is being loaded."""
    _entries.pop(id(value), None)


def warn_of_lost_write(key: str, what: str, why: str) -> None:
    """Warns on rank 0, once for each ``key``, that ``what`` has changed a copy only."""
    if sys.is_finalizing() or rank() != 0:
        return
    warn_once(
        f"copies.{key}",
        f"{what} is lost: {why} a gathered copy. Write in `with bmtrain.whole(module, write=True):`, around the call "
        "if a forward writes (values from the first batch), or initialise by init_method= and "
        "bmtrain.init_parameters()",
        stacklevel=3,
        category=UserWarning,
    )


def _no_source() -> None:
    return None


def source_of(tensor: torch.Tensor) -> DistributedParameter | None:
    """Returns the parameter that ``tensor`` was gathered from, or None."""
    source: Source | None = tensor.__dict__.get(_SOURCE)
    return None if source is None else source.parameter()


@functools.cache
def _own_names(kind: type) -> set[str]:
    """Returns the attributes that the library gives parameters."""
    return {name for each in kind.__mro__ for name in inspect.get_annotations(each)}


class GatheredCopy(Alias):
    """A gathered parameter: a tensor that tracks reads of its ``.data``."""

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that a script gave the parameter (``weight.no_decay = True``), as one of torch does."""
        if name not in (notes := self._notes(name)):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return notes[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Gives the parameter such an attribute."""
        if hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            self._notes(name)[name] = value

    def _notes(self, name: str) -> dict[str, Any]:
        """Returns the attributes of the parameter, or this tensor's own where no attribute of a script has the name."""
        source = None if name.startswith("__") else source_of(self)
        return vars(self if source is None or name in _own_names(type(source)) else source)

    @property
    def data(self) -> torch.Tensor:
        value = data_of(self)
        source = self.__dict__.get(_SOURCE)
        if source is not None:
            source.watch(value)
            value.__dict__[_KEPT] = source  # while one of the two may be written to
        return value

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        source = self.__dict__.get(_SOURCE)
        if source is not None:
            source.note_write()
        TORCH_DATA.__set__(self, value)

    @property
    def requires_grad(self) -> bool:
        flag: bool = _REQUIRES_GRAD.__get__(self)
        return flag

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        self.requires_grad_(flag)

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        """Freezes or trains the parameter, as ``model.layer.weight.requires_grad = False`` does in torch."""
        source = source_of(self)
        if source is None:
            return super().requires_grad_(requires_grad)
        source.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """None: the gradient is the parameter's. Assigning None, or a full tensor, assigns it to the parameter."""
        if source_of(self) is None or self.retains_grad:
            return gradient_of(self)
        if sys._getframe(1).f_code.co_filename.startswith(_COMPILER):
            return None
        warn_once(
            "copies.grad",
            "a parameter was read outside of Blocks, which gives a gathered copy, and the copy's .grad is None: "
            "dict(model.named_parameters())[name] has .grad, this rank's shard of it, and gather_grad()",
            category=UserWarning,
        )
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        source = source_of(self)
        if source is None:
            TORCH_GRAD.__set__(self, value)
        elif value is None:
            source.grad = None
        else:
            source.load_grad(value)

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> RemovableHandle:
        """Registers a hook: in a forward on this copy, elsewhere on the parameter, for all backwards to come."""
        source: Any = source_of(self)
        engine: Any = context().engine
        if source is None or engine.reads.innermost is not None:
            source = super()
        handle: RemovableHandle = source.register_hook(hook)
        return handle
