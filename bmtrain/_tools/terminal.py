"""Text and command lines in the width of the terminal."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn


def columns(stream: IO[str] | None = None) -> int | None:
    """Columns of the terminal that a stream (by default the standard output) goes to, or that COLUMNS asks for.

    None where it is no terminal and COLUMNS is not set.
    """
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size().columns if stream.isatty() or os.environ.get("COLUMNS") else None


def fold(line: str, indent: int, width: int | None) -> str:
    """A line as several of at most ``width`` columns, all but the first indented; None leaves it as it is.

    Example:
        >>> print(fold("ok      core           up to date with its sources", 23, 40))
        ok      core           up to date with
                               its sources
    """
    if width is None or len(line) <= width or width <= indent + 10:
        return line
    indent = min(indent, max(width - max(map(len, line.split())), 0))  # a path is not broken
    return "\n".join(
        textwrap.wrap(
            line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
    )


def output_file(text: str) -> Path:
    """Type of an option: a file to write; a command refuses at once what it could not write at its end."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, {text!r} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written, got {text!r}")
    return path


class _HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs to the width of the terminal; indented lines are commands, and can be copied from it."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.replace("``", "").strip().split("\n\n")
        return "\n\n".join(self._paragraph(paragraph, width) for paragraph in paragraphs)

    def _paragraph(self, text: str, width: int) -> str:
        parts: list[str] = []
        prose: list[str] = []
        for line in [*text.splitlines(), None]:
            if line is not None and not line.startswith(" "):
                prose.append(line)
                continue
            if prose:
                parts.append(textwrap.fill(" ".join(prose), width, break_on_hyphens=False))
                prose = []
            if line is not None:
                parts.append(_command(line, width))
        return "\n".join(parts)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        usual = super()._get_default_metavar_for_optional(action)
        return "N" if action.type is int else "FILE" if action.type in (Path, output_file) else usual

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shows = isinstance(action.default, int | float | str) and action.default not in (0, argparse.SUPPRESS)
        text = action.help or ""
        return f"{text} (default: %(default)s)" if shows and "default" not in text else text

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _command(line: str, width: int) -> str:
    """A line of shell, continued with backslashes where it is too long."""
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    words = re.sub(r"(--[\w-]+) (?!-)", "\\1\0", line.strip())  # an option stays with its value
    parts = textwrap.wrap(
        words, width - 2, initial_indent=indent, subsequent_indent=indent + "    ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return " \\\n".join(parts).replace("\0", " ")


class CommandParser(argparse.ArgumentParser):
    """Reports an error of a command line in one line, and shows help in the width of the terminal."""

    def __init__(self, **options: object) -> None:
        super().__init__(**{"formatter_class": _HelpFormatter, **options})  # type: ignore[arg-type]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Refuses unknown arguments itself, so that errors of a subcommand name the subcommand."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            known = [option for option in self._option_string_actions if option.startswith("--")]
            near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Refuses numbers below 0, and an integer of 0 unless the default is as low."""
        value = super()._get_value(action, arg_string)
        if action.type in (int, float) and not action.choices:
            least = int(action.type is int and (action.default is None or action.default > 0))
            if not value >= least:  # nor NaN
                raise argparse.ArgumentError(action, f"expected a number from {least}, got {arg_string}")
        return value

    def error(self, message: str) -> NoReturn:
        """Ends the process with status 2 and an error that suggests the closest known spelling."""
        message = message.replace(" script, arguments", " script")  # the arguments may be none
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice is not None:
            near = difflib.get_close_matches(choice[1], re.findall(r"[\w.-]+", choice[2]), 1)
            message += f"; did you mean {near[0]}?" if near else ""
        line = f"{self.prog}: {message} (see {self.prog} --help)"
        self.exit(2, fold(line, 4, columns(sys.stderr) if sys.stderr.isatty() else None) + "\n")
