"""What the commands print, looked at in a terminal of 80 and of 120 columns, and what they say about a wrong line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness.terminal import in_terminal, screen_lines

from bmtrain.__main__ import main
from bmtrain._tools.command_line import BENCHMARKS
from bmtrain._tools.command_line import COMMANDS as TOOLS
from bmtrain._tools.terminal import fold
from bmtrain.timeline import Span, write_trace

WIDTHS = (80, 120)
Screens = dict[tuple[str, int], tuple[list[str], str]]  # by command and width: the lines, and the status

COMMANDS: dict[str, list[str]] = {
    **{
        f"{name} --help".strip(): [*name.split(), "--help"]
        for name in ("", *TOOLS, "bench", *(f"bench {kind}" for kind in BENCHMARKS))
    },
    "doctor": ["doctor"],
    "doctor --api": ["doctor", "--api"],
    "plan": ["plan", "--layers", "4", "--dim", "256"],
    "plan that does not fit": ["plan", "--layers", "40", "--dim", "5120", "--heads", "40", "--devices", "1"],
    "plan --published": ["plan", "--published"],
    "timeline": ["timeline", "TRACE", "--no-png"],
    "convert": ["convert", "a.pt", "b.safetensors", "--overwrite"],
}

_ALL = """
import fcntl, json, os, struct, sys, termios
from bmtrain.__main__ import main
for width in (80, 120):
    if os.fork():
        os.wait()
        continue
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    for name, arguments in json.loads(sys.argv[1]).items():
        print(f"@@@ {width} {name}", flush=True)
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
        except Exception as error:
            status = repr(error).replace(" ", "_")
        print(f"@@@ status {status}", flush=True)
    break
