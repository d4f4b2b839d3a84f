"""What every test has: the harness on the path, markers, and no rank left behind."""

from __future__ import annotations

import os

import pytest

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # several ranks share few cores; set before torch is imported


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A rank that crashes or hangs at its exit fails the run, although no test was running then."""
    from harness import close_groups

    problems = close_groups()
    if problems:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[_PROBLEMS] = problems


_PROBLEMS = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what close_groups found."""
    for problem in terminalreporter.config.stash.get(_PROBLEMS, []):
        terminalreporter.section("ranks did not end well", red=True)
        terminalreporter.write_line(problem)
