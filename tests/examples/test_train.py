"""train.py and generate.py as a user starts them, on a few small files and with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Outcome, Status, at_once, rank_outcomes, run_process
from harness.terminal import in_terminal, screen_lines
from reference_gpt import ReferenceGPT

from bmtrain.timeline import read_traces

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "example"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # of programs started from here
TINY = [
    *("--num-layers", "2", "--dim-model", "32", "--num-heads", "2", "--seq-len", "32", "--batch-size", "8"),
    *(
        "--validation-batches",
        "2",
        "--warmup",
        "2",
        "--lr",
        "1e-2",
        "--log-every",
        "1",
        "--no-tensorboard",
        "--no-plot",
    ),
]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a few real files, so that reading takes no time."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("argparse", "ast", "bisect", "calendar", "csv", "dataclasses", "enum", "heapq", "inspect"):
        shutil.copy(Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py", folder)
    return folder


def run_script(name: str, arguments: list[str]) -> int:
    """The script's exit status, run on a rank that the harness has forked: no second import of torch."""
    sys.path.insert(0, str(EXAMPLE))
    sys.argv = [name, *arguments]
    try:
        runpy.run_path(str(EXAMPLE / name), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def start(
    world: int, name: str, *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> list[Outcome]:
    options = [str(argument) for argument in arguments]
    return rank_outcomes(
        world, run_script, name, options, init=False, fresh=True, timeout=120, environment=environment
    )


def succeed(
    world: int, name: str, *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> str:
    """What rank 0 printed."""
    outcomes = start(world, name, *arguments, environment=environment)
    for outcome in outcomes:
        assert outcome.status is Status.RETURNED, str(outcome)
        assert outcome.value == 0, str(outcome)
    return outcomes[0].output


def fail(world: int, name: str, *arguments: str | Path) -> str:
    """The error that was printed."""
    return error_of(start(world, name, *arguments))


def error_of(outcomes: list[Outcome]) -> str:
    """The error, printed by rank 0 alone, while every rank ended with status 2."""
    for outcome in outcomes:
        assert outcome.status is Status.RETURNED, str(outcome)
        assert outcome.value == 2, str(outcome)
        assert "Traceback" not in outcome.output
    for outcome in outcomes[1:]:
        assert "error" not in outcome.output
    lines = [line for line in outcomes[0].output.splitlines() if "error" in line]
    assert len(lines) == 1, outcomes[0].output
    return lines[0]


_CLOCK = ("tokens_per_second", "exposed_communication", "share_of_peak", "memory")


def metrics(out: Path) -> list[dict[str, Any]]:
    """What was logged, without what depends on the clock."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in _CLOCK} for record in records]


def reference(out: Path, dtype: str = "fp32") -> ReferenceGPT:
    """The model of the options TINY, as plain PyTorch reads it."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    sizes = {
        "num_layers": 2,
        "vocab_size": 264,
        "dim_model": 32,
        "dim_head": 16,
        "num_heads": 2,
        "dim_ff": 128,
    }
    model = ReferenceGPT(**sizes, max_distance=32, tied=True, dtype=dtypes[dtype])
    model.load_state_dict(torch.load(out / "model.pt", weights_only=True), strict=True)
    return model


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    options = ["--data", text, "--out", out, "--steps", "40", "--save-every", "20", "--tensorboard", "--plot"]
    output = run_process(
        [*TORCHRUN, EXAMPLE / "train.py", *TINY, *options], environment=ENVIRONMENT, timeout=180
    ).stdout
    assert "step 40/40" in output
    for name in (
        "validation loss:",
        "tokens per second:",
        "communication:",
        "peak memory per rank:",
        "checkpoint:",
        "logs:",
    ):
        assert name in output
    steps = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert steps == ["step-0000020", "step-0000040"]
    before, _, after = (
        r["validation_loss"] for r in metrics(out) if "validation_loss" in r
    )  # one at each checkpoint
    assert after < before - 1.5
    reference(out)
    for package, path in (("matplotlib", "loss.png"), ("tensorboard", "tensorboard")):
        assert (out / path).exists() == (importlib.util.find_spec(package) is not None)

    command = [sys.executable, EXAMPLE / "generate.py", "--out", out, "--prompt", "def "]
    sample = run_process(command, environment=ENVIRONMENT).stdout
    assert "def " in sample


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_loss_falls_and_checkpoint_loads_in_plain_torch(tmp_path: Path, text: Path, dtype: str) -> None:
    options = ["--dtype", dtype, "--data", text, "--out", tmp_path, "--steps", "30", "--save-every", "30"]
    output = succeed(2, "train.py", *TINY, *options)
    records = metrics(tmp_path)
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 31))
    assert all({"loss", "lr", "loss_scale", "grad_norm"} <= set(r) for r in steps)
    before, after = (r["validation_loss"] for r in records if "validation_loss" in r)
    assert after < before - 1
    assert f"{before:.4f} before, {after:.4f} after" in output
    model = reference(tmp_path, dtype)
    assert {p.dtype for p in model.parameters()} == {
        getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}.get(dtype, "float16"))
    }


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="default"),
        pytest.param(
            ["--offload", "--no-recompute", "--zero-level", "2", "--untied"],
            id="other",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_number_of_ranks_does_not_change_the_training(tmp_path: Path, text: Path, options: list[str]) -> None:
    losses = []
    for world in (1, 2, 4):
        out = tmp_path / str(world)
        succeed(world, "train.py", *TINY, *options, "--data", text, "--out", out, "--steps", "6")
        losses.append([r.get("loss", r.get("validation_loss")) for r in metrics(out)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_the_layout_does_not_change_the_training(tmp_path: Path, text: Path) -> None:
    losses = []
    for world, layout in (
        (1, ""),
        (2, "--sp 2 --ep 2"),
        (4, "--sp 2 --pipe 2"),
        (4, "--ep 2 --pipe 2 --schedule zb1p"),
    ):
        out = tmp_path / str(len(losses))
        arguments = [*TINY, "--experts", "4", *layout.split(), "--data", text, "--out", out, "--steps", "4"]
        succeed(world, "train.py", *arguments)
        losses.append([r.get("loss", r.get("validation_loss")) for r in metrics(out)])
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_resumed_equals_uninterrupted(tmp_path: Path, text: Path, dtype: str) -> None:
    options = [*TINY, "--dtype", dtype, "--data", text, "--steps", "9", "--save-every", "3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    succeed(2, "train.py", *options, "--out", whole)
    shutil.copytree(whole, cut)
    # As if it had ended after step 6, its log going on a bit.
    shutil.rmtree(cut / "checkpoints" / "step-0000009")
    output = succeed(2, "train.py", *options, "--out", cut, "--resume")
    assert "resumed from" in output
    assert metrics(cut) == metrics(whole)
    assert stored(cut) == stored(whole)
    assert (cut / "model.pt").read_bytes() == (whole / "model.pt").read_bytes()


def stored(out: Path) -> list[bytes]:
    """What each rank wrote into the checkpoint of step 9: weights, optimizer state and random number generators."""
    shards = sorted((out / "checkpoints" / "step-0000009").glob("shard-*"))
    assert [path.name[:12] for path in shards] == ["shard-0-of-2", "shard-1-of-2"]
    return [path.read_bytes().partition(b"\n")[2] for path in shards]  # the first line names the save


def test_resumed_on_another_number_of_ranks(tmp_path: Path, text: Path) -> None:
    options = [*TINY, "--data", text, "--save-every", "3", "--steps"]
    succeed(2, "train.py", *options, "6", "--out", tmp_path / "whole")
    for world in (1, 4):
        out = tmp_path / str(world)
        shutil.copytree(tmp_path / "whole", out)
        shutil.rmtree(out / "checkpoints" / "step-0000006")
        succeed(world, "train.py", *options, "6", "--out", out, "--resume")
        for record, expected in zip(metrics(out), metrics(tmp_path / "whole"), strict=True):
            assert record == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("offload", [[], ["--offload"]], ids=str)
def test_muon_is_resumed_on_another_number_of_ranks(tmp_path: Path, text: Path, offload: list[str]) -> None:
    options = [*TINY, "--optimizer", "muon", *offload, "--data", str(text), "--save-every", "4"]
    succeed(2, "train.py", *options, "--steps", "4", "--out", tmp_path / "run")
    succeed(1, "train.py", *options, "--steps", "8", "--out", tmp_path / "run", "--resume")
    losses = [r["validation_loss"] for r in metrics(tmp_path / "run") if "validation_loss" in r]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_comparison_of_optimizers(tmp_path: Path, text: Path) -> None:
    file = tmp_path / "muon.json"
    script = [
        sys.executable,
        str(EXAMPLE / "compare_optimizers.py"),
        "--data",
        str(text),
        "--json",
        str(file),
    ]
    options = ["--rates", "2e-3", "--tune-steps", "2", "--steps", "3"]
    run_process([*script, *options], environment=ENVIRONMENT, timeout=240)
    found = json.loads(file.read_text())
    assert found["rate"] == {"adam": 2e-3, "muon": 2e-3}
    adam, muon = (found["losses"][name] for name in ("adam", "muon"))
    assert [step for step, _ in adam] == [step for step, _ in muon] == [0, 1, 2, 3]
    assert adam[0] == muon[0] and adam[-1] != muon[-1]


def children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(pid) for pid in text.split()]


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path, text: Path) -> None:
    options = [*TINY, "--data", str(text), "--steps", "40", "--save-every", "2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = subprocess.Popen(
        [*TORCHRUN, str(EXAMPLE / "train.py"), *options, "--out", str(killed)],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not (killed / "checkpoints" / "step-0000006").exists():
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline, "it did not get to step 6"
            time.sleep(0.01)
    finally:
        for pid in [process.pid, *children(process.pid)]:  # torchrun gives each rank a session of its own
            os.kill(pid, signal.SIGKILL)
        process.wait()
    succeed(2, "train.py", *options, "--out", killed, "--resume")
    succeed(2, "train.py", *options, "--out", whole)
    assert metrics(killed) == metrics(whole)


def test_second_run_keeps_the_first(tmp_path: Path, text: Path) -> None:
    options = [*TINY, "--data", text, "--out", tmp_path, "--steps", "2"]
    told = succeed(1, "train.py", *options, "--inspect-every", "2", "--parameters", "host")
    assert told.count("grad_std  grad_mean") == 1 or told.count("grad_std   grad_mean") == 1
    assert re.search(r"^layers\.0\.\S+ +\(", told, re.MULTILINE)
    assert "-0.0000" not in told  # small numbers are not rounded to nothing
    assert re.search(
        r"^step 2/2  loss \S+  norm \S+  \S+ tok/s  \S+ MiB  waits .*  0:00:00 left$", told, re.MULTILINE
    )
    assert "parameters and gradients of step 2:" in told
    told = succeed(1, "train.py", *options, "--disk", tmp_path)  # with the same numbers
    assert "moved the former run" in told
    moves = r"^drives: +\S+ GB read and \S+ GB written in a step, \S+ TB written in a day$"
    assert re.search(moves, told, re.MULTILINE)
    (earlier,) = tmp_path.glob("earlier-*")
    assert (earlier / "checkpoints" / "step-0000002").exists()
    assert (earlier / "model.pt").exists()
    assert metrics(earlier) == metrics(tmp_path)


@pytest.mark.slow
def test_in_a_terminal_of_80_columns(tmp_path: Path, text: Path) -> None:
    pytest.importorskip("rich")
    options = [
        "--data",
        os.path.relpath(text, tmp_path),
        "--out",
        "out",
        "--steps",
        "24",
        "--inspect-every",
        "20",
    ]
    written = in_terminal(80, [sys.executable, EXAMPLE / "train.py", *TINY, *options], tmp_path)
    lines = screen_lines(written)
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    history = [line for line in lines if re.match(r"step +\d+/24  loss", line)]
    assert {int(line[5:7]) for line in history} == set(range(1, 25)), (
        "a line for each step stays on the screen"
    )
    assert re.search(r"loss \d.\d{4}  norm \S+  \S+ tok/s  \S+ MiB", history[-1])
    bars = [line.strip() for line in lines if line.startswith(("━", "╸"))]
    assert re.fullmatch(r"━{20,} 24/24 \S+ left loss \d.\d{4}", bars[-1])
    assert any(re.match(r"name +shape +max +std +grad_std", line) for line in lines)


def test_generate(tmp_path: Path, text: Path) -> None:
    succeed(2, "train.py", *TINY, "--data", text, "--out", tmp_path, "--steps", "2")
    options = ["--out", tmp_path, "--prompt", "import ", "--num-tokens", "40"]
    greedy = [succeed(world, "generate.py", *options, "--temperature", "0") for world in (1, 2)]
    assert greedy[0] == greedy[1]
    assert greedy[0].count("import ") == 1, "the prompt is printed once"
    assert succeed(1, "generate.py", *options, "--seed", "3") == succeed(
        1, "generate.py", *options, "--seed", "3"
    )


def test_bad_input(tmp_path: Path, text: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "file").write_text("")
    options = [*TINY, "--steps", "2", "--out", tmp_path / "out"]
    assert "does not exist" in fail(2, "train.py", *options, "--data", tmp_path / "none")
    assert "no file in" in fail(2, "train.py", *options, "--data", empty)
    assert "is empty" in fail(1, "train.py", *options, "--data", tmp_path / "file")
    assert "multiple of 2" in fail(2, "train.py", *options, "--data", text, "--batch-size", "7")
    assert "expected at least" in fail(1, "train.py", *options, "--data", text, "--seq-len", "1000000")
    assert "found none" in fail(2, "train.py", *options, "--data", text, "--resume")
    assert "found none" in fail(1, "generate.py", "--out", tmp_path / "out")
    file = tmp_path / "file"
    assert str(file) in fail(2, "train.py", *TINY, "--data", text, "--out", file / "out", "--steps", "2")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


#: Number of ranks, options of the layout -> the error.
LAYOUTS = {
    (2, "--sp 3"): "--seq-len: expected a multiple of 3",
    (2, "--sp 3 --seq-len 33 --num-heads 3 --dim-head 8"): "world_size 2 must be divisible by",
    (2, "--sp 4 --seq-len 64"): "--num-heads: expected a multiple of 4",
    (2, "--ep 2 --experts 3"): "--experts: expected a multiple of 2",
    (2, "--ep 4 --experts 4"): "ep_size: expected a divisor of 2",
    (2, "--pipe 3"): "world_size 2 must be divisible by",
    (2, "--pipe 2 --batch-size 2"): "--batch-size: expected at least 4",
}


@pytest.fixture(scope="module")
def of_layouts(tmp_path_factory: pytest.TempPathFactory, text: Path) -> dict[tuple[int, str], list[Outcome]]:
    """Outcomes of layouts that do not divide, whose ranks but the first wait for two seconds before they end."""
    folder = tmp_path_factory.mktemp("layouts")
    calls = []
    for number, (world, options) in enumerate(LAYOUTS):
        arguments = [*TINY, "--data", text, "--out", folder / str(number), "--steps", "2", *options.split()]
        calls.append(partial(start, world, "train.py", *arguments))
    outcomes = dict(zip(LAYOUTS, at_once(calls), strict=True))
    assert not any(folder.iterdir())
    return outcomes


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_that_does_not_divide(
    layout: tuple[int, str], of_layouts: dict[tuple[int, str], list[Outcome]]
) -> None:
    assert LAYOUTS[layout] in error_of(of_layouts[layout])


def test_resume_of_another_run(tmp_path: Path, text: Path) -> None:
    options = [*TINY, "--data", text, "--out", tmp_path, "--steps", "2"]
    succeed(1, "train.py", *options)
    before = sorted(p for p in tmp_path.rglob("*"))
    assert "--seq-len was 32" in fail(1, "train.py", *options, "--resume", "--seq-len", "64")
    other = text / "enum.py"
    assert "the text" in fail(1, "train.py", *options, "--resume", "--data", other)
    assert "--steps" in fail(1, "train.py", *options, "--resume", "--steps", "1")
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_a_longer_run_can_go_on(tmp_path: Path, text: Path) -> None:
    options = [*TINY, "--data", text, "--out", tmp_path]
    succeed(1, "train.py", *options, "--steps", "3")
    resumed = [succeed(1, "train.py", *options, "--steps", "5", "--resume") for _ in range(2)]
    assert [r["step"] for r in metrics(tmp_path) if "loss" in r] == [1, 2, 3, 4, 5]
    assert "tokens per second:" in resumed[0]
    assert "tokens per second:" not in resumed[1], "no step was left"
    assert not any("communication:" in output for output in resumed), "too few steps to know"


def test_a_timeline_of_the_environment_records_the_example(tmp_path: Path, text: Path) -> None:
    """Its own recording of how long ranks wait comes after that one, and both are complete."""
    recorded = tmp_path / "timeline"
    environment = {"BMTRAIN_TIMELINE": str(recorded), "BMTRAIN_TIMELINE_STEPS": "2"}
    options = ["--data", text, "--out", tmp_path, "--steps", "16"]
    output = succeed(2, "train.py", *TINY, *options, environment=environment)
    for spans in read_traces(recorded).values():
        assert sum(span.kind == "step" for span in spans) == 2
    assert re.search(r"communication: +[\d.]+ ?%", output), output


def test_a_run_that_diverges_ends_and_keeps_its_checkpoint(tmp_path: Path, text: Path) -> None:
    options = [*TINY, "--data", text, "--out", tmp_path, "--save-every", "1"]
    succeed(2, "train.py", *options, "--steps", "3")
    checkpoints = tmp_path / "checkpoints"
    good = {path: path.read_bytes() for path in checkpoints.rglob("*") if path.is_file()}
    error = fail(2, "train.py", *options, "--steps", "40", "--resume", "--lr", "1e30")
    assert re.search(
        r"step \d+: (validation )?loss is nan; the last good checkpoint is \S+: continue with", error
    )
    assert "continue with --resume and a smaller --lr or --clip" in error
    assert "step-0000003:" in error
    assert good == {path: path.read_bytes() for path in good}
    succeed(2, "train.py", *options, "--steps", "5", "--resume")


def run_and_interrupt(arguments: list[str], out: str) -> int:
    """On rank 1 Ctrl-C is pressed once the first steps are logged."""

    def press() -> None:
        log = Path(out, "metrics.jsonl")
        while not log.exists() or log.read_text().count("grad_norm") < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    if os.environ["RANK"] == "1":
        threading.Thread(target=press, daemon=True).start()
    return run_script("train.py", arguments)


def test_ctrl_c_stops_all_ranks_after_the_same_step(tmp_path: Path, text: Path) -> None:
    options = [*TINY, "--data", str(text), "--out", str(tmp_path), "--steps"]
    outcomes = rank_outcomes(
        2, run_and_interrupt, [*options, "1000000"], str(tmp_path), init=False, fresh=True, timeout=120
    )
    assert [outcome.value for outcome in outcomes] == [130, 130], outcomes
    assert "Traceback" not in outcomes[0].output + outcomes[1].output
    (said,) = re.findall(
        r"stopped at step (\d+), last checkpoint (\S+); continue with --resume", outcomes[0].output
    )
    assert said[1].endswith(f"step-{int(said[0]):07}") and Path(said[1]).is_dir()
    succeed(2, "train.py", *options, str(int(said[0]) + 1), "--resume")


def test_validation_every_so_many_steps(tmp_path: Path, text: Path) -> None:
    succeed(1, "train.py", *TINY, "--data", text, "--out", tmp_path, "--steps", "5", "--validate-every", "2")
    assert [r["step"] for r in metrics(tmp_path) if "validation_loss" in r] == [0, 2, 4, 5]


FAKE_WANDB = """
import json, pathlib
class Run:
    def __init__(self, **options): self.lines = [options["project"], options["config"]["steps"]]
    def log(self, values, step): self.lines.append([step, sorted(values)])
    def finish(self): pathlib.Path("wandb.json").write_text(json.dumps(self.lines))
init = Run
"""


def test_weights_and_biases_is_used_where_it_is_asked_for(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("wandb"):
        pytest.skip("would log in")
    options = [*TINY, "--data", text, "--out", tmp_path / "out", "--steps", "2", "--wandb", "tiny"]
    assert "pip install wandb" in fail(2, "train.py", *options)
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    command = [sys.executable, EXAMPLE / "train.py", *map(str, options)]
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    run_process(command, directory=tmp_path, environment={**ENVIRONMENT, "PYTHONPATH": path}, timeout=120)
    project, steps, *logged = json.loads((tmp_path / "wandb.json").read_text())
    assert (project, steps) == ("tiny", 2)
    assert [step for step, names in logged if "loss" in names] == [1, 2]