"""


@pytest.fixture(scope="module")
def screens(tmp_path_factory: pytest.TempPathFactory) -> Screens:
    """What each command printed, all of them in a process for each width."""
    folder = tmp_path_factory.mktemp("terminal")
    torch.save({"weight": torch.ones(1000, 1000)}, folder / "a.pt")
    for rank in range(2):
        steps = [Span("step", "step", i, i + 0.9, "") for i in range(3)]
        blocks = [Span("compute", f"layers.{i}", i + 0.1, i + 0.5, "forward") for i in range(3)]
        write_trace(folder / "TRACE", [*steps, *blocks], rank, 0.0)
    told = in_terminal(80, [sys.executable, "-c", _ALL, json.dumps(COMMANDS)], folder)
    parts = re.findall(r"@@@ (\d+) (.*?)\r\n(.*?)@@@ status (\S+)\r\n", told, re.DOTALL)
    return {(name, int(width)): (screen_lines(text), status) for width, name, text, status in parts}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_wider_than_the_terminal(name: str, width: int, screens: Screens) -> None:
    lines, status = screens[name, width]
    assert status in ("0", "1") and len(lines) > 1
    too_wide = [line for line in lines if len(line) > width and " " in line.strip()]  # a path may be
    assert not too_wide, "\n".join(too_wide)
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "invalid choice: 'nothing'"),
        (["plann"], "did you mean plan?"),
        (["bench", "stp"], "did you mean step? (see bmtrain bench --help)"),
        (["plan", "--layrs", "4"], "--layrs 4; did you mean --layers? (see bmtrain plan --help)"),
        (["bench", "step", "--repeet", "2"], "did you mean --repeat? (see bmtrain bench step --help)"),
        (["launch", "/nowhere.py"], "/nowhere.py"),
        (["launch", "--nproc", "0", "a.py"], "--nproc: expected a number from 1, got 0"),
        (["plan", "--nothing"], "unrecognized arguments: --nothing"),
        (["plan", "--layers", "x"], "--layers: invalid int value"),
        (["plan", "--layers", "-1"], "--layers: expected a number from 1, got -1"),
        (["plan", "--seq", "0"], "--seq: expected a number from 1, got 0"),
        (["plan", "--here", "--devices", "0"], "--devices: expected a number from 1, got 0"),
        (["plan", "--machine", "abacus"], "expected one of v100-32gb"),
        (["plan", "--config", "/nowhere.json"], "/nowhere.json"),
        (
            ["plan", "--json", "/nowhere/plan.json"],
            "a file in a folder that exists, got '/nowhere/plan.json'",
        ),
        (["bench", "adam", "--json", "/"], "--json: expected a file, '/' is a folder"),
        (["bench", "comm", "--plot", "/nowhere/a.svg"], "--plot: expected a file in a folder that exists"),
        (["soak", "--json", "/nowhere/a.json"], "--json: expected a file in a folder that exists"),
        (["plan", "--scale", "/nowhere", "--machine", "abacus"], "expected one of v100-32gb"),
        (["plan", "--module", "train.py"], "expected FILE:FUNCTION of a file that exists, got 'train.py'"),
        (["plan", "--module", f"{__file__}:test_folding"], "to return (model, input, ...), got NoneType"),
        (["plan", "--set", "flops"], "--set flops: expected FIELD=NUMBER"),
        (["launch", "--restarts", "2", __file__], "--restarts: expected --survive 1 as well"),
        (["launch"], "required: script (see bmtrain launch --help)"),
        (["timeline", "/nowhere"], "/nowhere: expected files"),
        (["timeline"], "required: DIR"),
        (["blame", "/nowhere"], "found none"),
        (["convert", "/nowhere.pt", "b.pt"], "/nowhere.pt"),
        (["convert", "a.pt", "b.pt", "--layout", "bert"], "invalid choice: 'bert'"),
        (["convert", "a", "b", "--max-shard-size", "0"], "expected a number of bytes from 1"),
        (["run", "--cpu", "/nowhere.py"], "/nowhere.py"),
        (["doctor", "--timeout", "x"], "invalid float value"),
        (["bench", "gpu"], "expected a usable CUDA device"),
        (["bench", "step", "--variants", "x"], "--variants: expected some of"),
        (["bench", "step", "--ranks", "0"], "--ranks: expected a number from 1, got 0"),
        (["bench", "adam", "--sizes", "4xx"], "--sizes: expected sizes such as 20,100x16, got '4xx'"),
        (["bench", "comm", "--ranks", "2,0"], "--ranks: expected whole numbers from 1 with commas"),
        (["soak", "--kill", "nan"], "--kill: expected a number from 0, got nan"),
        (["bench", "none"], "invalid choice: 'none'"),
    ],
    ids=" ".join,
)
def test_what_is_wrong_is_said_in_a_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[:2] == ["bench", "gpu"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    try:
        status: object = main(arguments)
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr().err.strip() or str(status)
    assert status not in (0, None)
    assert said in told and "\n" not in told


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert all(f"    {name} " in told.err for name in ("doctor", "plan", "bench", "run"))


def test_a_pipe_gets_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No codes of terminals; progress in lines of its own, few of them, and at the end what was done."""
    torch.save({str(i): torch.ones(1000) for i in range(30)}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert all(re.fullmatch(r"convert: +\d+ %, [\d.]+ of [\d.]+ MB", line) for line in lines[:-1])
    assert len(lines) <= 3 and lines[-1] == f"convert: wrote {tmp_path / 'b.safetensors'}: 30 tensors, 0.1 MB"


def test_folding() -> None:
    line = "ok      core           up to date with its sources"
    assert fold(line, 23, None) == fold(line, 23, 80) == line
    assert all(len(part) <= 40 for part in fold(line, 23, 40).splitlines())
    assert fold("a /a/very/long/path/of/forty-and-more/characters", 20, 40).split() == [
        "a", "/a/very/long/path/of/forty-and-more/characters",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "output"),
    [("doctor --api | head -1", "documented name"), ("plan --layers 2 --dim 64 --heads 1 | true", "")],
)
def test_a_reader_that_has_seen_enough_is_no_error(command: str, output: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m bmtrain {command}"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},  # print() writes, and not the end of the process alone
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(output)
    assert done.stderr == ""
