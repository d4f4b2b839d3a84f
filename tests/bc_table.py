"""Which test shows which behavioural contract: writes the table of docs/reference/contracts.md.

    python tests/bc_table.py            # rewrite the column of tests
    python tests/bc_table.py --check    # only tell whether it is up to date

The page holds the contracts themselves. A test shows BC-12 if its name has `bc_12` (or `bc12`), or if `BC-12` stands in
it, or in a function of the same file that it refers to: what ranks run is often a function of its own.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["contracts_without_a_test", "tests_by_contract", "updated_page"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "contracts.md"

_MARK = re.compile(r"(?<![A-Za-z])BC[-_]?(\d+)(?!\d)", re.IGNORECASE)
_MARK_IN_NAME = re.compile(r"_bc_?(\d+)(?=_|$)")
_ROW = re.compile(r"^\| BC-(\d+) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def tests_by_contract() -> dict[int, list[str]]:
    """Number of a contract -> its tests, as `path::name`, in the order of files and lines."""
    found: dict[int, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if file.name == "test_contracts.py":
            continue  # the tests of this table have made-up marks
        for name, numbers in _marks(file.read_text()):
            for number in sorted(numbers):
                found.setdefault(number, []).append(f"{file.relative_to(ROOT / 'tests').as_posix()}::{name}")
    return found


def _marks(source: str) -> Iterator[tuple[str, set[int]]]:
    """The tests of a file, and the numbers of contracts that they show."""
    lines = source.splitlines()
    functions = dict(_named(ast.parse(source)))
    for name in functions:
        if name.startswith("test_") and isinstance(functions[name], ast.FunctionDef):
            own = {int(number) for number in _MARK_IN_NAME.findall(name)}
            for used in _reachable(name, functions):
                node = functions[used]
                text = "\n".join([*lines[node.lineno : node.end_lineno], _signature(lines, node)])
                own |= {int(number) for number in _MARK.findall(text)}
            yield name, own


def _named(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """What stands at the top of a file under a name: functions, classes, and tables of what to run."""
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node


def _signature(lines: list[str], node: ast.stmt) -> str:
    return lines[node.lineno - 1].partition("#")[2]  # only the comment: names of functions are no marks here


def _reachable(name: str, functions: dict[str, ast.stmt]) -> list[str]:
    """A function and what it refers to at the top of its file."""
    reached = [name]
    for current in reached:
        names = [node.id for node in ast.walk(functions[current]) if isinstance(node, ast.Name)]
        reached += [n for n in dict.fromkeys(names) if n in functions and n not in reached]
    return reached


def updated_page(page: str) -> str:
    """The page with its column of tests rewritten."""
    tests = tests_by_contract()

    def row(match: re.Match[str]) -> str:
        shown = "<br>".join(f"`{test}`" for test in tests.get(int(match[1]), []))
        return f"| BC-{match[1]} | {match[2]} | {shown or 'none'} |"

    return _ROW.sub(row, page)


def contracts_without_a_test(page: str) -> list[int]:
    """Numbers of the contracts on the page that no test shows."""
    tests = tests_by_contract()
    return [int(match[1]) for match in _ROW.finditer(page) if int(match[1]) not in tests]


def main() -> int:
    old = PAGE.read_text()
    new = updated_page(old)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new)
        return 0
    if old != new:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run python tests/bc_table.py")
    return int(old != new)


if __name__ == "__main__":
    raise SystemExit(main())
