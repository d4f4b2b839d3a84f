"""Memory of a rank, by purpose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ._base.arguments import require_module
from ._base.host_memory import resident_bytes
from ._C import num_update_workers
from ._engine.block_state import BlockState
from ._engine.call import BlockCall
from ._engine.disk_block import DiskBlockState
from ._engine.engine import current_engine
from .global_var import context

__all__ = ["MemoryReport", "memory_report"]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of this rank at one moment; memory that several tensors share is counted once. ``str()`` is a table.

    Attributes:
        parameters: shards of Blocks, and parameters of the model outside them.
        gradients: gradient shards of Blocks, and ``.grad`` outside them.
        optimizer: state of the optimizers, without tensors that are parameters themselves; of `optim.whole_matrix` the
            state and fp32 values of the parameters that this rank owns.
        host_parameters, host_gradients, host_optimizer: those in memory of the host; 0 on CPU ranks, where the three
            above are.
        disk_parameters, disk_gradients, disk_optimizer: those in files, which are no memory
            (:attr:`BlockPolicy.parameters`, :attr:`BlockPolicy.gradients`, :attr:`BlockPolicy.optimizer`).
        gathered: full parameters of Blocks, where they are not the shards themselves.
        unreduced: whole gradients of Blocks: kept in ``no_sync()``, or not yet reduced to the shards.
        activations: kept by recomputed Blocks for later backwards: inputs, and with ``"selective"`` results. None
            if a Block that keeps all its activations waits for its backward: autograd does not report its size.
        offloaded: activations that wait on the host (:attr:`BlockPolicy.offload_activations`).
        staging: host memory, page-locked, through which gradients and parameters of offloaded updates pass between a
            GPU and the host.
        disk_buffers: through which parameters, gradients and state in files pass a step; idle ones too.
        owned: the most that whole matrices at their owner and their messages took in the last step of the optimizers
            (Muon; of `optim.whole_matrix` whole gradients). They are freed in the step.
        idle_buffers: freed buffers that are kept for the next Block.
        peak_buffers: the most that ``gathered`` and ``unreduced`` were together since peaks were reset, except for what
            lies in buffers that are used in place.
        in_place: buffers that the ranks of one host use in place for large Blocks: this rank's, and its share of the
            common ones. ``gathered`` and ``unreduced`` lie in them. After 4,096 uses of others one is freed.
        process: of the process on CPU ranks (resident), of torch's allocator on GPUs (allocated).
        peak_process: the most that ``process`` was since peaks were reset.
        update_workers: a number of threads, no bytes: background threads that compute offloaded updates.
    """

    parameters: int
    gradients: int
    optimizer: int
    host_parameters: int
    host_gradients: int
    host_optimizer: int
    disk_parameters: int
    disk_gradients: int
    disk_optimizer: int
    gathered: int
    unreduced: int
    activations: int | None
    offloaded: int
    staging: int
    disk_buffers: int
    owned: int
    idle_buffers: int
    peak_buffers: int
    in_place: int
    process: int
    peak_process: int
    update_workers: int

    @property
    def on_disk(self) -> int:
        """All bytes in files."""
        return self.disk_parameters + self.disk_gradients + self.disk_optimizer

    def __str__(self) -> str:
        sizes = [field.name for field in fields(self) if field.name != "update_workers"]
        named = [(name.replace("_", " "), getattr(self, name)) for name in sizes]
        lines = [
            f"{name:<15} {'unknown' if value is None else f'{value / 2**20:12.2f} MiB'}"
            for name, value in named
        ]
        return "\n".join([*lines, f"update workers  {self.update_workers:12} threads"])


