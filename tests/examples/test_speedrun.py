"""example/speedrun.sh says whether the target was reached, and the table of records repeats the logs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from harness import run_process

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / folder / "results" / "speedrun.md" for folder in ("docs", "docs/zh")]


@pytest.mark.slow
def test_a_run_that_is_too_short(tmp_path: Path) -> None:
    script = (ROOT / "example" / "speedrun.sh").read_text(encoding="utf-8")
    for line, instead in (
        (". tests/env.sh examples", f"PYTHON={sys.executable}"),  # the set-up is done
        ('cd "$(dirname "${BASH_SOURCE[0]}")/.."', f"cd {ROOT}"),
    ):
        assert script.count(line) == 1
        script = script.replace(line, instead)
    (tmp_path / "run.sh").write_text(script, encoding="utf-8")
    options = ["--steps", "2", "--num-layers", "1", "--dim-model", "32", "--num-heads", "2"]
    environment = {"NPROC": "2", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = ["bash", tmp_path / "run.sh", *options]
    done = run_process(command, environment=environment, timeout=180, check=False)
    assert done.returncode == 1
    assert re.search(r"^step    2  held-out loss 5\.\d{4} ", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("2.3 was not reached\n")


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_rows_repeat_their_logs(page: Path) -> None:
    rows = re.findall(
        r"^\| (\d+) \|.*\| (\d+) \| ([\d,]+) \| ([\d.]+) \| \[.*\]\((.*?)\) \|$",
        page.read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(rows) >= 2
    for number, steps, tokens, processor, log in rows:
        text = (page.parent / log).read_text(encoding="utf-8")
        assert f"reached 2.3: {steps} steps, {tokens} tokens" in text, number
        user, system = re.findall(r"([\d.]+) s (?:user|system)", text)
        assert float(processor) == pytest.approx(float(user) + float(system), abs=0.5)
