"""Mutated tables of contents are read or refused by name; ``python tests/fuzz_parsers.py`` is the long form."""

from __future__ import annotations

import pytest
from fuzz_parsers import TARGETS, fuzz, limit_memory
from harness import run_ranks

EXECUTIONS = {"archive": 300, "torch-archive": 500}  # of the slow ones; the others 5,000


def few(target: str) -> dict[str, int]:
    limit_memory()
    return dict(fuzz(target, EXECUTIONS.get(target, 5000), seed=2))


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_a_refusal_by_name(target: str) -> None:
    (outcomes,) = run_ranks(1, few, target, init=False, fresh=True)
    assert outcomes["refused"] > outcomes["read"] > 0
