"""`python -m bmtrain bench adam` runs and says what it measured; how fast it was is no matter of a test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bmtrain.__main__ import main


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "adam.json"
    options = ["--sizes", "10", "--tensors", "4", "--threads", "1", "--repeat", "2", "--json", str(file)]
    assert main(["bench", "adam", *options]) == 0
    out = capsys.readouterr().out
    assert "2^10 elements in 4 tensors, 1 threads" in out
    (result,) = json.loads(file.read_text())["results"]
    assert all(f"  {name}" in out and seconds > 0 for name, seconds in result["seconds"].items())
    assert len(result["seconds"]) == 9


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "nothing"])
    assert exit_.value.code == 2
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
