"""The tools that come with the library: ``bmtrain COMMAND``, or ``python -m bmtrain COMMAND``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ._tools.command_line import make_parser

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
    """Entry point of the console script: `main`, ended in one line by Ctrl-C and silently by a closed pipe (head)."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except KeyboardInterrupt:
        if "RANK" not in os.environ:  # who started the ranks says it
            print("bmtrain: stopped by SIGINT", file=sys.stderr)
        status = 130
    return status


if __name__ == "__main__":
    raise SystemExit(command())
