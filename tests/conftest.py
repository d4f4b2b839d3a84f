"""What every test has: the harness on the path, markers, a schedule for several workers, and no rank left behind."""

from __future__ import annotations

import gc
import getpass
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # several ranks share few cores; set before torch is imported
os.environ["BMTRAIN_QUICK_START"] = "1"  # of all programs that tests start
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in (
        "COLUMNS",
        "LINES",
    ):  # set by readline, which pytest imports; programs here write to no terminal
        os.environ.pop(_name, None)

pytest.register_assert_rewrite("harness")  # its assertions show what they compared, as those of tests do

_BUILDS = "builds in the tree"
#: Files that one worker runs, one after the other, by what they share.
_TOGETHER = {
    f"tests/{name}.py": shared
    for shared, names in {
        _BUILDS: "unit/test_newcomer unit/test_packaging unit/test_wheel",
        "a server that has transformers": "examples/test_huggingface integrations/test_transformers"
        " models/test_divided_architectures multiproc/test_experts_transformers multiproc/test_sequences"
        " multiproc/test_weights multiproc/test_wrapper_transformers",
        "emulated kernels": "cuda/test_emulated_cross_entropy cuda/test_emulated_reduce cuda/test_emulated_step",
        "fake device": "cuda/test_gradients_ahead cuda/test_nccl cuda/test_nccl_library cuda/test_offload_benchmark"
        " cuda/test_offload_streams cuda/test_orderly_end cuda/test_streams",
    }.items()
    for name in names.split()
}
_PROBLEMS = pytest.StashKey[list[str]]()
_TEMPORARY = pytest.StashKey[str]()
_COLLECTED = [""]  # the file whose tests are being collected


def pytest_configure(config: pytest.Config) -> None:
    """Collects problems of all workers, and what programs leave among temporary files.

    `tmp_path` and what torch compiles stay where they are kept. The name is short, as names of sockets in it must be.
    """
    config.stash[_PROBLEMS] = []
    if "PYTEST_XDIST_WORKER" not in os.environ:
        kept = tempfile.gettempdir()
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", kept)
        os.environ.setdefault(
            "TORCHINDUCTOR_CACHE_DIR", os.path.join(kept, f"torchinductor_{getpass.getuser()}")
        )
        tempfile.tempdir = os.environ["TMPDIR"] = config.stash[_TEMPORARY] = tempfile.mkdtemp(prefix="t")


def pytest_unconfigure(config: pytest.Config) -> None:
    """All processes of the tests have ended."""
    shutil.rmtree(config.stash.get(_TEMPORARY, ""), ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Objects of torch and of the tests are never garbage: no collection looks at them."""
    gc.disable()
    done = threading.Event()
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        capture = session.config.pluginmanager.getplugin("capturemanager")
        output = getattr(
            getattr(capture, "_global_capturing", None), "err", None
        )  # what pytest has put aside
        told = os.dup(getattr(output, "targetfd_save", 2))
        threading.Thread(target=_tell_of_collecting, args=[done, told], daemon=True).start()
    try:
        return (yield)
    finally:
        done.set()
        gc.freeze()
        gc.enable()


def _tell_of_collecting(done: threading.Event, output: int) -> None:
    """The first worker says every 5 s how far it is: a busy machine may take longer than that for one file."""
    with open(output, "w") as file:
        while not done.wait(5):
            print(f"\rcollecting: {_COLLECTED[0]}", file=file, flush=True)


def pytest_collectstart(collector: pytest.Collector) -> None:
    _COLLECTED[0] = collector.nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``: a file stays with one worker, whose tests share ranks and fixtures."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return _TOGETHER.get(file, file)

    return ByFile(config, log)


@pytest.fixture(scope="module", autouse=True)
def uninitialised() -> Iterator[None]:
    """A file leaves the process as it found it: the files after it would fail for no reason of their own."""
    yield
    context = sys.modules.get("bmtrain._ranks.context")
    assert context is None or context.current() is None, "this file has left bmtrain initialised"


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for disk tiers: one for a file, as ranks are kept for tests with the same ``tier_directories``."""
    return tmp_path_factory.mktemp("drive")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest part comes first: at the end of a run, the other workers would wait for it."""
    items.sort(key=lambda item: _TOGETHER.get(item.nodeid.partition("::")[0]) != _BUILDS)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A rank that crashes or hangs at its exit fails the run, although no test was running then."""
    from harness import close_groups

    problems = session.config.stash[_PROBLEMS]
    problems += close_groups()
    if hasattr(session.config, "workeroutput"):  # of xdist: this is a worker
        session.config.workeroutput["problems"] = problems
    elif problems:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker has ended: take its problems. One that crashed has none to tell; its test has failed."""
    node.config.stash[_PROBLEMS] += getattr(node, "workeroutput", {}).get("problems", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what close_groups found."""
    for problem in terminalreporter.config.stash[_PROBLEMS]:
        terminalreporter.section("ranks did not end well", red=True)
        terminalreporter.write_line(problem)
