"""The commands before torch and the core are there: help costs nothing, and doctor says what is missing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run_process

ROOT = Path(__file__).resolve().parents[2]
ABSENT = 'raise ModuleNotFoundError("No module named \'torch\'", name="torch")'
OTHER = "from types import SimpleNamespace\n__version__ = '9.9.0'\nversion = SimpleNamespace(cuda=None)"


def command(folder: Path, torch: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m bmtrain` with this file in torch's place."""
    (folder / "torch.py").write_text(torch)
    environment = {"PYTHONPATH": f"{folder}:{ROOT}"}
    return run_process(
        [sys.executable, "-m", "bmtrain", *arguments], environment=environment, directory=folder, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "usage: bmtrain [-h] COMMAND"),
        ([], 2, "soak"),
        (["docter"], 2, "did you mean doctor? (see bmtrain --help)"),
        (["bench", "--help"], 0, "usage: bmtrain bench [-h] BENCHMARK"),
    ],
)
def test_help_needs_no_torch(arguments: list[str], status: int, said: str, tmp_path: Path) -> None:
    done = command(tmp_path, ABSENT, *arguments)
    assert done.returncode == status
    assert said in done.stdout


@pytest.mark.parametrize(
    ("torch", "problem", "remedy"),
    [(ABSENT, "", ""), (OTHER, "was built for torch", "but torch 9.9.0 is running")],
    ids=["none", "other"],
)
def test_a_broken_installation_is_reported_in_lines(
    torch: str, problem: str, remedy: str, tmp_path: Path
) -> None:
    told = command(tmp_path, torch, "doctor")
    assert told.returncode == 1
    assert "Traceback" not in told.stdout
    assert "ok      Python" in told.stdout
    assert problem in told.stdout and remedy in told.stdout
    assert "checked once these are solved" in told.stdout
    other = command(tmp_path, torch, "plan")
    assert other.returncode == 1
    assert other.stdout.startswith("bmtrain plan: ") and len(other.stdout.splitlines()) == 1


def test_a_library_import_is_no_command(tmp_path: Path) -> None:
    """Only the command itself is answered early; a program that imports bmtrain gets its exception."""
    (tmp_path / "torch.py").write_text(ABSENT)
    (tmp_path / "program.py").write_text("import bmtrain")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    line = [sys.executable, tmp_path / "program.py", "--help"]
    done = run_process(line, environment=environment, directory=tmp_path, check=False)
    assert "ModuleNotFoundError: No module named 'torch'" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_in_one_line(number: signal.Signals) -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # also where it was ignored
    code += "from bmtrain.__main__ import command; raise SystemExit(command())"
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code, "bench", "adam"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (128 + number, f"bmtrain: stopped by {number.name}\n")
