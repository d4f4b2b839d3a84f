"""Lines of each storey of bmtrain/ and of each folder of csrc/, held by the ceilings of one table.

    python tests/budget.py

Exit status 1 if a ceiling is exceeded. Lines are counted as `wc -l` does, with comments and docstrings.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

#: Storey, from the bottom, or folder -> what belongs to it, and its ceiling. A commit that raises a ceiling gives the
#: reason in its message.
PYTHON = {
    "base": ("_base _ops _version checkpointing debug errors hook_func lr_scheduler topology", 2548),
    "watch": ("_watch", 1972),
    "ranks": ("_ranks global_var nccl synchronize utils", 4211),
    "shards": ("_shards parameter", 2056),
    "engine": ("_engine", 8815),
    "model": ("_model block_layer layer loss nn param_init pipe_layer wrapper zero_context", 5731),
    "files": ("_files dcp distributed store weights", 4687),
    "training": ("accumulate backward data init inspect memory optim timeline virtual", 10_344),
    "survive": ("_survive survive", 2763),
    "tools": ("__init__ __main__ _C _tools benchmark convert cpu_run integrations plan", 14_094),
}
CORE = {
    "bindings": (". bindings ops", 1429),
    "common": ("common", 929),
    "comm": ("comm", 6655),
    "shard": ("shard", 2790),
    "disk": ("disk", 852),
    "optim": ("optim", 2070),
    "cpu": ("cpu", 2233),
    "cuda": ("cuda", 1473),
    "packaging": ("packaging", 86),
    "testing": ("testing", 204),
}
#: Modules in bmtrain/ itself.
ROOT_FILES = 26
#: Goals: what a trainer runs, so without tools, and the core without test machinery.
PYTHON_GOAL, CORE_GOAL = 22_000, 14_000
Table = dict[str, tuple[str, int]]


def count(folder: Path, suffixes: tuple[str, ...]) -> dict[str, int]:
    """Lines by entry of ``folder``: a module or a folder; files of other suffixes than Python's are in ``.``."""
    lines: dict[str, int] = {}
    for path in folder.rglob("*"):
        if path.suffix not in suffixes or not path.is_file():
            continue
        inside = path.relative_to(folder).parts
        name = inside[0] if len(inside) > 1 else path.stem if path.suffix in (".py", ".pyi") else "."
        lines[name] = lines.get(name, 0) + path.read_bytes().count(b"\n")
    return lines


def problems(table: Table, lines: dict[str, int]) -> tuple[dict[str, int], list[str]]:
    """Lines of each row of ``table``, and errors: a ceiling exceeded, an entry in no row."""
    owner = {name: row for row, (names, _) in table.items() for name in names.split()}
    totals = dict.fromkeys(table, 0)
    errors = []
    for name, number in sorted(lines.items()):
        if name in owner:
            totals[owner[name]] += number
        else:
            errors.append(f"{name}: expected a row for it in tests/budget.py, got none")
    for row, (_, ceiling) in table.items():
        if totals[row] > ceiling:
            errors.append(
                f"{row}: expected at most {ceiling} lines, got {totals[row]}; remove lines, or raise the ceiling in "
                "tests/budget.py and give the reason in the commit message"
            )
    return totals, errors


def main() -> int:
    errors = []
    for title, folder, suffixes, table, goal, apart in (
        ("bmtrain/", ROOT / "bmtrain", (".py", ".pyi"), PYTHON, PYTHON_GOAL, "tools"),
        ("csrc/", ROOT / "csrc", (".cpp", ".h", ".inl", ".cu", ".cuh"), CORE, CORE_GOAL, "testing"),
    ):
        totals, found = problems(table, count(folder, suffixes))
        errors += found
        print(f"{title:<12}{'lines':>7}{'ceiling':>9}")
        for row, (_, ceiling) in table.items():
            print(f"  {row:<10}{totals[row]:>7}{ceiling:>9}")
        total = sum(number for row, number in totals.items() if row != apart)
        print(f"  {'without ' + apart:<15} {total} (goal: {goal})")
    files = len(list((ROOT / "bmtrain").glob("*.py")))
    print(f"files in bmtrain/ itself: {files} (ceiling and goal: {ROOT_FILES})")
    if files > ROOT_FILES:
        errors.append(f"bmtrain/: expected at most {ROOT_FILES} Python files, got {files}; use a folder")
    print(*(f"error: {error}" for error in errors), sep="\n", file=sys.stderr, end="\n" if errors else "")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
