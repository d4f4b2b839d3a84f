"""One-file saving and loading of sharded models, and the exchange of objects between ranks."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy as shallow_copy
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ._base.arguments import require_module, require_path
from ._base.atomic_file import AtomicFile
from ._base.tensors import place_of
from ._files.archive import read_archive
from ._files.archive_writer import write_archive
from ._files.gathering import first_names, write_gathered
from ._files.shared_state import DTYPE_LIST, DistributedStateDictWrapper, DistributedTensorWrapper
from ._model.check import check_model_state, has_own_state_methods
from ._model.outline import Outline, outline_of
from ._model.state_dict import collecting, install_hooks_below
from ._ranks.agree import failing_together, on_rank_0
from ._ranks.context import current, require_intact
from ._ranks.objects import allgather_object, allgather_objects, broadcast_object
from .block_layer import Block
from .global_var import config, context
from .parameter import DistributedParameter

__all__ = [
    "DTYPE_LIST",
    "DistributedStateDictWrapper",
    "DistributedTensorWrapper",
    "SaveHandle",
    "allgather_object",
    "allgather_objects",
    "broadcast_object",
    "finish_background_save",
    "load",
    "save",
]


def save(
    model: torch.nn.Module, file_name: str | os.PathLike[str], non_blocking: bool = False
) -> SaveHandle | None:
    """Writes the full model to one file that plain ``torch.load`` reads. Collective.

    Rank 0 writes the ``state_dict()`` of the same model without sharding, as CPU tensors. No rank holds more than one
    full parameter; rank 0 holds all of them with ``non_blocking``, and where a module has methods or hooks of its own
    for state dicts, or entries other than dense tensors. The file appears under its name when it is complete: an
    interrupted save leaves the old one.

    Args:
        model: any mix of distributed and plain modules.
        file_name: the file to write; only rank 0's counts.
        non_blocking: return once the values are copied, and write in the background. An error there is raised by the
            next ``save`` or ``load`` on all ranks, or makes the program fail at its end.

    Returns:
        None; with ``non_blocking`` a handle whose ``wait()`` returns when the file is complete.

    Raises:
        OSError: on every rank, if rank 0 cannot write.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> bmtrain.save(bmtrain.nn.Linear(2, 3), path)
        >>> sorted(torch.load(path))
        ['bias', 'weight']
    """
    require_module("model", model)
    require_path("file_name", file_name)
    context("save()")
    finish_background_save()
    resume = f"continue with bmtrain.load(model, {os.fspath(file_name)!r})"
    if not non_blocking and (outline := _outline_of_tensors(model)) is not None:
        ties = {key: first for key, first in first_names(outline.entries).items() if first != key}
        tensors = {key: value for key, value in outline.entries.items() if key not in ties}
        order = list(outline.entries)
        write_gathered(
            tensors,
            "save",
            lambda table, read: write_archive(file_name, table, read, ties, order, outline.metadata),
        )
        note_saved(resume)
        return None
    state = _full_state(model, copy=non_blocking)
    if not non_blocking:
        on_rank_0(lambda: _write(state, AtomicFile(file_name)), "save")
        note_saved(resume)
        return None
    target = on_rank_0(lambda: AtomicFile(file_name), "save")
    handle = SaveHandle(None if target is None else lambda: _write(state, target), resume)
    handle.start()
    return handle


def load(model: torch.nn.Module, file_name: str | os.PathLike[str], strict: bool = True) -> Any:
    """Reads a file written by :func:`save`, or by ``torch.save`` of a state dict, into the model. Collective.

    Only rank 0 opens the file, and each tensor goes to the other ranks by itself. No code from the file is executed.
    Checksums, keys and shapes are checked on all ranks before anything of the model is changed (of models that have
    loading methods or hooks of their own, which may rename or reshape, only checksums are).

    Args:
        model: any mix of distributed and plain modules.
        file_name: the file to read; only rank 0's counts.
        strict: whether missing and unexpected keys are errors.

    Returns:
        ``(missing_keys, unexpected_keys)``, as ``load_state_dict``.

    Raises:
        OSError: on every rank, if rank 0 cannot open the file.
        UnreadableFileError: on every rank, if it is damaged, or holds anything but a state dict of tensors and
            plain values.
        RuntimeError: on every rank, for shapes that differ and, with ``strict``, missing or unexpected keys.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"weight": torch.ones(3, 2)}, path)  # of a plain model without a bias
        >>> bmtrain.load(bmtrain.nn.Linear(2, 3), path, strict=False)
        _IncompatibleKeys(missing_keys=['bias'], unexpected_keys=[])
    """
    require_module("model", model)
    require_path("file_name", file_name)
    context("load()")
    finish_background_save()
    state = on_rank_0(lambda: read_archive(os.fspath(file_name)), "load")
    install_hooks_below(model)
    wrapper = DistributedStateDictWrapper(state or {})
    with failing_together("load"):
        if not has_own_state_methods(model):
            check_model_state(model, outline_of(model).entries, wrapper, strict)
    return model.load_state_dict(wrapper, strict=strict)


# ---- collecting


def _outline_of_tensors(model: torch.nn.Module) -> Outline | None:
    """The outline of a state dict that is made by torch's and this library's methods alone, of dense tensors."""
    tensors = (*model.parameters(), *model.buffers())
    if has_own_state_methods(model) or any(tensor.layout is not torch.strided for tensor in tensors):
        return None
    outline = outline_of(model)
    dense = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DistributedParameter)
    kinds = {(type(value), getattr(value, "is_meta", False)) for value in outline.entries.values()}
    is_dense = all(kind in dense and (not is_meta or kind is DistributedParameter) for kind, is_meta in kinds)
    return outline if is_dense else None


def _full_state(model: torch.nn.Module, copy: bool) -> dict[str, Any]:
    """The model's state on rank 0, on the CPU; empty elsewhere. With ``copy``, nothing in it changes with the model."""
    state: dict[str, Any] = {}
    install_hooks_below(model)
    with failing_together("save"):
        with collecting(keeps=context("save").topology.rank == 0) as collection:
            state = model.state_dict()
        if collection.keeps:
            copies: dict[Any, torch.Tensor] = {}
            state = shallow_copy(state)  # a model may have returned a dict that it keeps using

            def on_host(tensor: torch.Tensor) -> torch.Tensor:
                return tensor if collection.holds(tensor) else _on_cpu(tensor, copy, copies)

            for key, value in state.items():
                state[key] = tree_map_only(torch.Tensor, on_host, value)
        require_intact("save()")
    return state


