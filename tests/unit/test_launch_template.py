"""Processes that are forked from a template with torch imported: a script runs in them as if it was started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bmtrain._tools.started import run_forked
from bmtrain._tools.template import Forked, Process, Template

_SCRIPT = """
import atexit, os, sys, threading, time
known = "torch" in sys.modules, "bmtrain" in sys.modules
import beside
atexit.register(lambda: print("exits", flush=True))
print(__name__, sys.argv[1:], os.environ["OF_THE_JOB"], os.environ["RANK"], *known, flush=True)
way = sys.argv[1:][int(os.environ["RANK"]) % (len(sys.argv) - 1)]
if way == "wait":
    time.sleep(600)
os.abort() if way == "abort" else sys.exit(7 if way == "exit" else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "beside.py").touch()
    (tmp_path / "train.py").write_text(_SCRIPT)
    return str(tmp_path / "train.py")


@pytest.fixture
def template(tmp_path: Path) -> Iterator[Template]:
    with (tmp_path / "output").open("wb") as output:
        template = Template({**os.environ, "OF_THE_JOB": "3"}, stdout=output, start_new_session=True)
        yield template
        template.close()


@pytest.fixture
def start(script: str, template: Template) -> Callable[[str, str], Process]:
    return lambda way, rank: template.start([script, way], {"RANK": rank})


def test_each_process_runs_the_script_and_is_a_child(
    start: Callable[[str, str], Process], template: Template, tmp_path: Path
) -> None:
    processes = [start("exit", "0"), start("exit", "1")]
    assert [process.wait() for process in processes] == [7, 7]
    assert all(isinstance(process, Forked) for process in processes)
    stopped = start("wait", "2")
    assert stopped.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        stopped.wait(0.01)
    stopped.kill()
    assert stopped.wait() == -signal.SIGKILL
    stopped.terminate()  # nothing, as it has ended
    left = start("wait", "2")
    template._line.close()  # as at the end of the launcher
    template._process.wait(60)
    assert left.wait(60) == -signal.SIGTERM
    assert start("exit", "3").wait(60) == 7  # as a new one
    lines = (tmp_path / "output").read_text().splitlines()
    expected = [f"__main__ ['exit'] 3 {rank} {known} {known}" for rank, known in enumerate((True, True))]
    assert set(lines) >= {*expected, "__main__ ['exit'] 3 3 False False"}
    assert lines.count("exits") == 3


def test_collections_do_not_look_at_what_is_imported(template: Template, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    look = "print(any(one is imported for one in gc.get_objects()))"
    script.write_text(f'import gc, sys\nimported = sys.modules["bmtrain.optim"]\n{look}\n')
    assert template.start([str(script)], {}).wait(60) == 0
    assert (tmp_path / "output").read_text() == "False\n"


@pytest.mark.parametrize(("way", "status"), [("abort", 134), ("end", 0)])
def test_the_first_rank_that_fails_ends_the_others(
    way: str, status: int, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_forked(2, [script, "end" if way == "end" else "wait", way], {**os.environ, "OF_THE_JOB": "3"})
        == status
    )


def test_jobs_that_share_a_template_are_forked_from_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import os\nopen({str(tmp_path)!r} + '/' + os.environ['JOB'] + os.environ['RANK'], 'w')"
        ".write(str(os.getsid(0)))"
    )
    with contextlib.closing(Template(os.environ, start_new_session=True)) as template:
        for job in "ab":
            assert run_forked(2, [str(script)], {"JOB": job}, template) == 0
    sessions = {(tmp_path / f"{job}{rank}").read_text() for job in "ab" for rank in range(2)}
    assert sessions == {str(template._process.pid)}
