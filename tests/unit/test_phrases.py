"""Phrases that pages and docstrings replace by plain technical English, each with a ceiling that only falls.

A new text uses the right-hand side. A rewrite of an old text lowers the ceiling; none is raised.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Phrase(NamedTuple):
    """A pattern, what to write instead, and how often it may stand in pages and in docstrings."""

    pattern: str
    instead: str
    pages: int
    docstrings: int


PHRASES = [
    Phrase(r"\b(?:is|are) told\b", "gets an error that names; is notified", 0, 0),
    Phrase(r"\bthose of\b", "repeat the noun", 1, 7),
    Phrase(r"\bthat of\b", "repeat the noun", 0, 4),
    Phrase(r"(?:^|[.;:] )What \w+", "a noun phrase that can be searched for", 0, 6),
    Phrase(r"\b(?:has|have) to\b", "must", 0, 0),
    Phrase(r"\bbut for\b", "except", 0, 0),
    Phrase(r"\bas ever\b", "leave it out; unchanged", 0, 0),
    Phrase(r"\bon (?:its|their) way\b", "in flight", 0, 0),
    Phrase(r"\bat hand\b", "current", 0, 0),
    Phrase(r"\bdear\b", "expensive", 0, 0),
    Phrase(r"\bthe wire\b", "communication; bytes sent; network", 0, 0),
    Phrase(r"\b(?:go|goes|going) on\b", "continue", 2, 0),
    Phrase(r"\bwhoever\b", "every rank that; code that", 0, 0),
    Phrase(r"\b(?:some|no)body\b", "another rank; no code; not tested", 1, 0),
    Phrase(r"\banew\b", "again", 0, 0),
    Phrase(r"\bstrangers?\b|\bthe dead\b|\bcondemn", "user tensors; exited ranks; fail", 1, 0),
    Phrase(r"\b(?:in|with) a sentence\b", "raises an error", 0, 0),
    Phrase(r"\b(?:have|has|are|is) the same bits\b", "bit-identical", 0, 0),
    Phrase(r"\bsays? (?:so|what|who|which)\b", "name the information: lists, reports, shows", 0, 0),
    Phrase(r"\bworks? element by element\b", "elementwise", 0, 0),
    Phrase(r"\b(?:is|are) refused\b", "raises an error; is rejected", 1, 0),
    Phrase(r"\bby turns\b", "in turns; alternately", 0, 0),
    Phrase(r"\bthose (?:that|which|who)\b", "repeat the noun", 3, 10),
    Phrase(
        r"\b(?:ms|bytes|tokens|steps|messages) an? (?:step|rank|element|parameter|token|sample|run)\b",
        "per",
        0,
        0,
    ),
    Phrase(r"\bbesides\b", "in addition to; except", 0, 3),
]
#: Chinese pages have one term for each thing (docs/zh/reference/glossary.md).
CHINESE = {
    "收集": "聚合",
    "载入": "加载",
    "样例": "示例",
    "主参数": "主权重",
    "结点": "节点",
    "线路": "通信、网络",
    "手头": "当前",
    "自变量": "参数",
    "散文": "纯文本",
    "次序": "顺序",
    "就地": "原地",
    "比特": "逐位",
    "学习率计划": "学习率调度",
}


def pages(folder: str) -> list[Path]:
    found = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    is_chinese = folder == "zh"
    readme = ROOT / ("README-ZH.md" if is_chinese else "README.md")
    return [readme, *(path for path in found if ("zh" in path.parts) == is_chinese)]


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def english() -> str:
    return re.sub(r"\s+", " ", " ".join(map(prose, pages("en"))))


@cache
def docstrings() -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for path in sorted((ROOT / "bmtrain").rglob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found += [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    return re.sub(r"\s+", " ", " . ".join(found))


@pytest.mark.parametrize("phrase", PHRASES, ids=[phrase.pattern for phrase in PHRASES])
def test_phrases_become_fewer(phrase: Phrase) -> None:
    for name, text, ceiling in (
        ("pages", english(), phrase.pages),
        ("docstrings", docstrings(), phrase.docstrings),
    ):
        found = [text[max(0, m.start() - 40) : m.end() + 40] for m in re.finditer(phrase.pattern, text)]
        assert len(found) <= ceiling, f"{name}: write {phrase.instead!r} instead: {found}"


@pytest.mark.parametrize("term", CHINESE)
def test_chinese_pages_use_one_term(term: str) -> None:
    found = [path.name for path in pages("zh") if term in prose(path)]
    assert not found, f"write {CHINESE[term]}"


def test_module_titles_are_noun_phrases() -> None:
    titles = {
        path: ast.get_docstring(ast.parse(path.read_text())) or ""
        for path in (ROOT / "bmtrain").rglob("*.py")
    }
    found = [path.name for path, title in titles.items() if re.match(r"(Wh\w+|How)\b", title)]
    assert not found, f"begin with the concept, a noun that can be searched for: {found}"
