"""Files that appear under their name only when they are complete."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import Any, BinaryIO

_ANYBODY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


class NamedFile(io.FileIO):
    """A file to write whose errors name it, as errors of `open` do; an error of a full disk would not."""

    def __init__(
        self, path: str | os.PathLike[str], mode: str, name: str | os.PathLike[str] | None = None
    ) -> None:
        self.failure: OSError | None = None  # the first of a write
        self._told_name = os.fspath(path if name is None else name)
        with self._naming():
            super().__init__(path, mode)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            error.filename = self._told_name
            raise

    def write(self, data: Any) -> int:
        """Returns the number of bytes written, perhaps fewer than ``data`` has (as of a raw file)."""
        with self._naming():
            return super().write(data)

    def sync(self) -> None:
        """Returns when the written data are on disk."""
        with self._naming():
            os.fsync(self.fileno())


class AtomicFile:
    """A new file that replaces ``path`` when its ``with`` block ends well, and leaves ``path`` alone otherwise.

    The data are in a file beside it until they are on disk; then the name is moved. At any moment
    the name stands for the complete old or new content. Pipes, devices and other special files are written directly.
    The new file has the mode of the one that it replaces and, where the process may give it, its owner. A symbolic
    link is followed, and a write-protected file refused.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._target = os.path.realpath(path)
        self._temporary: str | None = None
        old = _status(path)
        if old is not None and not old.st_mode & _ANYBODY_WRITES:  # moving a name would not ask
            raise PermissionError(errno.EACCES, "Write-protected: chmod u+w allows to replace it", str(path))
        if old is None or stat.S_ISREG(old.st_mode):
            folder, name = os.path.split(self._target)
            _remove_leftovers(folder, name)
            self._temporary = os.path.join(folder, f"{_prefix(name)}{os.getpid()}.tmp")
        self._raw = NamedFile(self._temporary or path, "wb", path)
        self.file: BinaryIO = io.BufferedWriter(self._raw)
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
            elif self._raw.failure is not None:  # its consequences need not look like it: writers tidy up
                raise self._raw.failure from None
        finally:
            self._raw.close()  # not the buffer: it would try once more to write what could not be written
            if self._temporary is not None:
                with contextlib.suppress(OSError):  # gone, if it was published
                    os.unlink(self._temporary)

    def _publish(self) -> None:
        self.file.flush()
        if self._temporary is None:
            return
        self._raw.sync()
        os.replace(self._temporary, self._target)
        sync_folder(os.path.dirname(self._target))


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Flushes the names of a folder to disk where the file system supports it; some network and user ones do not."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(handle)


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Status of a file; None if it does not exist."""
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
    """Removes temporary files of exited processes of this host."""
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
