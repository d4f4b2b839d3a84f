"""Every argument of the public functions with every wrong kind: a typed error that names the argument, and no crash.

The tables are in `tests/wrong_calls`: a valid call of each function; every argument in turn is replaced by what its
kind does not admit. The same under ``python -O``, where assertions are gone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from harness import run_process, run_ranks
from wrong_calls import LEFT_OUT, TABLES, WRONG

import bmtrain
import bmtrain.convert
import bmtrain.plan
from bmtrain import debug, inspect, loss, lr_scheduler, memory, nccl, nn, optim, timeline, utils, weights
from bmtrain.distributed import checkpoint

# torch's dispatcher, not the core, refuses what is no tensor; it raises RuntimeError and names the argument.
DISPATCHED = ("operators", "updates")
MODULES = (
    *(bmtrain, bmtrain.distributed, checkpoint, debug, inspect, loss, lr_scheduler, memory, nccl, nn, optim),
    *(bmtrain.convert, nn.functional, nn.sequence, bmtrain.plan, bmtrain.store),
    *(bmtrain.survive, timeline, utils, weights),
)


def num_pairs(name: str) -> int:
    """Function, argument, wrong kind: all that there are in a table."""
    return sum(len(WRONG[kind]) for _, arguments in TABLES[name]().values() for kind, _ in arguments.values())


def all_pairs() -> int:
    return sum(map(num_pairs, TABLES))


def check_all(name: str) -> list[str]:
    """What did not raise as it should, of all pairs of a table."""
    refused = (TypeError, ValueError, IndexError, *((RuntimeError,) if name in DISPATCHED else ()))
    bad = []
    for function, (call, arguments) in TABLES[name]().items():
        values = {argument: value for argument, (_, value) in arguments.items()}
        for argument, (kind, right) in arguments.items():
            for wrong, make in WRONG[kind].items():
                where = f"{function}({argument}={wrong})"
                try:
                    call(*{**values, argument: make(right)}.values())
                except refused as error:
                    if argument not in str(error):
                        bad.append(f"{where}: the message does not name it: {type(error).__name__}: {error}")
                except Exception as error:
                    bad.append(f"{where}: {type(error).__name__}: {error}")
                else:
                    bad.append(f"{where}: nothing raised")
    for function, (call, arguments) in TABLES[name]().items():  # and all is well afterwards
        try:
            call(*(value for _, value in arguments.values()))
        except Exception as error:
            bad.append(f"{function}: {type(error).__name__}: {error}")
    return bad


def test_the_page_of_results_has_these_numbers() -> None:
    [pairs] = run_ranks(1, all_pairs)
    left_out = len(LEFT_OUT), len(public_names())
    pages = [Path(__file__).parents[2] / folder / "results/reliability.md" for folder in ("docs", "docs/zh")]
    english, chinese = (page.read_text(encoding="utf-8") for page in pages)
    assert f"{pairs:,} pairs" in english and "{} of {} ".format(*left_out) in english
    assert f"{pairs:,} 对" in chinese and "{1} 个中的 {0} 个".format(*left_out) in chinese


@pytest.mark.parametrize("name", TABLES)
def test_wrong_arguments_are_named(name: str) -> None:
    [bad] = run_ranks(1, check_all, name)
    assert bad == [], "\n".join(bad)


def public_names() -> set[str]:
    """Functions and classes of all public modules; the aliases that `bmtrain.torch` programs know count once."""
    found = set()
    for module in MODULES:
        for name in module.__all__:
            if callable(getattr(module, name)):
                found.add(name)
    return found


def test_every_public_name_is_in_a_table_or_left_out_for_a_reason() -> None:
    [names] = run_ranks(1, names_in_tables)
    covered = {word for name in names for word in re.findall(r"\w+", name)}
    assert public_names() - covered == set(LEFT_OUT)


def names_in_tables() -> list[str]:
    return [name for table in TABLES.values() for name in table()]


@pytest.mark.slow
def test_without_assertions() -> None:
    folder = Path(__file__).parent
    program = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}, {str(folder.parents[1])!r}]\n"
        "import bmtrain, test_wrong_arguments as t\n"
        "bmtrain.init_distributed()\n"
        "print(sum(map(t.num_pairs, t.TABLES)), [bad for name in t.TABLES for bad in t.check_all(name)])\n"
    )
    done = run_process([sys.executable, "-O", "-c", program], timeout=120)
    assert done.stdout.splitlines()[-1].endswith(" []")