def _on_cpu(value: torch.Tensor, copy: bool, copies: dict[Any, torch.Tensor]) -> torch.Tensor:
    """The plain tensor; one copy for several views of the same elements (tied weights)."""
    value = value.detach()
    if value.layout is not torch.strided:
        return value.cpu().clone() if copy else value.cpu()
    value = value.as_subclass(torch.Tensor)
    if (place := place_of(value)) not in copies:
        host = value.cpu()
        lies_alone = host.untyped_storage().nbytes() == host.nbytes
        copies[place] = host.clone() if (copy and host is value) or not lies_alone else host
    return copies[place]


def _save_to_rank0(
    model: torch.nn.Module, destination: dict[str, Any] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """The full state of the model on rank 0; elsewhere ``destination`` as given, or an empty dict. Collective.

    It calls no overriding ``state_dict`` of the model or of modules outside Blocks, so it may be the body of one.
    """
    return _collect(model, destination, prefix, context().topology.rank == 0)


def _save_to_local_rank0(
    model: torch.nn.Module, destination: dict[str, Any] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """As :func:`_save_to_rank0`, kept on the first rank of every host. Collective."""
    return _collect(model, destination, prefix, context().local_rank == 0)


def _save_to_infer_model(
    model: torch.nn.Module, infer_model: Any, destination: dict[str, Any] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Gives ``infer_model.load_layer_state_dict`` each Block's state and then the rest, on every host's first rank.

    Only one of these dicts exists at a time. Collective.

    Returns:
        the rest.
    """
    keeps = context().local_rank == 0

    def give(block: torch.nn.Module, destination: dict[str, Any], prefix: str) -> None:
        state = _collect(block, None, prefix, keeps)
        if keeps:
            infer_model.load_layer_state_dict(state)

    rest = _collect(model, destination, prefix, keeps, give)
    if keeps:
        infer_model.load_layer_state_dict(rest)
    return rest


#: Called for each Block during the traversal: (block, destination, prefix).
_VisitBlock = Callable[[torch.nn.Module, dict[str, Any], str], None]


def _block_into_destination(block: torch.nn.Module, destination: dict[str, Any], prefix: str) -> None:
    block.state_dict(destination=destination, prefix=prefix)


def _collect(
    model: torch.nn.Module,
    destination: dict[str, Any] | None,
    prefix: str,
    keeps: bool,
    visit_block: _VisitBlock = _block_into_destination,
) -> dict[str, Any]:
    if destination is None:
        destination = _empty_state()
    install_hooks_below(model)
    if type(model) is Block:
        model = model._module
    with collecting(keeps):
        if keeps:
            return _walk(model, destination, prefix, visit_block)
        _walk(model, _empty_state(), prefix, visit_block)
    return destination


def _empty_state() -> dict[str, Any]:
    state: Any = OrderedDict()
    state._metadata = OrderedDict()
    return state  # type: ignore[no-any-return]


def _walk(
    module: torch.nn.Module, destination: dict[str, Any], prefix: str, visit_block: _VisitBlock
) -> dict[str, Any]:
    """As ``torch.nn.Module.state_dict``, without calling the ``state_dict`` of any module but a Block."""
    metadata = {"version": module._version}
    known = getattr(destination, "_metadata", None)
    if known is not None:
        known[prefix[:-1]] = metadata
    for before in module._state_dict_pre_hooks.values():
        before(module, prefix, False)
    module._save_to_state_dict(destination, prefix, False)
    for name, child in module._modules.items():
        if type(child) is Block:
            visit_block(child, destination, f"{prefix}{name}.")
        elif child is not None:
            destination = _walk(child, destination, f"{prefix}{name}.", visit_block)
    for after in module._state_dict_hooks.values():
        replaced = after(module, destination, prefix, metadata)
        if replaced is not None:
            destination = replaced
    return destination


# ---- the file


def _write(state: Mapping[str, Any], target: AtomicFile) -> None:
    with target as file:
        torch.save(state, file)


def note_saved(resume: str) -> None:
    """Lets the report of a later failure, or of Ctrl-C, say how to continue."""
    known = current()
    if known is not None and known.watch is not None:
        known.watch.note_saved(resume)


# ---- saving in the background


class SaveHandle:
    """A save in the background. (On ranks other than 0 there is nothing to wait for.)"""

    def __init__(self, write: Callable[[], None] | None, resume: str) -> None:
        self._write = write
        self._resume = resume
        self._error: Exception | None = None  # for as long as the handle lives
        self._is_told = False  # whether the error has been raised
        self._thread = threading.Thread(target=self._run, name="bmtrain-save") if write is not None else None

    def start(self) -> None:
        """Starts writing."""
        config.set_save_state(finish_save=self._thread is None, save_thread=self)
        if self._thread is None:
            return
        atexit.register(self._at_exit)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()  # type: ignore[misc]
            note_saved(self._resume)
        except Exception as error:
            self._error = error
        finally:
            self._write = None  # the copied state goes with it
            config.set_save_state(finish_save=True, save_thread=self)

    def is_completed(self) -> bool:
        """Whether the file is complete, or has failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the file is complete; raises the error of the save once. Local."""
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._at_exit)
        if self._error is not None and not self._is_told:
            self._is_told = True
            raise self._error

    join = wait

    def join_quietly(self) -> None:
        """Returns when the writing has ended; an error has been raised already."""
        if self._thread is not None:
            self._thread.join()
            atexit.unregister(self._at_exit)
        self._is_told = True

    def finish(self) -> None:
        """Waits; the error is raised by all ranks. Collective."""
        on_rank_0(self.wait, "save")

    def _at_exit(self) -> None:
        """Makes the program fail if the save has failed and its error was never raised."""
        try:
            self.wait()
        except Exception:
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def finish_background_save() -> None:
    """Waits for the save in the background, if there is one; its error is raised by all ranks. Collective."""
    handle = config["save_thread"]
    if handle is not None:
        try:
            handle.finish()
        finally:  # not earlier: the thread sets it as it ends, and all ranks have to find the same here
            config.set_save_state(finish_save=True, save_thread=None)
