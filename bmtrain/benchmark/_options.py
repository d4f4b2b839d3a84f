"""Options that several benchmarks have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


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


def numbers(text: str) -> list[int]:
    """Whole numbers from 1, with commas between them."""
    if not all(number.isdecimal() and int(number) for number in text.split(",")):
        raise argparse.ArgumentTypeError(
            f"expected whole numbers from 1 with commas between them, got {text!r}"
        )
    return list(map(int, text.split(",")))


def add_run(parser: argparse.ArgumentParser, *, ranks: int = 2, seq: int = 256) -> None:
    """The options of the ranks of a benchmark and of the GPT that they train, with these defaults."""
    parser.add_argument("--ranks", type=int, default=ranks, help="number of ranks")
    parser.add_argument("--layers", type=int, default=8, help="layers")
    parser.add_argument("--dim", type=int, default=512, help="width")
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank")
    parser.add_argument("--seq", type=int, default=seq, help="tokens of a sequence")