def memory_report(
    model: torch.nn.Module | None = None, optim: Any = None, *, reset_peaks: bool = False
) -> MemoryReport:
    """The present memory of this rank, by purpose. Local: each rank reports its own.

    For the peak of a phase (a forward, a backward, a step) call it before the phase with ``reset_peaks`` and once after
    it.

    Args:
        model: whose parameters outside Blocks count; Blocks count without it, all of this process.
        optim: an :class:`OptimManager <bmtrain.optim.OptimManager>`, an optimizer, or several, whose state counts.
        reset_peaks: begin new peaks after this report.

    Raises:
        RuntimeError: before :func:`bmtrain.init_distributed`.
        TypeError: for a ``model`` or ``optim`` that is none.

    Example:
        >>> model = bmtrain.Block(bmtrain.nn.Linear(8, 16, bias=False))
        >>> before = bmtrain.memory_report(model, reset_peaks=True)
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> after = bmtrain.memory_report(model)
        >>> before.gradients, after.gradients  # bytes; print(after) shows a table
        (0, 512)
    """
    if model is not None:
        require_module("model", model)
    current = context("memory_report()")
    blocks = current_engine(current).blocks
    groups = [group for block in blocks for group in block.buffers]
    stored = [shard for block in blocks if isinstance(block, DiskBlockState) for shard in block.stored]
    disk_parameters = {id(shard.buffer): shard.parameters.nbytes for shard in stored if shard.parameters}
    disk_gradients = {id(shard.buffer): shard.gradients.nbytes for shard in stored if shard.gradients}
    outside = [param for param in _parameters(model) if not getattr(param, "_in_block", False)]
    parameters = _Memory(group.shard for group in groups if id(group) not in disk_parameters).add(outside)
    gradients = _Memory(group.gradient_shard for group in groups if id(group) not in disk_gradients)
    gradients.add(param.grad for param in outside)
    state = _Memory(_states(optim, on_disk=False)).without(parameters)
    tier, pool = current_engine(current).tier, current_engine(current).pool.stats()
    process, peak_process = _process_bytes(current.device)
    report = MemoryReport(
        parameters=parameters.nbytes - parameters.nbytes_of_host,
        gradients=gradients.nbytes - gradients.nbytes_of_host,
        optimizer=state.nbytes - state.nbytes_of_host,
        host_parameters=parameters.nbytes_of_host,
        host_gradients=gradients.nbytes_of_host,
        host_optimizer=state.nbytes_of_host,
        disk_parameters=sum(disk_parameters.values()),
        disk_gradients=sum(disk_gradients.values()),
        disk_optimizer=_Memory(_states(optim, on_disk=True)).without(parameters).nbytes,
        gathered=sum(group.gathered_bytes for group in groups),
        unreduced=sum(group.unreduced_bytes for group in groups),
        activations=_activations(blocks),
        offloaded=sum(call.host.nbytes for call in _open_calls(blocks) if call.host is not None),
        staging=sum(_bytes_of(optim, "staging_bytes")),
        disk_buffers=sum(_bytes_of(optim, "disk_buffer_bytes")) + (0 if tier is None else tier.nbytes),
        owned=sum(_bytes_of(optim, "owner_bytes")),
        idle_buffers=pool["bytes_idle"],
        peak_buffers=pool["peak_bytes_in_use"],
        in_place=sum(comm.bytes_in_place for comm in current.communicators()),
        process=process,
        peak_process=peak_process,
        update_workers=num_update_workers(),
    )
    if reset_peaks:
        _reset_peaks(current)
    return report


class _Memory:
    """A set of pieces of memory."""

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        self._pieces: dict[int, torch.UntypedStorage] = {}
        self.add(tensors)

    def add(self, tensors: Iterable[torch.Tensor | None]) -> _Memory:
        for tensor in tensors:
            if tensor is not None and not tensor.is_meta and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                self._pieces[storage.data_ptr()] = storage
        return self

    def without(self, other: _Memory) -> _Memory:
        self._pieces = {at: piece for at, piece in self._pieces.items() if at not in other._pieces}
        return self

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes() for piece in self._pieces.values())

    @property
    def nbytes_of_host(self) -> int:
        """Those in memory of the host, where the run is on another device."""
        is_apart = context().device.type != "cpu"
        return sum(
            piece.nbytes() for piece in self._pieces.values() if is_apart and piece.device.type == "cpu"
        )


def _parameters(model: torch.nn.Module | None) -> Iterator[torch.nn.Parameter]:
    return iter(()) if model is None else model.parameters()


def _bytes_of(optim: Any, name: str) -> Iterator[int]:
    """Bytes of memory that optimizers report by themselves."""
    from .distributed.checkpoint.snapshot import optimizers_of

    for optimizer in optimizers_of(optim):
        yield getattr(getattr(optimizer, "_place", optimizer), name, 0)


def _states(optim: Any, on_disk: bool) -> Iterator[torch.Tensor]:
    """The tensors of the state of optimizers, in files or not."""
    from .distributed.checkpoint.snapshot import optimizers_of

    for optimizer in optimizers_of(optim):
        is_on_disk = getattr(optimizer, "is_on_disk", lambda _: False)
        # Of this library's without a wait, and without a look into the files.
        states = optimizer.__dict__["state"] if hasattr(optimizer, "is_on_disk") else optimizer.state
        for param, state in states.items():
            if is_on_disk(param) == on_disk:
                yield from (value for value in tree_leaves(state) if isinstance(value, torch.Tensor))


def _activations(blocks: Iterable[BlockState]) -> int | None:
    kept = _Memory(())
    for call in _open_calls(blocks):
        tensors = call.kept_for_backward()
        if tensors is None:
            return None
        kept.add(tensors)
    return kept.nbytes


def _open_calls(blocks: Iterable[BlockState]) -> list[BlockCall]:
    return [call for block in blocks for call in block.open_calls]


def _process_bytes(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    resident, peak = resident_bytes()
    return resident, max(resident, peak)  # the kernel counts the peak a little later


def _reset_peaks(current: Any) -> None:
    current_engine(current).pool.reset_peaks()
    if current.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(current.device)
    else:
        # Where there is no such file, the peak is that of the whole process.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
