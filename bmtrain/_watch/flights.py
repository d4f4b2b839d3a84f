"""``bmtrain blame``: the rank that made a job fail, from the flight records of its ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._base.terminal import columns, fold
from .blame import read_flights


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


def write_flight(folder: Path, flight: Mapping[str, Any]) -> str:
    """Writes the flight record of one rank for :func:`run`. Returns its path, or the reason of a failure."""
    file = folder / f"flight-rank{flight['rank']}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(flight, indent=1) + "\n")
    except OSError as error:
        return f"not written ({error})"
    return str(file)
