"""The tools that come with the library: ``bmtrain COMMAND``, or ``python -m bmtrain COMMAND``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from ._tools.command_line import make_parser
from ._tools.started import end_started

__all__ = ["command", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one tool.

    Args:
        arguments: the command line without the program; default: the command line of the process.

    Returns:
        The exit status.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = make_parser(given)
    chosen = parser.parse_args(given)
    if chosen.tool is None:
        parser.print_help(sys.stderr)
        return 2
    return chosen.run(chosen) or 0


def command() -> int:
    """Entry point of the console script: `main`, ended in one line by a signal and silently by a closed pipe (head)."""
    is_rank = "RANK" in os.environ  # who started the ranks says how they ended
    for number in (signal.SIGINT, signal.SIGTERM):
        if not is_rank and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except KeyboardInterrupt as error:
        number = signal.Signals(*error.args or (signal.SIGINT,))
        if not is_rank:
            print(f"bmtrain: stopped by {number.name}", file=sys.stderr)
        status = 128 + number
    return status


def _stop(number: int, _: object) -> None:
    """Ends the ranks that the command has started, and the command, so that it leaves nothing."""
    end_started()
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    raise SystemExit(command())
