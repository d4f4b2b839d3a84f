"""The folders of the C++ core include each other in one direction."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from pathlib import Path

CORE = Path(__file__).resolve().parents[2] / "csrc"
SOURCES = [path for path in CORE.rglob("*") if path.suffix in (".h", ".cpp", ".inl", ".cu", ".cuh")]


def test_folders_of_the_core_have_no_circle() -> None:
    folders: dict[str, set[str]] = {}
    for source in SOURCES:
        folder = source.parent.relative_to(CORE).as_posix()
        for included in re.findall(r'#include "([^"]+)"', source.read_text(encoding="utf-8")):
            assert (CORE / included).exists(), f"{source}: {included} is not there"
            other = Path(included).parent.as_posix()
            if other != folder:
                folders.setdefault(folder, set()).add(other)
    order = list(TopologicalSorter(folders).static_order())  # CycleError names the circle
    assert order.index("common") < order.index("comm") < order.index("shard") < order.index("bindings")
