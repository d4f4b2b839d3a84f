"""Phrases that pages and docstrings do not use, and the plain technical English to write instead."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Phrase(NamedTuple):
    """A pattern, and the expression that replaces it."""

    pattern: str
    instead: str


PHRASES = [
    Phrase(r"\b(?:is|are) told\b", "gets an error that names; is notified"),
    Phrase(r"\bthose of\b", "repeat the noun"),
    Phrase(r"\bthat of\b", "repeat the noun"),
    Phrase(r"(?:^|[.;:] )What \w+", "a noun phrase that can be searched for"),
    Phrase(r"\b(?:has|have) to\b", "must"),
    Phrase(r"\bbut for\b", "except"),
    Phrase(r"\bas ever\b", "leave it out; unchanged"),
    Phrase(r"\bon (?:its|their) way\b", "in flight"),
    Phrase(r"\bat hand\b", "current"),
    Phrase(r"\bdear\b", "expensive"),
    Phrase(r"\bthe wire\b", "communication; bytes sent; network"),
    Phrase(r"\b(?:go|goes|going) on\b", "continue"),
    Phrase(r"\bwhoever\b", "every rank that; code that"),
    Phrase(r"\b(?:some|no)body\b", "another rank; no code; not tested"),
    Phrase(r"\banew\b", "again"),
    Phrase(r"\bstrangers?\b|\bthe dead\b|\bcondemn", "user tensors; exited ranks; fail"),
    Phrase(r"\b(?:in|with) a sentence\b", "raises an error"),
    Phrase(r"\b(?:have|has|are|is) the same bits\b", "bit-identical"),
    Phrase(r"\bsays? (?:so|what|who|which)\b", "name the information: lists, reports, shows"),
    Phrase(r"\bworks? element by element\b", "elementwise"),
    Phrase(r"\b(?:is|are) refused\b", "raises an error; is rejected"),
    Phrase(r"\bby turns\b", "in turns; alternately"),
    Phrase(r"\bthose (?:that|which|who)\b", "repeat the noun"),
    Phrase(
        r"\b(?:ms|bytes|tokens|steps|messages) an? (?:step|rank|element|parameter|token|sample|run)\b",
        "per",
    ),
    Phrase(r"\bbesides\b", "in addition to; except"),
    Phrase(r"\bputs? off\b", "postpone"),
    Phrase(r"\bbe it\b", "also; whether"),
    Phrase(r"\b(?:go|goes) without\b", "needs none; runs without"),
    Phrase(r"\bin vain\b", "without effect; for ever"),
    Phrase(r"\bin silence\b", "silently"),
    Phrase(r"(?:^|[.;:] )(?:Of|To) (?:a|all|each|its|the) ", "put the subject first"),
    Phrase(r"\bit is so\b", "it is; symptom"),
    Phrase(r"\b(?:is|was) said\b", "is reported; is described"),
    Phrase(
        r"\bwhat (?:is|was|it|they|the|an?|each|one|ranks?|has|have) (?:\w+ )?(?:is|was|has|had|needs?)\b",
        "a noun",
    ),
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
    "逐位相同": "逐位一致",
    "级别": "level",
    "显卡": "GPU",
    "学习率计划": "学习率调度",
    "批次": "batch",
    "批大小": "batch 大小",
    "通信器": "通信组",
    "集合操作": "集合通信",
    "矩估计": "动量",
    "幸存者": "存活的 rank",
    "卸载": "offload",
    "杀死": "杀掉",
    "状态字典": "state dict",
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
def texts() -> tuple[str, str]:
    """Docstrings of the package, and what the package and the example print: errors, help texts, titles."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented, printed = [], []
    for path in sorted([*(ROOT / "bmtrain").rglob("*.py"), *(ROOT / "example").rglob("*.py")]):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        own = [ast.get_docstring(node, clean=False) or "" for node in nodes if isinstance(node, kinds)]
        documented += own
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                printed.append(
                    "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in own:
                printed.append(node.value)
    return re.sub(r"\s+", " ", " . ".join(documented)), re.sub(r"\s+", " ", " . ".join(printed))


@pytest.mark.parametrize("phrase", PHRASES, ids=[phrase.pattern for phrase in PHRASES])
def test_phrases_are_replaced(phrase: Phrase) -> None:
    for name, text in zip(("pages", "docstrings", "texts"), (english(), *texts()), strict=True):
        found = [text[max(0, m.start() - 40) : m.end() + 40] for m in re.finditer(phrase.pattern, text)]
        assert not found, f"{name}: write {phrase.instead!r} instead: {found}"


@pytest.mark.parametrize("term", CHINESE)
def test_chinese_pages_use_one_term(term: str) -> None:
    found = [path.name for path in pages("zh") if term in prose(path)]
    assert not found, f"write {CHINESE[term]}"


def test_chinese_lines_end_with_their_paragraphs() -> None:
    """Browsers show a line break between two Chinese characters as a space."""
    chinese = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
    found = [path.name for path in pages("zh") if re.search(f"{chinese}\n *{chinese}", prose(path))]
    assert not found, "join the lines"


def test_module_titles_are_noun_phrases() -> None:
    titles = {
        path: ast.get_docstring(ast.parse(path.read_text())) or ""
        for path in (ROOT / "bmtrain").rglob("*.py")
    }
    found = [path.name for path, title in titles.items() if re.match(r"(Wh\w+|How)\b", title)]
    assert not found, f"begin with the concept, a noun that can be searched for: {found}"
