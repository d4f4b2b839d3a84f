"""The examples in the library's docstrings run as written, on one rank, initialised unless they do it themselves."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_RANK = {
    "_ranks.launch",
    "_ranks.rendezvous",
    "debug",
    "global_var",
    "init",
    "topology",
    "utils",
}  # test_launch_doctest


def modules_with_examples() -> list[str]:
    files = [path for path in (ROOT / "bmtrain").rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(ROOT / "bmtrain").with_suffix("").parts) for path in files]
    return sorted(name.removesuffix(".__init__") for name in names if name not in WITHOUT_RANK)


def run_examples(name: str) -> tuple[int, str]:
    import torch

    import bmtrain
    from bmtrain._ranks import context

    module = importlib.import_module(f"bmtrain.{name}")
    output: list[str] = []
    failed = 0
    options = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    names = {"bmt": bmtrain, "bmtrain": bmtrain, "torch": torch}
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=names):
        context.uninstall()
        if not any("init_distributed(" in example.source for example in test.examples):
            bmtrain.init_distributed()
        failed += doctest.DocTestRunner(optionflags=options).run(test, out=output.append).failed
    context.uninstall()
    return failed, "".join(output)


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name: str) -> None:
    [(failed, output)] = run_ranks(1, run_examples, name, init=False)
    assert not failed, output
