"""`python -m bmtrain bench adam` and `bench offload` run and say what they measured; how fast is no test's matter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from harness import run_process
from optimizer_steps import AdamRanges

from bmtrain.__main__ import main
from bmtrain.benchmark._steps import Size


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "adam.json"
    options = ["--sizes", "4x20", "--threads", "1", "--repeat", "1", "--json", str(file)]
    options += ["--plot", str(tmp_path / "adam.svg")]
    assert main(["bench", "adam", *options]) == 0
    out = capsys.readouterr().out
    assert "4 x 2^20 elements, 1 thread" in out
    (result,) = json.loads(file.read_text())["results"]
    assert all(f"\n{name}" in out and min(seconds) > 0 for name, seconds in result["seconds"].items())
    assert len(result["seconds"]) == 14
    assert (tmp_path / "adam.svg").read_text().count("<rect") == 15
    assert "16-bit: AdamOffload is " in out


@pytest.mark.parametrize(("formula", "name", "num_rows"), [("sgd", "SGD", 9), ("lion", "Lion", 5)])
def test_other_formulas(
    formula: str, name: str, num_rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "step.json"
    options = [
        "--formula",
        formula,
        "--sizes",
        "2x10",
        "--threads",
        "1",
        "--repeat",
        "1",
        "--json",
        str(file),
    ]
    assert main(["bench", "adam", *options]) == 0
    content = json.loads(file.read_text())
    assert content["bytes"] == 20
    assert len(content["results"][0]["seconds"]) == num_rows
    out = capsys.readouterr().out
    assert f"\n16-bit: {name}Offload" in out
    assert (" x as fast as " in out) == (formula == "sgd")


def test_the_move_has_the_bytes_of_a_step() -> None:
    ranges = AdamRanges(*([torch.full((1001,), float(k), dtype=d)] for k, d in enumerate(
        (torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32))), [1])  # fmt: skip
    torch.ops.bmtrain.adam_move_(*ranges[:5])
    assert [t[0].unique().tolist() for t in ranges[:5]] == [[0], [2], [2], [3], [4]]
    codes = [torch.arange(1001 + 32).byte() for _ in range(2)]
    weights = ranges.weights[0].clone()
    coded = ranges._replace(rounded=[torch.zeros(1001).bfloat16()], exp_avgs=codes[:1], exp_avg_sqs=codes[1:])
    torch.ops.bmtrain.adam_move_(*coded[:5])
    assert torch.equal(ranges.weights[0], weights)
    assert all(torch.equal(array, torch.arange(1001 + 32).byte()) for array in codes)
    assert Size.read("100x16").numel == 100 << 16
    with pytest.raises(
        TypeError, match="expected 16-bit grads and rounded weights, and moments in float32 or 8 bits"
    ):
        torch.ops.bmtrain.adam_move_(*ranges._replace(rounded=[], grads=[torch.ones(1001)])[:5])


def test_offload_reports_what_is_exposed(tmp_path: Path) -> None:
    options = ["--layers=2", "--dim=32", "--seq=8", "--repeat=1", f"--json={tmp_path / 'offload.json'}"]
    result = run_process([sys.executable, "-m", "bmtrain", "bench", "offload", *options])
    assert [line.split()[0] for line in result.stdout.splitlines()[2:5]] == [
        "no",
        "overlap=False",
        "overlap=True",
    ]
    assert json.loads((tmp_path / "offload.json").read_text())["seconds"].keys() >= {"overlap=True"}


def test_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "nothing"])
    assert exit_.value.code == 2
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
