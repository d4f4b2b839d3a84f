"""``bmtrain blame``: the rank that made a job fail, from the flight records of its ranks."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .._watch.blame import read_flights
from .terminal import columns, fold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``bmtrain blame``."""
    parser.add_argument(
        "folder", type=Path, help="BMTRAIN_FLIGHT_DIR of the job, with the records of all hosts"
    )


def run(options: argparse.Namespace) -> int:
    """Reads the ranks' flight records and prints which rank caused the failure."""
    files = sorted(options.folder.glob("flight-rank*.json"))
    if not files:
        print(
            f"bmtrain blame: expected files flight-rank*.json in {options.folder}, found none",
            file=sys.stderr,
        )
        return 2
    flights = {}
    for file in files:
        try:
            flight = json.loads(file.read_text())
            flights[int(flight["rank"])] = flight
        except (ValueError, KeyError, TypeError) as error:
            print(f"bmtrain blame: {file.name} is no flight record: {error}", file=sys.stderr)
            return 2
    verdict, lines = read_flights(flights)
    for line, indent in [(verdict.text, 0), *((f"  {line}", 4) for line in lines)]:
        print(fold(line, indent, columns()))
    return 0
