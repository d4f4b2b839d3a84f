"""One rank's file, its report to rank 0, and the manifest that makes a checkpoint of the files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from ..._base.atomic_file import AtomicFile, NamedFile, sync_folder
from ..._base.tensors import bytes_of, in_host_memory
from ..._engine.disk_tier import SealedArray
from ..._ranks.agree import describe_error, rebuild_error
from ..._watch.blame import ranks_text
from ...errors import CommunicationError, UnreadableFileError
from ...topology import Topology
from .checksummed import Checksummed
from .layout import (
    MANIFEST,
    check_sizes,
    part_name,
    point_to,
    read_manifest,
    remove_old,
    remove_unreferenced,
    shard_name,
)
from .manifest import Manifest, Piece, ShardFile, StoredTensorInfo, dtype_name
from .snapshot import Run, Snapshot

__all__ = ["Saving", "write_single"]

_ALIGNMENT = 64  # bytes; every run of elements starts at a multiple
_POLL = 0.02  # seconds between two looks for the other ranks' parts


class Saving:
    """One act of saving, as one rank sees it.

    Args:
        save: names this act; the same on all ranks, and never used before.
        keep: number of checkpoints to keep; None for all.
        timeout: seconds that rank 0 waits for the others' parts.
        gone: returns the ranks that have died, whose parts are not waited for.
    """

    def __init__(
        self,
        checkpoint: Path,
        save: str,
        step: int,
        topology: Topology,
        keep: int | None,
        timeout: float,
        gone: Callable[[], list[int]] = list,
    ) -> None:
        self.checkpoint = checkpoint
        self.step = step
        self.abandoned = Event()  # set when another rank is known to have failed
        self._save = save
        self._topology = topology
        self._keep = keep
        self._timeout = timeout
        self._gone = gone

    @property
    def _shard(self) -> Path:
        return self.checkpoint / shard_name(self._topology.rank, self._topology.world_size, self._save)

    def _part(self, rank: int) -> Path:
        return self.checkpoint / part_name(rank, self._topology.world_size, self._save)

    def prepare(self) -> None:
        """Makes the folder and removes remains of an interrupted save of the step. For rank 0, before the rest."""
        folder = self.checkpoint.parent
        folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            remove_unreferenced(self.checkpoint)
        self.checkpoint.mkdir(exist_ok=True)
        sync_folder(folder)

    def write_shard(self, snapshot: Snapshot, runs: Iterable[Run] | None = None) -> None:
        """Writes this rank's file and reports it to rank 0. An error removes the file and is reported as well.

        ``runs`` take the place of the snapshot's, one in memory at a time.
        """
        try:
            lent, ranks = snapshot.lent, self._topology.world_size
            table = _write_runs(
                self._shard, snapshot.runs if runs is None else runs, self._banner(), lent, ranks
            )
        except Exception as error:
            self._shard.unlink(missing_ok=True)  # gives back the space that telling needs
            with contextlib.suppress(OSError):
                self._tell({"error": describe_error(error)})
            raise
        try:
            rest = {"values": snapshot.values, "own": snapshot.own, "entries": snapshot.entries}
            self._tell({**table, **rest})
        except Exception:
            self.clean_up()
            raise

    def _banner(self) -> bytes:
        """The first bytes of a shard, for people who find one."""
        t = self._topology
        text = f"bmtrain shard of step {self.step}, rank {t.rank} of {t.world_size}, save {self._save}\n"
        return text.encode().ljust(2 * _ALIGNMENT)

    def _tell(self, told: dict[str, Any]) -> None:
        with AtomicFile(self._part(self._topology.rank)) as file:
            file.write(json.dumps(told).encode())

    def commit(self) -> None:
        """Waits for all parts and makes the checkpoint of them. For rank 0, after its own part.

        Raises:
            TimeoutError: parts of other ranks did not appear.
            CommunicationError: nor will they.
            FileNotFoundError: a file of this save is gone, which only another job removes.
            Exception: what another rank's part failed with.
        """
        manifest = _merge(self.step, self._save, self._topology, self._all_parts())
        self._check_undisturbed(manifest)
        with AtomicFile(self.checkpoint / MANIFEST) as file:
            file.write(manifest.to_bytes())
        point_to(self.checkpoint)
        remove_unreferenced(self.checkpoint)
        if self._keep is not None:
            remove_old(self.checkpoint.parent, self._keep)

    def _check_undisturbed(self, manifest: Manifest) -> None:
        """Another job that saves or prunes here takes a folder without a manifest for an interrupted save."""
        try:
            check_sizes(self.checkpoint, manifest)
        except FileNotFoundError as error:
            raise _removed(error.filename) from None

    def _all_parts(self) -> list[dict[str, Any]]:
        parts: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + self._timeout
        while len(parts) < self._topology.world_size:
            gone = self._gone()  # before the look for what they may have left
            for rank in range(self._topology.world_size):
                if rank not in parts and self._part(rank).exists():
                    parts[rank] = json.loads(self._part(rank).read_bytes())
                    if "error" in parts[rank]:
                        raise rebuild_error(parts[rank]["error"])
            missing = [rank for rank in range(self._topology.world_size) if rank not in parts]
            if lost := [rank for rank in missing if rank in gone]:
                raise CommunicationError(
                    f"{self.checkpoint}: not finished: {ranks_text(lost)} died in the middle of it"
                )
            if missing and not self._shard.exists():
                raise _removed(str(self._shard))
            if missing and (self.abandoned.wait(_POLL) or time.monotonic() > deadline):
                raise TimeoutError(
                    f"{self.checkpoint}: no part of rank {', '.join(map(str, missing))} appeared (timeout "
                    f"{self._timeout:g} s): see whether its host sees this folder, and whether another job uses it"
                )
        return [parts[rank] for rank in sorted(parts)]

    def clean_up(self) -> None:
        """Removes this rank's files of a save that failed; on rank 0 the folder, if it has become empty.

        Where the manifest is written they stay: what failed came after it, and the checkpoint is complete.
        """
        with contextlib.suppress(OSError, UnreadableFileError):
            if read_manifest(self.checkpoint).save == self._save:
                return
        for path in (self._shard, self._part(self._topology.rank)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        if self._topology.rank == 0:
            with contextlib.suppress(OSError, UnreadableFileError):
                remove_unreferenced(self.checkpoint)


def _removed(file: str) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT, "Removed while it was saved: does another job save into this folder?", file
    )


def _write_runs(
    path: Path, runs: Iterable[Run], banner: bytes, lent: Sequence[SealedArray], ranks: int
) -> dict[str, Any]:
    """Writes a shard and puts it on disk; returns its entry in the manifest."""
    table = []
    with NamedFile(path, "xb") as raw:
        stream = Checksummed(raw)
        stream.write(memoryview(banner))
        placed = stream.append_arrays(lent, runs, ranks) if lent else {}
        for run in runs:
            values = in_host_memory(run.values)
            offset = placed.get(run.name)
            if offset is None:
                stream.write(memoryview(bytes(-stream.size % _ALIGNMENT)))
                offset = stream.size
                if values.numel():
                    stream.write(bytes_of(values))
            table.append(
                {
                    "name": run.name,
                    "dtype": dtype_name(values.dtype),
                    "shape": list(run.spread.shape),
                    "cut": [run.spread.dim, run.spread.parts],
                    "piece": [offset, run.part, run.begin, values.numel()],
                }
            )
        crc32 = stream.finish()
        raw.sync()
    sync_folder(path.parent)
    return {"file": {"name": path.name, "size": stream.size, "crc32": crc32}, "runs": table}


def _merge(step: int, save: str, topology: Topology, parts: list[dict[str, Any]]) -> Manifest:
    """The manifest of the messages of all ranks, in rank order."""
    tensors: dict[str, StoredTensorInfo] = {}
    for number, part in enumerate(parts):
        for run in part["runs"]:
            dim, slices = run["cut"]
            info = StoredTensorInfo(run["dtype"], run["shape"], dim, slices, [])
            known = tensors.setdefault(run["name"], info)
            if (known.dtype, known.shape, known.dim, known.parts) != (info.dtype, info.shape, dim, slices):
                raise ValueError(
                    f"tensor {run['name']}: rank {number} has {info.dtype} {info.shape}, others {known.dtype} "
                    f"{known.shape}"
                )
            known.pieces.append(Piece(number, *run["piece"]))
    values = parts[0]["values"]
    for number, optimizer in enumerate(values["optimizers"]):
        merged: dict[str, dict[str, Any]] = {}
        for part in parts:
            for index, entry in part["entries"][number].items():
                merged[index] = {**entry, **merged.get(index, {})}
        optimizer["entries"] = merged
    manifest = Manifest(
        step=step,
        save=save,
        world_size=topology.world_size,
        tp_size=topology.tp_size,
        pipe_size=topology.pipe_size,
        files=[ShardFile(**part["file"]) for part in parts],
        tensors=tensors,
        values=values,
        ranks=[part["own"] for part in parts],
        ep_size=topology.ep_size,
    )
    return Manifest.from_bytes(manifest.to_bytes(), "the manifest to be written")


def write_single(checkpoint: Path, runs: Iterable[Run], keys: list[Any]) -> None:
    """Makes a checkpoint of a model alone, by one process without a group; ``runs`` are taken one at a time."""
    saving = Saving(checkpoint, os.urandom(5).hex(), 0, Topology(0, 1), None, 0.0)
    saving.prepare()
    no_value: dict[str, Any] = {"is": None, "tensors": []}
    values = {
        "model": {"keys": keys, "metadata": no_value},
        "optimizers": [],
        "schedulers": {"is": {"list": []}, "tensors": []},
        "extra": no_value,
    }
    try:
        saving.write_shard(Snapshot(values=values, own={"data": no_value, "random": None}), runs)
        saving.commit()
    except BaseException:
        saving.clean_up()
        raise
