"""The files that a Block's forward and backward execute: ceilings of their number and lines, and the page's table."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report() -> str:
    command = [sys.executable, "tests/block_path.py"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("page", ["docs/explanation/architecture.md", "docs/zh/explanation/architecture.md"])
def test_the_page_lists_the_executed_files(report: str, page: str) -> None:
    files = re.findall(r"^ *\d+  (\S+)$", report, flags=re.MULTILINE)
    section = (ROOT / page).read_text(encoding="utf-8").rpartition("\n## ")[2]
    executed = [name for name in files if name.startswith("bmtrain/")]
    assert re.findall(r"^\| `(bmtrain/[^`]+)` \|", section, flags=re.MULTILINE) == executed
    for number, lines in re.findall(r"^(\d+) files \(.*?\), (\d+) lines", report, flags=re.MULTILINE):
        assert re.search(rf"\b{number} ", section)
        assert f"{int(lines):,}" in section
    on_cpu = re.search(r"^on CPU ranks (\d+) files with (\d+) lines: also (.+)$", report, flags=re.MULTILINE)
    assert on_cpu
    assert re.search(rf"\b{on_cpu[1]} ", section)
    assert f"{int(on_cpu[2]):,}" in section
    assert all(f"`{Path(name).name}`" in section for name in on_cpu[3].split(", "))
    core = re.findall(r"`(csrc/[^`]+\.(?:h|cpp))`", section)
    assert sorted(core) == sorted(set(files) - set(executed))
