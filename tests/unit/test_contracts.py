"""Every contract has a test, and the page names tests that exist."""

from __future__ import annotations

import re

import bc_table


def test_every_contract_has_a_test() -> None:
    assert bc_table.contracts_without_a_test(bc_table.PAGE.read_text()) == []


def test_the_page_names_no_test_that_is_gone() -> None:
    """Tests that came since are added by `python tests/bc_table.py`."""
    page = bc_table.PAGE.read_text()
    assert all(f"| BC-{n} |" in page for n in range(1, 78))
    there = {test for tests in bc_table.tests_by_contract().values() for test in tests}
    assert set(re.findall(r"`([\w/]+\.py::\w+)`", page)) <= there


def test_marks_are_found_in_what_a_test_runs() -> None:
    source = '''
def body():  # BC-3
    pass
def other():
    """BC-4, and BC_50."""
CASES = [other]
def test_bc_1_and_bc2_names(): pass
def test_called(): run(body)
@cases(CASES)
def test_listed(case): pass
def test_nothing(): ABC_7 = 1
'''
    found = dict(bc_table._marks(source))
    assert found == {
        "test_bc_1_and_bc2_names": {1, 2},
        "test_called": {3},
        "test_listed": {4, 50},
        "test_nothing": set(),
    }
