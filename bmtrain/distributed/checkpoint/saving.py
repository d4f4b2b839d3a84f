"""Saving, at once or in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..._ranks.agree import broadcast_json, failing_together, on_all_ranks, on_rank_0
from ...global_var import context
from ...store import SaveHandle, note_saved
from .snapshot import Snapshot, take_snapshot
from .writer import Saving

__all__ = ["CheckpointHandle", "start_saving"]

_LABEL = "checkpoint.save"


class CheckpointHandle(SaveHandle):
    """A checkpoint that is written in the background, or has been written."""

    def __init__(self, path: Path, saving: Saving | None = None, snapshot: Snapshot | None = None) -> None:
        super().__init__(None if saving is None else self._save, _resume(path))
        self.path = path
        self._saving = saving
        self._snapshot = snapshot
        self._part_settled = threading.Event()  # this rank's part is written, or has failed

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self._part_settled.set()

    def _save(self) -> None:
        """The thread's work. It overlaps with training and touches no communicator: ranks meet in the folder."""
        saving, snapshot = self._saving, self._snapshot
        self._snapshot = None
        if saving is None or snapshot is None:
            return
        saving.write_shard(snapshot)
        self._part_settled.set()
        if context().topology.rank == 0:
            try:
                saving.commit()
            except Exception:
                saving.clean_up()
                raise

    def finish(self) -> None:
        """Waits for all ranks; all raise the error of one, also if `wait` has raised it there. Collective."""
        if self._saving is None:
            return
        try:
            on_all_ranks(self._wait_part, _LABEL)
        except Exception:
            self._saving.abandoned.set()
            self.join_quietly()
            self._saving.clean_up()
            raise
        on_all_ranks(self._wait_whole, _LABEL)

    def _wait_part(self) -> None:
        self._part_settled.wait()
        self._raise_again()

    def _wait_whole(self) -> None:
        self.join_quietly()
        self._raise_again()

    def _raise_again(self) -> None:
        if self._error is not None:
            raise self._error


def _resume(target: Path) -> str:
    return f"continue with checkpoint.load({os.fspath(target)!r}, model, optimizer)"


def start_saving(
    target: Path,
    step: int,
    model: torch.nn.Module | None,
    optim: Any,
    schedulers: Iterable[Any],
    data: Any,
    extra: Any,
    keep: int | None,
    non_blocking: bool,
) -> CheckpointHandle:
    """See :func:`bmtrain.distributed.checkpoint.save`. Collective."""
    current = context(_LABEL)
    with failing_together(_LABEL):
        snapshot = take_snapshot(model, optim, schedulers, data, extra, lends=not non_blocking)
    snapshot.keep_what_differs()
    save = broadcast_json(os.urandom(5).hex(), label=_LABEL)
    gone = list if current.watch is None else current.watch.suspicion.ranks
    saving = Saving(target, save, step, current.topology, keep, current.timeout, gone)
    try:
        on_rank_0(saving.prepare, _LABEL)
        if not non_blocking:
            on_all_ranks(lambda: saving.write_shard(snapshot), _LABEL)
            on_rank_0(saving.commit, _LABEL)
    except Exception:
        saving.clean_up()
        raise
    if not non_blocking:
        note_saved(_resume(target))
        return CheckpointHandle(target)
    snapshot.detach()
    handle = CheckpointHandle(target, saving, snapshot)
    handle.start()
    return handle
