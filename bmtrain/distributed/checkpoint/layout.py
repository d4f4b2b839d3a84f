"""Layout of a folder of checkpoints: names, completeness, deletion.

FOLDER/latest                                  the name of the newest complete checkpoint
FOLDER/step-0000100/manifest.json              written last: without it the checkpoint is not there
FOLDER/step-0000100/shard-2-of-4-<save>.bin    the tensors of rank 2
FOLDER/step-0000100/part-2-of-4-<save>.json    the message of rank 2 to rank 0 while they save
"""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path

from ..._base.atomic_file import AtomicFile
from ...errors import UnreadableFileError
from .manifest import DTYPES, Manifest

__all__ = [
    "LATEST",
    "MANIFEST",
    "check_sizes",
    "complete_steps",
    "newest",
    "part_name",
    "point_to",
    "read_manifest",
    "remove_checkpoint",
    "remove_old",
    "remove_unreferenced",
    "shard_name",
    "step_folder",
]

LATEST = "latest"
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{7,})")
_OURS = re.compile(r"(shard|part)-.*\.(bin|json)(\..*)?|\.(part|manifest).*\.tmp")


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:07d}"


def shard_name(rank: int, world_size: int, save: str) -> str:
    return f"shard-{rank}-of-{world_size}-{save}.bin"


def part_name(rank: int, world_size: int, save: str) -> str:
    return f"part-{rank}-of-{world_size}-{save}.json"


def read_manifest(checkpoint: Path) -> Manifest:
    """The table of contents of a checkpoint."""
    path = checkpoint / MANIFEST
    try:
        return Manifest.from_bytes(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise FileNotFoundError(2, "no complete checkpoint: no such file", str(path)) from None


def check_sizes(checkpoint: Path, manifest: Manifest) -> None:
    """Raises UnreadableFileError or OSError unless all files are there in full length."""
    for index, file in enumerate(manifest.files):
        path = checkpoint / file.name
        size = path.stat().st_size
        if size != file.size:
            cut = [
                (piece.offset, name)
                for name, tensor in manifest.tensors.items()
                for piece in tensor.pieces
                if piece.file == index and piece.offset + piece.num * DTYPES[tensor.dtype].itemsize > size
            ]
            first = f", from tensor {min(cut)[1]} on" if cut else ""
            raise UnreadableFileError(f"{path}: damaged{first}: expected {file.size} bytes, got {size}")


def _steps(folder: Path) -> list[Path]:
    """All folders of steps, the highest first, complete or not."""
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _flaw(checkpoint: Path) -> Exception | None:
    """The reason why a checkpoint cannot be loaded; None for a complete one."""
    try:
        check_sizes(checkpoint, read_manifest(checkpoint))
    except (OSError, UnreadableFileError) as error:
        return error
    return None


def complete_steps(folder: Path) -> list[Path]:
    """The complete checkpoints: the one that was saved last, then the others from the highest step down."""
    if not folder.is_dir():
        return []
    complete = [path for path in _steps(folder) if _flaw(path) is None]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        last = folder / (folder / LATEST).read_text().strip()
        if last in complete:
            complete.remove(last)
            complete.insert(0, last)
    return complete


def newest(folder: Path) -> Path | None:
    """The checkpoint that was saved last; if that is not recorded, the complete one with the highest step.

    Warns if it skips a checkpoint that was complete once, because the run then resumes from an older one.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError):
        name = (folder / LATEST).read_text().strip()
        if _STEP.fullmatch(name) and _flaw(folder / name) is None:
            return folder / name
    for path in _steps(folder) if folder.is_dir() else []:
        flaw = _flaw(path)
        if flaw is not None and (path / MANIFEST).exists():
            warnings.warn(f"{path}: passed over, no longer a complete checkpoint: {flaw}", stacklevel=2)
    return next(iter(complete_steps(folder)), None)


def point_to(checkpoint: Path) -> None:
    """Makes ``latest`` name the checkpoint."""
    with AtomicFile(checkpoint.parent / LATEST) as file:
        file.write(f"{checkpoint.name}\n".encode())


def remove_old(folder: Path, keep: int) -> None:
    """Removes all but ``keep`` complete checkpoints, and what unfinished saves left behind."""
    kept = complete_steps(folder)[:keep]
    for path in _steps(folder):
        if path in kept:
            remove_unreferenced(path)
        elif kept:
            # Never the last ones: if none is known to be good, any may be the one to rescue.
            remove_checkpoint(path)


def remove_unreferenced(checkpoint: Path) -> None:
    """Removes the files of earlier or interrupted saves of the same step; the whole folder if nothing else is there."""
    referenced: set[str] = set()
    if (checkpoint / MANIFEST).exists():
        try:
            referenced = {file.name for file in read_manifest(checkpoint).files}
        except UnreadableFileError:
            return  # a damaged manifest does not say what is no longer needed
    for path in checkpoint.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in referenced:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        checkpoint.rmdir()  # refused while it holds anything


def remove_checkpoint(checkpoint: Path) -> None:
    """Removes a checkpoint, the manifest first, so that an interruption leaves no damaged checkpoint."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    remove_unreferenced(checkpoint)
