"""Drives of a process, and the division of files over them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence

from .._C import DiskFile, DiskQueue
from .._ranks.agree import failing_together
from .._ranks.context import Context
from .._ranks.objects import allgather_objects
from ..errors import DiskError
from .observer import Observer

_BUFFERS, _BUFFER = 6, 2 << 20
_MEASURED = 64 << 20  # bytes


class Drives:
    """Directories, each on a drive, which get files in proportion to their speeds.

    Args:
        directories: at least one.
        speeds: of their drives, in any unit.

    Attributes:
        observer: receives transfers; None if nothing records them.
        failure: the first failure of this rank; nothing is read after it.
    """

    observer: Observer | None = None
    failure: DiskError | None = None

    def __init__(self, directories: Sequence[str], speeds: Sequence[float]) -> None:
        self.directories = tuple(directories)
        self._speeds = speeds
        self._times = [0.0] * len(speeds)  # in which each drive moves its files

    @classmethod
    def measured(cls, directories: Sequence[str], context: Context) -> Drives:
        """Measures the speeds, if there are several; they are equal on all ranks of a host. Collective.

        Raises:
            DiskError: no file can be made in a directory.
        """
        if len(directories) < 2:
            return cls(directories, [1.0] * len(directories))
        with failing_together("measuring tier_directories"):
            queue = make_queue()
            own = [sum(measure(queue, directory, _MEASURED)[1:]) for directory in directories]
            own = [speed / number for speed, number in zip(own, num_on_drives(directories), strict=True)]
        places = context.places or ("",)
        here = places[context.topology.rank]
        found = [
            speeds for place, speeds in zip(places, allgather_objects(own), strict=True) if place == here
        ]
        return cls(directories, [sum(speeds) for speeds in zip(*found, strict=True)])

    def note(self, failure: DiskError) -> None:
        """Records a failure, which `check` raises."""
        self.failure = self.failure or failure

    def check(self) -> None:
        """Raises the first failure of this rank."""
        if self.failure is not None:
            raise self.failure

    def reserve(self, nbytes: int) -> DiskFile:
        """Makes a file on the drive that is done first with its files and this one; on another one if it has no room.

        Raises:
            DiskError: no drive has room.
        """
        times = [time + nbytes / speed for time, speed in zip(self._times, self._speeds, strict=True)]
        failure: DiskError | None = None
        for number in sorted(range(len(times)), key=times.__getitem__):
            try:
                file = DiskFile(self.directories[number])
                file.reserve(nbytes)
            except DiskError as error:
                failure = failure or error
            else:
                self._times[number] = times[number]
                return file
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # it refers to this frame, which would keep the file


def num_on_drives(directories: Sequence[str]) -> list[int]:
    """Returns for each directory the number of these directories that share its drive, and so its bandwidth."""
    devices = [os.stat(directory).st_dev for directory in directories]
    return [devices.count(device) for device in devices]


def make_queue(environ: Mapping[str, str] = os.environ) -> DiskQueue:
    """Returns a queue for `measure`, of the back end that transfers use."""
    return DiskQueue(environ.get("BMTRAIN_DISK_IO", "auto"), _BUFFERS, _BUFFER)


def measure(queue: DiskQueue, directory: str, nbytes: int) -> tuple[DiskFile, float, float]:
    """Returns a file in a directory, and the bytes per second of writing and of reading it.

    Raises:
        DiskError: the drive has no room, or fails.
    """
    file = DiskFile(directory)
    file.reserve(nbytes)
    return file, _speed(queue, file, queue.write), _speed(queue, file, queue.read)


def measure_both(queue: DiskQueue, directory: str, nbytes: int) -> float:
    """As :func:`measure`: the bytes per second that are read and written at the same time, half of them each."""

    def move(number: int, file: DiskFile, offset: int, size: int) -> None:
        (queue.write if offset // _BUFFER % 2 else queue.read)(number, file, offset, size)

    return _speed(queue, measure(queue, directory, nbytes)[0], move)


def _speed(queue: DiskQueue, file: DiskFile, move: Callable[[int, DiskFile, int, int], None]) -> float:
    start = time.perf_counter()
    for number in range(file.nbytes // _BUFFER):
        queue.wait(number % _BUFFERS)
        move(number % _BUFFERS, file, number * _BUFFER, _BUFFER)
    for number in range(_BUFFERS):
        queue.wait(number)
    return file.nbytes / (time.perf_counter() - start)
