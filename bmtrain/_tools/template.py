"""Processes that find torch imported: forked from one that has done nothing else.

The template imports torch and bmtrain, and then waits at a socket. For each line it forks a child of a child, which
runs a program. The launcher, as the nearest ancestor that asks for orphans, becomes its parent.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

_ADOPTS = 36  # PR_SET_CHILD_SUBREAPER
_POLL_SECONDS = 0.02
_adopting = threading.Lock()  # `bench virtual --survive` starts two jobs at once


class Forked:
    """A child of this process, forked by another one; as much of `subprocess.Popen` as launchers need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired("", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The template of a job's processes.

    Args:
        environment: of the processes.
        options: of `subprocess.Popen`.
    """

    def __init__(self, environment: Mapping[str, str], **options: Any) -> None:
        self._program = [sys.executable, "-u"]
        self._environment, self._options = environment, options
        self._line, other = socket.socketpair()
        with other:
            own = [*self._program, "-m", __name__, str(other.fileno())]
            self._process = subprocess.Popen(own, env=environment, pass_fds=[other.fileno()], **options)

    def start(self, command: Sequence[str], changes: Mapping[str, str]) -> Process:
        """Starts a process; without the template if that has ended.

        Args:
            command: a script, or ``-m`` and a module, with its arguments.
            changes: variables in addition to, or in place of, the ones of the template.
        """
        adopts = getattr(ctypes.CDLL(None), "prctl", lambda *_: -1)  # of Linux
        _adopting.acquire()
        try:
            if adopts(_ADOPTS, 1, 0, 0, 0):
                raise OSError("expected PR_SET_CHILD_SUBREAPER")
            self._line.sendall(json.dumps([command, dict(changes)]).encode() + b"\n")
            with self._line.makefile("rb") as answer:
                return Forked(int(answer.readline()))
        except (OSError, ValueError):
            environment = {**self._environment, **changes}
            return subprocess.Popen([*self._program, *command], env=environment, **self._options)
        finally:
            adopts(_ADOPTS, 0, 0, 0, 0)
            _adopting.release()

    def close(self) -> None:
        """Ends the template; its processes continue."""
        self._line.close()
        self._process.kill()  # it may be importing still
        self._process.wait()


Process = Forked | subprocess.Popen[bytes]


def _wait_for_a_start(line: socket.socket) -> tuple[list[str], dict[str, str]] | None:
    """Returns in each process that is to run a program, with the arguments of `start`, and at the end, with None."""
    with line.makefile("rb") as requests:
        for request in requests:
            if not (child := os.fork()):
                if pid := os.fork():
                    line.sendall(str(pid).encode())
                    os._exit(0)
                command, changes = json.loads(request)
                return command, changes
            os.waitpid(child, 0)
            line.sendall(b"\n")  # the process has its parent now
    return None


def main() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the launcher
    import bmtrain._survive.joining
    import bmtrain.optim  # noqa: F401

    gc.freeze()  # what is imported is never garbage: collections in the processes need not look at it, nor copy it
    with socket.socket(fileno=int(sys.argv[1])) as line:
        wanted = _wait_for_a_start(line)
    if wanted is None:
        if os.getpgrp() == os.getpid():  # in a session of their own, the processes would outlive the launcher
            os.killpg(0, signal.SIGTERM)
        return
    command, changes = wanted
    os.environ.update(changes)
    signal.signal(signal.SIGINT, handler)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main()
