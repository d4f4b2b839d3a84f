"""The benchmarks of several ranks run and say what they measured; how fast it was is no matter of a test."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import run_process

from bmtrain.__main__ import main


@pytest.fixture
def bench(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Runs a benchmark, whose ranks are programs of their own, which leave no file; returns what is printed."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which stays

    def run(*arguments: str) -> str:
        command = ["bench", *arguments]
        monkeypatch.setattr(sys, "argv", ["bmtrain", *command])  # of which the ranks get the options
        assert main(command) == 0
        assert not list(temporary.iterdir())
        return capfd.readouterr().out

    return run


@pytest.mark.slow
def test_comm(bench: Callable[..., str], tmp_path: Path) -> None:
    file, plot = tmp_path / "comm.json", tmp_path / "comm.png"
    options = ["--ranks", "2", "--sizes", "4,256", "--repeat", "2", "--json", str(file), "--plot", str(plot)]
    output = bench("comm", *options)
    rows = json.loads(file.read_text())
    assert len(rows) == 6 * 2 * 3
    assert {row["variant"] for row in rows} == {"shm", "gloo", "torch"}
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    assert all(f"{row['primitive']} " in output for row in rows)
    assert plot.stat().st_size > 0


def test_disk(tmp_path: Path) -> None:
    file = tmp_path / "disk.json"
    options = ["--directory", str(tmp_path), "--mib", "8", "--width", "256", "--repeat", "2"]
    # Not in this process, where it would initialise bmtrain.
    output = run_process(
        [sys.executable, "-m", "bmtrain", "bench", "disk", *options, "--json", str(file)]
    ).stdout
    results = json.loads(file.read_text())
    block = 4 * 256 * 256
    assert (results["update"]["read"], results["update"]["written"]) == (8 * 4 * block, 8 * 3 * block)
    assert (results["step"]["read"], results["step"]["written"]) == (47 * block, 32 * block)
    peer = results.pop("deepspeed")
    assert peer.get("share", 1) > 0 and ("error" in peer or len(peer["seconds"]) == 2)
    for result in results.values():
        assert {len(values) for values in result["seconds"].values()} == {2}
    assert "of the raw program" in output and "of the time of a copy" in output and "DeepSpeed" in output


@pytest.mark.slow
def test_step(bench: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    model = ["--layers", "2", "--dim", "32", "--batch", "1", "--seq", "16", "--repeat", "1"]
    variants = ["alone", "fsdp2", "bmtrain-3", "silent-3", "alone-bf16", "bmtrain-3-bf16"]
    options = [*model, "--variants", ",".join(variants), "--json", str(file)]
    output = bench("step", *options)
    rows = json.loads(file.read_text())["results"]
    assert [row["variant"] for row in rows] == variants
    alone, fsdp2, ours, _, _, ours_bf16 = rows
    assert ours["losses"] == pytest.approx(alone["losses"], rel=1e-6)
    assert ours["losses"] == pytest.approx(fsdp2["losses"], rel=1e-6)
    assert fsdp2["wire_bytes"] is None
    assert 0 < ours_bf16["wire_bytes"] < ours["wire_bytes"]
    assert "x fsdp2, its best setting" in output
    assert "% of a step is communication that is not hidden" in output


@pytest.mark.slow
def test_scale(bench: Callable[..., str], tmp_path: Path) -> None:
    file, plot = tmp_path / "scale.json", tmp_path / "scale.png"
    model = ["--layers", "2", "--dim", "32", "--seq", "8", "--repeat", "1"]
    numbers = ["--blocks", "2,3", "--ranks", "2", "--json", str(file), "--plot", str(plot)]
    output = bench("scale", *model, *numbers)
    found = json.loads(file.read_text())
    assert [(row["blocks"], row["ranks"]) for row in found["blocks"]] == [(2, 2), (3, 2)]
    assert [(row["blocks"], row["ranks"]) for row in found["ranks"]] == [(2, 2)]
    more, fewer = found["blocks"][1], found["blocks"][0]
    assert more["messages"] - fewer["messages"] == 3  # a gather for forward, one for backward, a reduction
    assert "us to a backward" in output
    assert plot.stat().st_size > 0


@pytest.mark.slow
def test_virtual(bench: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "virtual.json"
    options = ["--layers", "1", "--dim", "16", "--seq", "8", "--repeat", "1", "--json", str(file)]
    output = bench("virtual", *options)
    seconds = json.loads(file.read_text())["seconds"]
    assert list(seconds) == ["in one piece", "micro-batches", "virtual shards"]
    assert all(name in output and len(values) == 1 and values[0] > 0 for name, values in seconds.items())


@pytest.mark.slow
def test_cost_of_surviving(bench: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "survive.json"
    options = [
        "--layers",
        "1",
        "--dim",
        "16",
        "--seq",
        "8",
        "--repeat",
        "1",
        "--survive",
        "1",
        "--json",
        str(file),
    ]
    assert "ratio of a pair" in bench("virtual", *options)
    [pair] = json.loads(file.read_text())["pairs"]
    assert len(pair) == 2 and min(pair) > 0


@pytest.mark.slow
def test_muon(bench: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "muon.json"
    options = ["--layers", "2", "--dim", "16", "--repeat", "1", "--json", str(file)]
    output = bench("muon", *options)
    found = json.loads(file.read_text())
    assert all(name in output and min(values) > 0 for name, values in found["seconds"].items())
    assert found["state"]["torch.optim.Muon, whole"] == 2 * found["state"]["MuonOptimizer"]  # over two ranks


@pytest.mark.slow
def test_plan(bench: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    model = [
        "--layers",
        "2",
        "--dim",
        "32",
        "--batch",
        "1",
        "--seq",
        "16",
        "--repeat",
        "1",
        "--policies",
        "level-3-recompute",
        "level-0",
        "--json",
        str(file),
    ]
    output = bench("plan", *model)
    rows = json.loads(file.read_text())
    assert [row["policy"] for row in rows] == ["level-3-recompute", "level-0"]
    for row in rows:
        assert 0 < row["exposed_by_timeline"] < 1
        assert row["predicted_seconds"] > 0
        assert row["policy"] in output


@pytest.mark.parametrize("option", ["comm --primitives", "step --variants", "gpu --parts"])
def test_unknown_names(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", *option.split(), "nothing"])
    assert re.search(r"expected some of a\w+, .* got nothing", capsys.readouterr().err)
