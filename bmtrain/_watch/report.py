"""The report on a verdict: printed once in each output, and a flight record of each rank."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from pathlib import Path
from traceback import format_exception

from .._base.said import say_once
from .lines import Message

# Intended failures, which need no diagnosis.
_ORDERED = ("interrupted", "terminated")


class Reporter:
    """Prints verdicts and suspicions of a job, whose ranks recognise each other's reports by its ``secret``."""

    def __init__(self, rank: int, world: int, secret: str) -> None:
        self._rank, self._world = rank, world
        self._mark = hashlib.sha256(secret.encode()).hexdigest()[:16]  # visible to other users

    def report(self, verdict: Message, position: str | None, groups: list[Message]) -> None:
        """Prints the report on a verdict; the script's position and the operations are for the flight record."""
        lines = [f"bmtrain: rank {self._rank} of {self._world} gives up: {verdict['text']}"]
        resume = verdict.get("resume", "")
        if verdict["failure"]["kind"] in _ORDERED:
            lines[0] += f"; {resume}" if resume else ""
        else:
            lines += [f"    {line}" for line in (*verdict["table"], resume) if line]
        folder = os.environ.get("BMTRAIN_FLIGHT_DIR")
        if folder:
            lines.append(f"    flight record: {self._write_flight(Path(folder), verdict, position, groups)}")
        say_once([f"{self._mark}-report"], "\n".join(lines))

    def raised(self, causes: list[str], text: str) -> None:
        """Prints the traceback of an exception, unless a rank has printed one with any of these descriptions."""
        say_once(
            [f"{self._mark}-{hashlib.sha256(cause.encode()).hexdigest()[:16]}" for cause in causes], text
        )

    def notice(self, notice: Message) -> None:
        """Prints a suspicion about a run that continues."""
        lines = [f"bmtrain: {notice['text']}", *(f"    {line}" for line in notice["table"])]
        say_once([f"{self._mark}-notice-{notice['number']}"], "\n".join(lines))

    def _write_flight(
        self, folder: Path, verdict: Message, position: str | None, groups: list[Message]
    ) -> str:
        """Writes this rank's last operations; returns the path, or the reason of a failure."""
        flight = {
            "rank": self._rank,
            "world_size": self._world,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "verdict": verdict["text"],
            "failure": verdict["failure"],
            "absent": verdict["absent"],
            "position": position,
            "groups": groups,
        }
        file = folder / f"flight-rank{self._rank}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(flight, indent=1) + "\n")
        except OSError as error:
            return f"not written ({error})"
        return str(file)


def share_traceback() -> None:
    """Lets the ranks of a job without a watch print one traceback, of an exception that ends them all."""
    job = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")]
    reporter = Reporter(0, 0, repr(job))
    if all(job) and sys.excepthook is sys.__excepthook__:
        sys.excepthook = lambda *error: reporter.raised([repr(error[:2])], "".join(format_exception(*error)))
