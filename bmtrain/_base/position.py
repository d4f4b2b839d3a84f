"""The position of a script, for reports: its innermost line outside this library, torch and Python's own modules."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

_LIBRARY = os.path.dirname(os.__file__) + os.sep


def of_main_thread() -> str | None:
    """The current position of the script's thread; None if it runs no Python."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _first_foreign(frame for frame, _ in traceback.walk_stack(frame)) if frame else None


def of_traceback(trace: TracebackType | None) -> str | None:
    """The position at which an exception was raised."""
    return _first_foreign([frame for frame, _ in traceback.walk_tb(trace)][::-1])


def _first_foreign(frames: Iterable[FrameType]) -> str | None:
    ours = (str(Path(__file__).parents[1]), os.sep + "torch" + os.sep)
    found = None
    for frame in frames:
        file = frame.f_code.co_filename
        if any(part in file for part in ours):
            continue
        place = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        if not _is_python(file):
            return place
        found = found or place
    return found


def _is_python(file: str) -> bool:
    """Whether a file belongs to Python itself (queue.py, threading.py), whose lines do not locate a script."""
    return file.startswith(("<frozen", _LIBRARY)) and "-packages" + os.sep not in file
