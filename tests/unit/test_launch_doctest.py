"""The examples in the documentation of launching, context and helpers run as written."""

from __future__ import annotations

import doctest
import importlib

import pytest
from harness import run_ranks

MODULES = ["_ranks.launch", "debug", "global_var", "init", "topology", "utils"]


def run_examples(name: str) -> tuple[int, int, str]:
    from bmtrain._ranks import context

    module = importlib.import_module(f"bmtrain.{name}")
    output: list[str] = []
    failed = attempted = 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        context.uninstall()
        result = doctest.DocTestRunner().run(test, out=output.append)
        failed, attempted = failed + result.failed, attempted + result.attempted
    context.uninstall()
    return failed, attempted, "".join(output)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    [(failed, attempted, output)] = run_ranks(1, run_examples, name, init=False)
    assert attempted
    assert not failed, output
