"""The harness itself: results, and every way in which a rank can fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from harness import Program, RankError, Status, at_once, rank_outcomes, run_process, run_ranks


def describe(factor: int, *, offset: int = 0) -> tuple[int, int, int, str]:
    print("hello")
    rank = int(os.environ["RANK"])
    return rank, rank * factor + offset, os.getpid(), os.environ["WORLD_SIZE"]


def draw() -> float:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    return torch.rand(()).item()


def left_behind() -> tuple[str | None, torch.dtype]:
    return os.environ.get("LEFT_BEHIND"), torch.get_default_dtype()


def misbehave(how: str) -> int:
    rank = int(os.environ["RANK"])
    if rank == 1:
        if how == "raise":
            raise KeyError(f"no such thing on rank {rank}")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "assert":
            assert rank + 1 == 5
        sleep_soundly()
    return rank


def sleep_soundly() -> None:
    time.sleep(1000)


def spawn_child() -> int:
    return subprocess.Popen(["sleep", "1000"]).pid


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_results_in_rank_order_and_ranks_kept(capsys: pytest.CaptureFixture[str]) -> None:
    first = run_ranks(2, describe, 10, offset=3, init=False)
    assert [result[:2] for result in first] == [(0, 3), (1, 13)]
    assert [result[3] for result in first] == ["2", "2"]
    assert "[rank 1] hello" in capsys.readouterr().out
    assert run_ranks(2, describe, 10, offset=3, init=False) == first
    assert run_ranks(2, describe, 10, offset=3, init=False, fresh=True) != first


def test_every_call_starts_alike() -> None:
    assert run_ranks(2, draw, init=False) == run_ranks(2, draw, init=False)
    run_ranks(1, draw, init=False)
    assert run_ranks(1, left_behind, init=False) == [(None, torch.float32)]


def test_tensors_travel() -> None:
    [result] = run_ranks(1, torch.nn.functional.relu, torch.tensor([2.0, -1.0]), init=False)
    assert torch.equal(result, torch.tensor([2.0, 0.0]))


def test_raising_rank() -> None:
    with pytest.raises(RankError, match="rank 1 raised KeyError: 'no such thing on rank 1'") as caught:
        run_ranks(2, misbehave, "raise", init=False)
    assert "in misbehave" in str(caught.value)
    assert caught.value.first.mro[:2] == ("KeyError", "LookupError")
    returned = caught.value.outcomes[0]
    assert (returned.status, returned.value) == (Status.RETURNED, 0)


def test_assertions_are_explained() -> None:
    with pytest.raises(RankError, match=r"assert \(1 \+ 1\) == 5"):
        run_ranks(2, misbehave, "assert", init=False)


@pytest.mark.parametrize(("how", "exitcode"), [("exit", 7), ("kill", -9)])
def test_dying_rank(how: str, exitcode: int) -> None:
    outcomes = rank_outcomes(2, misbehave, how, init=False)
    assert [outcome.status for outcome in outcomes] == [Status.RETURNED, Status.DIED]
    assert outcomes[1].exitcode == exitcode


def test_hung_rank_shows_stacks_and_the_next_call_works() -> None:
    before = [result[2] for result in run_ranks(2, describe, 1, init=False)]
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 1 was still running") as caught:
        run_ranks(2, misbehave, "hang", init=False, timeout=5)
    assert time.monotonic() - started < 30
    assert "in sleep_soundly" in str(caught.value)
    assert not any(alive(pid) for pid in before)
    after = [result[2] for result in run_ranks(2, describe, 1, init=False)]
    assert set(after).isdisjoint(before)


def test_children_of_ranks_end_with_their_group() -> None:
    [child] = run_ranks(1, spawn_child, init=False, fresh=True)
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def test_nested_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="top level of a module"):
        run_ranks(1, lambda: 1, init=False)


def test_nothing_outlives_a_killed_run(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            import harness, test_harness
            for result in harness.run_ranks(2, test_harness.describe, 1, init=False):
                print(result[2], flush=True)
            harness.run_ranks(2, test_harness.misbehave, "hang", init=False, timeout=500, grace=500)
            """
        )
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    (temporary := tmp_path / "temporary").mkdir()
    of_torch = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # which stays
    environment = {
        **os.environ, **of_torch, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(temporary)
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        pids: list[int] = []
        while len(pids) < 2:
            line = run.stdout.readline()
            assert line, "the run ended early"
            if line.strip().isdigit():
                pids.append(int(line))
        run.kill()
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids)) and not list(temporary.iterdir())


def test_process_limit_shows_stacks() -> None:
    program = "import time\ndef sleep_soundly(): time.sleep(1000)\nprint('up', flush=True)\nsleep_soundly()"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_process([sys.executable, "-c", program], timeout=4)
    assert "up" in caught.value.output
    assert "in sleep_soundly" in str(caught.value)
    with pytest.raises(subprocess.CalledProcessError, match="what went wrong"):
        run_process([sys.executable, "-c", "raise SystemExit('what went wrong')"])
    assert run_process([sys.executable, "-c", "print(1)"]).stdout == "1\n"


def meet(folder: str, own: str, other: str) -> str:
    Path(folder, own).touch()
    while not Path(folder, other).exists():
        time.sleep(0.01)
    return own


def test_jobs_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for the other; and results are in the order of the calls."""
    run = partial(rank_outcomes, 2, meet, str(tmp_path), fresh=True, timeout=60)
    found = at_once([partial(run, "a", "b"), partial(run, "b", "a")])
    assert [[outcome.value for outcome in outcomes] for outcomes in found] == [["a", "a"], ["b", "b"]]


SAYS_AT_ITS_END = """
class Late:
    def __del__(self):
        print("cleared")
late = Late()
import atexit, os, tempfile
atexit.register(print, "handler")
folder = tempfile.TemporaryDirectory()
atexit.register(lambda: print(os.path.exists(folder.name)))
print("end", end=" ")
"""


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        (SAYS_AT_ITS_END, 0, "end True\nhandler\ncleared\n"),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('no data')", 1, "no data\n"),
        ("1 / 0", 1, 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n'),
        ("import os\nos.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_a_program_ends_as_one_that_python_has_started(code: str, status: int, says: str) -> None:
    """Although its end is short: what it has printed, its handlers, its objects and its status."""
    with tempfile.TemporaryFile("w+") as output, open(os.devnull) as nothing:
        program = Program(code, os.environ, (nothing.fileno(), output.fileno(), output.fileno()))
        assert program.wait() == status
        output.seek(0)
        assert output.read().startswith(says)
        started = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert started.returncode == status
        assert (started.stdout + started.stderr).startswith(says)


_AT_THE_END = """
import atexit, ctypes
atexit.register(print, "Python")
at_exit = ctypes.CDLL(None)["__cxa_atexit"]
at_exit(ctypes.CDLL(None).puts, ctypes.create_string_buffer(b"the C library"), None)
"""


def test_a_program_leaves_the_libraries_as_they_are(tmp_path: Path) -> None:
    with open(os.devnull) as nothing, (tmp_path / "output").open("wb") as output:
        program = Program(_AT_THE_END, os.environ, (nothing.fileno(), output.fileno(), output.fileno()))
        assert program.wait() == 0
    assert (tmp_path / "output").read_text() == "Python\n"
