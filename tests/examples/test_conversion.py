"""The script of example/nanogpt as the page converts it: few lines, and other samples on each rank."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from harness import run_ranks

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "example" / "nanogpt" / "plain.py"
PAGE = ROOT / "docs" / "howto" / "migrate-from.md"
LIBRARIES = ("bmtrain", "FSDP2", "accelerate")


def diffs(page: Path) -> dict[str, list[str]]:
    """The diffs of a page, by library."""
    fences = re.findall(r"^```diff\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return dict(zip(LIBRARIES, (fence.splitlines() for fence in fences), strict=True))


def converted(diff: list[str]) -> str:
    """The plain script with a diff applied: lines with a blank in front say where, others are found by themselves."""
    lines, at = PLAIN.read_text(encoding="utf-8").splitlines(), 0
    for line in diff:
        if line[0] == "+":
            lines.insert(at, line[1:])
            at += 1
        else:
            at = lines.index(line[1:], at)
            if line[0] == "-":
                del lines[at]
            else:
                at += 1
    return "\n".join(lines) + "\n"


def run(program: str, folder: str) -> None:
    os.chdir(folder)
    sys.argv = ["train.py"]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_rank_has_its_own_samples(
    library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if library == "accelerate":
        pytest.importorskip("accelerate")
    (tmp_path / "input.txt").write_text(Path(difflib.__file__).read_text(encoding="utf-8")[:20000])
    program = converted(diffs(PAGE)[library])
    run_ranks(2, run, program, str(tmp_path), init=False, fresh=True, timeout=120)
    output = capsys.readouterr().out
    losses = [
        [float(loss) for loss in re.findall(rf"rank {rank}\] step \d+: loss (\S+)", output)]
        for rank in (0, 1)
    ]
    assert len(losses[0]) == len(losses[1]) == 5, output
    assert losses[0][0] != losses[1][0]
    assert losses[0][-1] < losses[0][0] - 0.3
    names = torch.load(tmp_path / "model.pt", weights_only=True)
    assert names["layers.1.up.weight"].shape == (256, 64)
    assert "bit for bit" not in output


def test_bmtrain_takes_ten_lines() -> None:
    assert len(PLAIN.read_text(encoding="utf-8").splitlines()) <= 70
    assert sum(line[0] == "+" for line in diffs(PAGE)["bmtrain"]) <= 10


def test_the_chinese_page_has_the_same_diffs() -> None:
    assert diffs(ROOT / "docs" / "zh" / "howto" / "migrate-from.md") == diffs(PAGE)
