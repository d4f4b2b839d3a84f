"""`bmtrain parity`: layouts of a script against one process."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bmtrain.__main__ import main
from bmtrain._tools.parity import Layout, compare

SCRIPT = Path(__file__).parents[1] / "scripts" / "parity_train.py"
PARALLEL = SCRIPT.with_name("parity_parallel.py")


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command, whose layouts are programs of their own; returns its status and what it and they print."""

    def run(*arguments: str) -> tuple[int, str]:
        status = main(["parity", "--steps", "2", *arguments])
        return status, "".join(capfd.readouterr())

    return run


@pytest.mark.slow
def test_layouts_are_as_one_process(command: Command) -> None:
    status, said = command("--layouts", "2", "2:sp_size=2", "--", str(SCRIPT))
    assert (status, said.count("tensors as in one process")) == (0, 2), said


@pytest.mark.slow
def test_tensor_parallel_layers_and_stages_are_as_one_process(command: Command) -> None:
    layout = "4:pipe_size=2,tp_size=2,num_micro_batches=4"
    status, said = command("--steps", "1", "--layouts", layout, "--", str(PARALLEL))
    assert (status, said.count("tensors as in one process")) == (0, 1), said


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "script"), [("2:sp_size=2", SCRIPT), ("2:tp_size=2", PARALLEL)])
def test_the_first_tensor_that_differs_is_named(layout: str, script: Path, command: Command) -> None:
    status, said = command("--layouts", layout, "--", str(script), "--wrong")
    assert status == 1 and "step 0: loss differs by" in said, said


@pytest.mark.slow
def test_a_script_that_fails_ends_in_two_lines(tmp_path: Path, command: Command) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(2)")
    status, said = command("--", str(tmp_path / "fails.py"))
    assert status == 1 and "Traceback" not in said
    assert said.splitlines()[-2:] == [
        "bmtrain launch: rank 0 of 1 ended with status 2",
        "bmtrain parity: the script failed in layout 1",
    ]


@pytest.mark.slow
def test_a_script_without_steps_is_refused(tmp_path: Path, command: Command) -> None:
    (tmp_path / "empty.py").write_text("")
    status, said = command("--", str(tmp_path / "empty.py"))
    assert status == 1 and said.endswith("expected a script with steps of an OptimManager, found none\n")


def test_a_command_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    script, folder, note = tmp_path / "script.py", tmp_path / "folder", tmp_path / "note"
    script.write_text(
        f"import os, time\nopen({str(note)!r}, 'w').write(f'{{os.getpid()}}.')\ntime.sleep(600)"
    )
    folder.mkdir()
    command = [sys.executable, "-m", "bmtrain", "parity", "--layouts", "2", "--", script]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not (note.exists() and note.read_text().endswith(".")):
            assert process.poll() is None
            time.sleep(0.1)
        assert list(folder.iterdir())
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate()
    assert (process.returncode, errors.splitlines()[-1]) == (143, "bmtrain: stopped by SIGTERM")
    assert not list(folder.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()[:-1]), 0)


def test_comparison() -> None:
    one, bias = torch.tensor([1.0, -2.0]), torch.tensor([1e-9])
    wanted = [("step 0: gradient of a", one), ("step 0: gradient of b", bias)]
    assert compare(wanted, [(name, value.clone()) for name, value in wanted], 1e-6) == ""
    assert compare(wanted, [wanted[0], (wanted[1][0], -bias)], 1e-6) == ""  # zero, except for rounding
    found = compare(wanted, [(wanted[0][0], one * 1.01), wanted[1]], 1e-6)
    assert found == "step 0: gradient of a differs by 0.01 of its largest value"
    nothing = compare(wanted, [(wanted[0][0], one * torch.nan), wanted[1]], 1e-6)
    assert nothing.startswith("step 0: gradient of a differs by nan")
    assert compare(wanted, wanted[:1], 1e-6) == "other tensors: expected 2, got 1"


def test_layouts_are_read() -> None:
    assert Layout.parse("4:sp_size=2") == Layout("4:sp_size=2", 4, {"sp_size": 2})
    for wrong in ("0", "x", "2:sp_size", "2:heads=2", "2:sp_size=0"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected RANKS"):
            Layout.parse(wrong)
