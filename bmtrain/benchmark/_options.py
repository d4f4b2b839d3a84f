"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

__all__ = ["add_names"]


def add_names(parser: argparse.ArgumentParser, option: str, known: Iterable[str]) -> None:
    """An option that takes some of ``known``, with commas between them; by default all.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_names(parser, "--fruits", ["apples", "pears"])
        >>> parser.parse_args([]).fruits, parser.parse_args(["--fruits", "pears"]).fruits
        (['apples', 'pears'], ['pears'])
    """
    names = list(known)

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := sorted(set(chosen) - set(names)):
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)}, got {', '.join(unknown)}")
        return chosen

    parser.add_argument(
        option, type=parse, default=names, metavar="NAME,...", help=f"of {', '.join(names)} (default: all)"
    )
