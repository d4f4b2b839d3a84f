"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from types import TracebackType
from typing import BinaryIO

__all__ = ["AtomicFile", "sync_folder"]

_ANYBODY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class AtomicFile:
    """A new file that replaces ``path`` when its ``with`` block ends well, and leaves ``path`` alone otherwise.

    The data are in a file beside it until they are on disk; then the name is moved. Whatever happens at any moment, the
    name stands for the old content or the new one. What is not a regular file (a pipe, a device) is written directly.
    The new file has the mode of the one that it replaces and, where the process may give it, its owner.

    Args:
        path: the file to replace; a symbolic link is followed.

    Raises:
        OSError: if the file cannot be made, or the one that is there is write-protected.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._target = os.path.realpath(path)
        self._temporary: str | None = None
        old = _status(self._target)
        if old is not None and not old.st_mode & _ANYBODY_WRITES:  # moving a name would not ask
            raise PermissionError(errno.EACCES, "Write-protected: chmod u+w allows to replace it", str(path))
        if old is None or stat.S_ISREG(old.st_mode):
            folder, name = os.path.split(self._target)
            _remove_leftovers(folder, name)
            self._temporary = os.path.join(folder, f"{_prefix(name)}{os.getpid()}.tmp")
        try:
            self.file: BinaryIO = open(self._temporary or self._target, "wb")  # noqa: SIM115
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        if self._temporary is not None and old is not None:
            _take_over(self.file.fileno(), old)

    def __enter__(self) -> BinaryIO:
        return self.file

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        finally:
            self.file.close()
            if self._temporary is not None:
                with contextlib.suppress(OSError):  # gone, if it was published
                    os.unlink(self._temporary)

    def _publish(self) -> None:
        self.file.flush()
        if self._temporary is None:
            return
        os.fsync(self.file.fileno())
        os.replace(self._temporary, self._target)
        sync_folder(os.path.dirname(self._target))


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Put the names in a folder on disk, where the file system knows how to: some network and user file systems do not.

    Raises:
        OSError: it knows how to, and could not.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def _status(path: str) -> os.stat_result | None:
    """What the system knows of a file; None where there is none."""
    try:
        return os.stat(path)
    except OSError:
        return None


def _take_over(file: int, old: os.stat_result) -> None:
    """Gives a file owner and mode of another, as far as the process and the file system let it."""
    with contextlib.suppress(OSError):
        os.fchown(file, old.st_uid, old.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(file, stat.S_IMODE(old.st_mode))  # after the owner, whose change takes bits from it


def _prefix(name: str) -> str:
    return f".{name}.{socket.gethostname()}-"


def _remove_leftovers(folder: str, name: str) -> None:
    """Removes what processes of this host that are gone have left behind."""
    prefix = _prefix(name)
    with contextlib.suppress(OSError):
        for entry in os.listdir(folder):
            process = entry.removeprefix(prefix).removesuffix(".tmp")
            if entry == f"{prefix}{process}.tmp" and process.isdigit() and not _is_alive(int(process)):
                os.unlink(os.path.join(folder, entry))


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
