"""What setup.py shows of ninja, and the warnings that it keeps."""

from __future__ import annotations

import json
import os
import re
import select
import sys
import threading
import time
from pathlib import Path


class CompilerOutput:
    """Says how far ninja is instead of showing its commands, and keeps the warnings of every object.

    Warnings of objects that an earlier build compiled are part of it too: tests/run.sh fails on them without other
    flags, for which everything would be compiled again.

    Args:
        path: of the warnings, object -> text.
    """

    _SILENCE = 5  # seconds
    _SILENCE_OF_PIPE = 8
    _STATUS = re.compile(r"@compiled (\d+) (\d+) (.*)")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._warnings: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        self._object = ""
        self._done = self._all = ""

    def __enter__(self) -> None:
        os.environ["NINJA_STATUS"] = "@compiled %f %t "
        sys.stdout.flush()
        self._began = self._told = time.monotonic()
        self._screen = os.dup(1)
        is_seen = os.isatty(self._screen)
        self._pause, self._silence = (2, self._SILENCE) if is_seen else (self._SILENCE_OF_PIPE,) * 2
        self._output, end = os.pipe()
        os.dup2(end, 1)
        os.close(end)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __exit__(self, *error: object) -> None:
        sys.stdout.flush()
        os.dup2(self._screen, 1)
        self._reader.join()
        os.close(self._output)
        os.close(self._screen)
        found = {name: text for name, text in self._warnings.items() if "warning" in text}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1))

    def _read(self) -> None:
        rest = b""
        while True:
            if not select.select([self._output], [], [], self._silence)[0]:
                self._tell()
                continue
            data = os.read(self._output, 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines if data else [rest]:
                self._take(line.decode(errors="replace"))
            if not data:
                return

    def _take(self, line: str) -> None:
        status = self._STATUS.match(line)
        if status is None:
            self._warnings[self._object] = self._warnings.get(self._object, "") + line + "\n"
            if line and not line.startswith(("ninja: no work", "ninja: Entering")):
                os.write(self._screen, f"{line}\n".encode())
            return
        self._done, self._all, command = status.groups()
        built = re.search(r" -o (\S+)", command)
        self._object = built[1] if built else command
        self._warnings.pop(self._object, None)
        if self._done == self._all or time.monotonic() - self._told > self._pause:
            self._tell()

    def _tell(self) -> None:
        self._told = time.monotonic()
        what = f"{self._done} of {self._all} files" if self._all else "no file is finished yet"
        os.write(self._screen, f"compiling: {what}, {self._told - self._began:.0f} s\n".encode())
