"""Run a test's function on every rank of a group of processes.

    from harness import run_ranks

    def gathered(shape):                      # a module-level function of the test file
        x = torch.full(shape, float(bmtrain.rank()))
        return bmtrain.gather_result(x).tolist()

    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_gather(world):
        assert run_ranks(world, gathered, (1,)) == [list(map(float, range(world)))] * world

- `run_ranks(world, function, *args, **kwargs)` returns the ranks' results in rank order. The ranks have
  called `bmtrain.init_distributed(**init)` already (`init=False`: they have not). If a rank raises, dies or
  hangs it raises `RankError`, which shows every rank's traceback, output and (of a rank that hung) stacks.
- `rank_outcomes(...)`, same arguments, never raises: it returns one `Outcome` per rank, for tests of faults.
- `at_once(calls)` makes calls of these at the same time, for jobs that mostly wait: their ranks start one job after
  the other, so that no meeting of ranks exceeds its time-out.
- `run_process(command)` runs any other program (a launcher, an example) under the same kind of limit.
- `Program(code, environment, streams)` is a `python -c` that is forked like a rank.

Ranks are forked from a server that has torch and bmtrain imported, are kept for the next call with the same
`world`, `init`, `environment` and `cuda`, and are thrown away after a call in which anything went wrong. Each
call starts with the same random seeds, environment, directory and default dtype. Arguments and results are
pickled; the function is named, not pickled, so it may not be nested or a lambda. Modules that a test file names in
`PRELOAD` are imported once for all ranks that run its functions. Ranks see no GPU unless `cuda=True`. What they
print appears in the test's captured output, each line marked with its rank.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from .group import TIMEOUT, Group, Program, close_servers, free_port, server_for
from .outcome import Outcome, RankError, Status
from .worker import Call

__all__ = [
    "Outcome",
    "Program",
    "RankError",
    "Status",
    "at_once",
    "close_groups",
    "free_port",
    "rank_outcomes",
    "run_process",
    "run_ranks",
]

_GRACE = 3.0  # seconds for the other ranks, once one has failed
CUDA = (
    os.environ.get("BMTRAIN_TEST_CUDA") == "1"
)  # whether ranks see the host's GPUs, for tests that do not say
_MAX_RANKS = 16  # idle groups beyond this many processes are closed, longest unused first
_starting = threading.Lock()  # held by a job that starts, and by the user of `_groups`
_Result = TypeVar("_Result")
_groups: dict[tuple[Any, ...], Group] = {}  # idle groups, the one used last at the end


def run_ranks(world: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Call `function(*args, **kwargs)` on `world` ranks.

    Args:
        world: number of ranks.
        function: a function at the top level of a module.
        options: `timeout` in seconds (120), `init` (keywords of init_distributed, or False), `environment`
            (variables that all ranks have), `cuda` (False), `fresh` (True: ranks that have run nothing else,
            and are not kept; they end without the teardown of torch), `grace` (seconds that the other ranks
            have once one has failed: 3); everything else goes to the function.

    Returns:
        The results, in rank order.

    Raises:
        RankError: unless every rank returned.
    """
    outcomes = _outcomes(world, function, *args, **{"grace": _GRACE, **options})
    if any(outcome.status is not Status.RETURNED for outcome in outcomes):
        raise RankError(function.__qualname__, outcomes)
    for outcome in outcomes:
        for line in outcome.output.splitlines():
            print(f"[rank {outcome.rank}] {line}")
    return [outcome.value for outcome in outcomes]


def rank_outcomes(world: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Outcome]:
    """As run_ranks, but returns whatever happened. Without `grace`, all ranks have until `timeout`."""
    outcomes = _outcomes(world, function, *args, **options)
    for outcome in outcomes:
        print(outcome)  # for the report of a test that fails
    return outcomes


def at_once(calls: Iterable[Callable[[], _Result]], most: int = 16) -> list[_Result]:
    """Results of calls of `rank_outcomes` with `fresh=True`, or of what starts a `Program`, in order."""
    server_for({}, ())  # it would end with the thread that starts it
    with ThreadPoolExecutor(most) as pool:
        return list(pool.map(lambda call: call(), calls))


def _outcomes(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    grace: float | None = None,
    init: Mapping[str, Any] | bool = True,
    environment: Mapping[str, str] | None = None,
    cuda: bool = CUDA,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Outcome]:
    call = _named(function, args, kwargs)
    keywords = None if init is False else {"timeout": 45, **(init if isinstance(init, Mapping) else {})}
    preload = getattr(sys.modules.get(function.__module__), "PRELOAD", ())
    key = (world, repr(keywords), repr(sorted((environment or {}).items())), cuda, preload)
    with _starting:
        group = None if fresh else _groups.pop(key, None)
        if group is None:
            _make_room(world)
            group = Group(world, keywords, dict(environment or {}), cuda, brief=fresh, preload=preload)
            if not group.usable:
                return group.outcomes
    try:
        outcomes = group.call(call, timeout, grace)
    except BaseException:  # Ctrl-C in the middle of a call
        group.kill()
        raise
    if group.usable and not fresh:
        _groups[key] = group
    elif group.usable:
        group.close()
    return outcomes


def _named(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if "<" in function.__qualname__:
        raise ValueError(f"expected a function at the top level of a module, got {function.__qualname__}")
    file = str(Path(inspect.getfile(function)).resolve()) if inspect.isfunction(function) else None
    return Call(function.__module__, file, function.__qualname__, pickle.dumps((args, kwargs)))


def _make_room(world: int) -> None:
    """Close the groups that have been idle longest until `world` more ranks fit."""
    while _groups and sum(group.world for group in _groups.values()) + world > _MAX_RANKS:
        oldest = next(iter(_groups))
        _problems.append(_groups.pop(oldest).close(brief=True))


_problems: list[str] = []  # of ranks that did not end well when their group was closed


def close_groups() -> list[str]:
    """End all ranks and the servers. Returns what went wrong at their exit, one text for each group."""
    brief = False  # for one group: torch is torn down in ranks that have done much
    while _groups:
        _problems.append(_groups.popitem()[1].close(brief))
        brief = True
    close_servers()
    told = [problem for problem in _problems if problem]
    _problems.clear()
    return told


atexit.register(close_groups)


def run_process(
    command: Sequence[str | os.PathLike[str]],
    *,
    timeout: float = TIMEOUT,
    environment: Mapping[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with its output and errors in `stdout`.

    At the limit every process that it started is told to print its stacks (Python's do) and killed.

    Raises:
        subprocess.TimeoutExpired: at the limit; the output so far, stacks included, is in the message.
        subprocess.CalledProcessError: if `check` and the exit status is not 0; likewise.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=directory,
        env={**os.environ, "PYTHONFAULTHANDLER": "1", "OMP_NUM_THREADS": "1", **(environment or {})},
        start_new_session=True,
    )
    expired = False
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        expired = True
        _signal_group(process.pid, signal.SIGABRT)  # on which faulthandler prints all stacks
        try:
            output, _ = process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            _signal_group(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    finally:
        _signal_group(process.pid, signal.SIGKILL)
    if expired:
        raise _LimitReached(command, timeout, output)
    if check and process.returncode != 0:
        raise _Failed(process.returncode, command, output)
    if not check:
        print(f"exit status {process.returncode}, printed\n{output}")  # for the report of a test that fails
    return subprocess.CompletedProcess(command, process.returncode, output)


class _LimitReached(subprocess.TimeoutExpired):
    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.output}"


class _Failed(subprocess.CalledProcessError):
    def __str__(self) -> str:
        return f"{super().__str__()}\n{self.output}"


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
