"""Pages for contributors: paths that they name exist, and the map has every folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "CONTRIBUTING.md",
    "AGENTS.md",
    *sorted(f"docs/contributing/{p.name}" for p in ROOT.glob("docs/contributing/*")),
]
#: Of the repository itself; a name without a folder is that of a file in any folder of the core.
_TOP = ("bmtrain", "csrc", "tests", "docs", "example")


@pytest.mark.parametrize("page", PAGES)
def test_named_paths_exist(page: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    missing = []
    for name in re.findall(r"`([\w./-]+)`", text):
        if name.partition("/")[0] in _TOP:
            found = (ROOT / name).exists()
        elif name.endswith((".h", ".cpp", ".inl", ".cu")):
            found = any((ROOT / "csrc").rglob(name))
        else:
            continue
        if not found:
            missing.append(name)
    assert not missing


def test_the_map_has_every_folder() -> None:
    """Of bmtrain, csrc, tests and docs: folders of sources one level down; deeper ones belong to the row above."""
    named = set(re.findall(r"^\| `([\w/.-]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    folders = {"bmtrain", "csrc", "example"}
    for top in ("bmtrain", "csrc", "tests", "docs"):
        for path in (ROOT / top).iterdir():
            if path.is_dir() and path.name not in ("__pycache__", "_build") and any(path.rglob("*.*")):
                folders.add(f"{top}/{path.name}")
    assert folders - named == set()
