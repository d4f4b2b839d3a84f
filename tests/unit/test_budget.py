"""The table of lines: it holds today, and an excess or an entry in no row is an error."""

from __future__ import annotations

from pathlib import Path

import budget
import pytest


def test_the_table_holds() -> None:
    assert budget.main() == 0


def test_an_excess_and_an_unknown_entry_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("bmtrain/one.py", "bmtrain/low/two.py", "bmtrain/other/three.py", "csrc/low/four.cpp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("line\nline\n")
    monkeypatch.setattr(budget, "ROOT", tmp_path)
    monkeypatch.setattr(budget, "PYTHON", {"low": ("low one", 3), "tools": ("_tools", 0)})
    monkeypatch.setattr(budget, "CORE", {"low": ("low", 2), "testing": ("testing", 0)})
    assert budget.main() == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "error: other: expected a row for it in tests/budget.py, got none",
        "error: low: expected at most 3 lines, got 4; remove lines, or raise the ceiling in tests/budget.py and give "
        "the reason in the commit message",
    ]
    assert "without tools   4 (goal: 22000)" in printed.out
