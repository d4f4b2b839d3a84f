"""The one-file example: it learns, and goes on where it was, on another number of ranks too."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from harness import run_ranks

SCRIPT = Path(__file__).parents[2] / "example" / "nano.py"
TINY = ["--layers", "2", "--heads", "2", "--dim", "32", "--context", "32", "--log-every", "30"]


def run(arguments: list[str]) -> None:
    sys.argv = [str(SCRIPT), *TINY, *arguments]
    names = runpy.run_path(str(SCRIPT), run_name="__main__")
    assert names["validation"].dataset.starts.step == names["options"].context, "held-out pieces overlap"


def losses(capsys: pytest.CaptureFixture[str], world: int, *arguments: object) -> list[float]:
    """The validation losses that a run prints."""
    options = [str(argument) for argument in arguments]
    run_ranks(world, run, options, init=False, fresh=True, timeout=120)
    return [float(loss) for loss in re.findall(r"step +\d+  validation loss (\S+)", capsys.readouterr().out)]


def test_learns_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = losses(capsys, 2, "--out", tmp_path / "whole", "--steps", 60)
    assert len(whole) == 3 and whole[-1] < whole[0] - 1
    first = losses(capsys, 2, "--out", tmp_path / "cut", "--steps", 40)
    assert first[0] == whole[0]
    second = losses(capsys, 1, "--out", tmp_path / "cut", "--steps", 60, "--batch-size", 16)
    assert len(second) == 1 and second[0] < first[0] - 1
    (saved,) = (tmp_path / "cut").glob("*60")
    assert saved.is_dir()


def test_is_short_and_its_model_is_plain_torch() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert "bmt" not in text.split("- model")[1].split("dtype =")[0]
