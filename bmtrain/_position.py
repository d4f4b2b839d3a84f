"""Where a script is, for reports: the innermost line that is neither this library's nor torch's."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

__all__ = ["of_main_thread", "of_traceback"]


def of_main_thread() -> str | None:
    """Where the script's thread is now; None if it runs no Python."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return _first_foreign(frame for frame, _ in traceback.walk_stack(frame)) if frame else None


def of_traceback(trace: TracebackType | None) -> str | None:
    """Where an exception was raised."""
    return _first_foreign([frame for frame, _ in traceback.walk_tb(trace)][::-1])


def _first_foreign(frames: Iterable[FrameType]) -> str | None:
    ours = (str(Path(__file__).parent), os.sep + "torch" + os.sep)
    for frame in frames:
        file = frame.f_code.co_filename
        if not any(part in file for part in ours):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
    return None
