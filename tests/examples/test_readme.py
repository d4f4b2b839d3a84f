"""The quick start of both READMEs is a program that trains."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest
import torch
from harness import run_ranks

ROOT = Path(__file__).parents[2]


def quick_start(name: str) -> str:
    """The blocks of Python between the two marks, in order."""
    text = (ROOT / name).read_text(encoding="utf-8")
    part = text.split("<!-- quick start", 1)[1].split("<!-- end of quick start -->", 1)[0]
    return "\n\n".join(re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL))


def run(folder: str) -> None:
    os.chdir(folder)
    runpy.run_path("train.py", run_name="__main__")


@pytest.mark.parametrize("world", [1, 2])
def test_quick_start(tmp_path: Path, world: int, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(quick_start("README.md"), encoding="utf-8")
    run_ranks(world, run, str(tmp_path), init=False, fresh=True)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)]
    assert len(losses) == 100
    assert losses[-1] < losses[0] / 2
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert list(weights) == ["table", "layers.0.weight", "layers.1.weight", "layers.2.weight"]


def test_both_languages_have_the_same_program() -> None:
    def without_comments(program: str) -> list[str]:
        return re.sub(r"(^ *|  )#.*$", "", program, flags=re.MULTILINE).split()

    assert without_comments(quick_start("README-ZH.md")) == without_comments(quick_start("README.md"))
