"""Processes that are forked from a template with torch imported: a script runs in them as if it was started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bmtrain._tools.template import Forked, Template

_SCRIPT = """
import atexit, os, sys, threading, time
known = "torch" in sys.modules, "bmtrain" in sys.modules
import beside
atexit.register(lambda: print("exits", flush=True))
print(__name__, sys.argv[1:], os.environ["OF_THE_JOB"], *known, flush=True)
sys.exit(7) if sys.argv[1] == "exit" else time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "beside.py").touch()
    (tmp_path / "train.py").write_text(_SCRIPT)
    return str(tmp_path / "train.py")


def started(script: str, way: str) -> Iterator[Template]:
    environment = {**os.environ, "OF_THE_JOB": "3"}
    with Path(script).with_name("output").open("wb") as output:
        template = Template([script, way, "-x"], environment, stdout=output)
        yield template
        template.close()


def test_each_process_runs_the_script_and_is_a_child(script: str) -> None:
    for template in started(script, "exit"):
        processes = [template.start(), template.start()]
        assert [process.wait() for process in processes] == [7, 7]
        assert all(isinstance(process, Forked) for process in processes)
        template._process.kill()
        template._process.wait()
        assert template.start().wait(60) == 7  # as a new one
    lines = Path(script).with_name("output").read_text().splitlines()
    assert lines.count("__main__ ['exit', '-x'] 3 True True") == 2
    assert lines.count("__main__ ['exit', '-x'] 3 False False") == 1
    assert lines.count("exits") == 3


def test_signals_reach_it(script: str) -> None:
    for template in started(script, "wait"):
        process = template.start()
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.terminate()  # nothing, as it has ended
