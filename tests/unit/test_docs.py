"""Every block of code in the READMEs and in docs/ runs, or says why it does not.

- The Python blocks of a page run in order, as one program, on 1 and 2 ranks. The program asserts what the page says; an
  assertion that would distract readers is in a comment, ``<!-- assert: ... -->``.
- A block of shell commands, or of another language, follows a comment that says so: ``<!-- runs: path of the test that
  runs it -->`` or ``<!-- not run: why -->``. A comment of the second kind exempts a Python block as well.
- A block without a language, or in ``text``, is a picture or an output.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import unicodedata
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from harness import run_process, run_ranks

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:^<!-- *(?P<mark>runs|not run): *(?P<why>.+?) *-->\n+)?^```(?P<language>[\w{}-]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: Runs after a page's program.
_ASSERTION = re.compile(r"^<!-- assert: (.+) -->$", re.MULTILINE)
#: Characters of a block of code that the site shows without scrolling.
COLUMNS = 92
_DIRECTIVES = ("{include}", "{toctree}", "{eval-rst}", "{automodule}")


class Fence(NamedTuple):
    """A block of code of a page."""

    line: int
    language: str
    code: str
    mark: str | None
    why: str | None


def pages() -> list[str]:
    files = [*ROOT.glob("README*.md"), ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in files if "_build" not in path.parts)


def fences(page: str) -> list[Fence]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Fence(line, match["language"], match["code"], match["mark"], match["why"]))
    return [fence for fence in found if fence.language not in _DIRECTIVES]


def program(page: str) -> str:
    """The Python blocks of a page as one program, each at the line where it stands."""
    lines: list[str] = []
    for fence in fences(page):
        if fence.language == "python" and fence.mark is None:
            lines += [""] * (fence.line - len(lines))
            lines += fence.code.splitlines()
    if not lines:
        return ""
    hidden = _ASSERTION.findall((ROOT / page).read_text(encoding="utf-8"))
    return "\n".join([*lines, *(f"assert {condition}" for condition in hidden)]) + "\n"


def run_program(text: str, name: str, folder: str) -> None:
    os.chdir(folder)
    path = Path(folder) / "page.py"
    path.write_text(text, encoding="utf-8")
    names = {"__name__": "__main__", "__file__": str(path)}
    exec(compile(text, name, "exec"), names)


def twin(page: str) -> str | None:
    """The English page of a Chinese one."""
    if page == "README-ZH.md":
        return "README.md"
    return page.replace("docs/zh/", "docs/", 1) if page.startswith("docs/zh/") else None


#: Chinese pages have the programs of their twins, which a test compares.
PROGRAMS = [page for page in pages() if program(page) and twin(page) is None]
TRANSLATED = [page for page in pages() if twin(page) is not None]
#: Modules whose names are for users.
PUBLIC = [
    "bmtrain",
    "bmtrain.benchmark",
    "bmtrain.data",
    "bmtrain.dcp",
    "bmtrain.debug",
    "bmtrain.distributed",
    "bmtrain.distributed.checkpoint",
    "bmtrain.errors",
    "bmtrain.inspect",
    "bmtrain.loss",
    "bmtrain.lr_scheduler",
    "bmtrain.nn",
    "bmtrain.nn.functional",
    "bmtrain.nn.sequence",
    "bmtrain.optim",
    "bmtrain.plan",
    "bmtrain.survive",
    "bmtrain.timeline",
    "bmtrain.virtual",
    "bmtrain.weights",
]
#: What a newcomer reads.
NEEDED = {
    *(f"docs/tutorial/{name}.md" for name in ("install", "quickstart", "own", "example", "distributed")),
    *(
        f"docs/howto/{name}.md"
        for name in ("migrate", "migrate-from", "checkpoints", "convert", "huggingface")
    ),
    *(f"docs/howto/{name}.md" for name in ("offload", "tuning", "plan", "doctor", "hangs", "trouble")),
    *(
        f"docs/howto/{name}.md"
        for name in ("launch", "memory", "precision", "evaluate", "inspect", "optimizers")
    ),
    *(f"docs/howto/{name}.md" for name in ("tensor-parallel", "pipeline")),
    *(f"docs/explanation/{name}.md" for name in ("sharding", "policies")),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("page", PROGRAMS)
def test_programs(page: str, world: int, tmp_path: Path) -> None:
    run_ranks(world, run_program, program(page), page, str(tmp_path), init=False, fresh=True, timeout=200)


@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_assert_what_the_page_says(page: str) -> None:
    nodes = ast.walk(ast.parse(program(page)))
    assert any(isinstance(node, ast.Assert) for node in nodes), f"{page}: its program only runs"


@pytest.mark.parametrize("page", ["docs/tutorial/own.md"])
def test_the_second_run_goes_on_where_the_first_ended(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        run_ranks(2, run_program, program(page), page, str(tmp_path), init=False, fresh=True, timeout=200)
    epochs = re.findall(r"epoch (\d+)  loss", capsys.readouterr().out)
    assert epochs == ["0", "1", "2", "3"]


@pytest.mark.parametrize("page", pages())
def test_everything_else_says_what_runs_it(page: str) -> None:
    silent = [
        f"{page}:{fence.line}: ```{fence.language}"
        for fence in fences(page)
        if fence.mark is None and fence.language not in ("", "text", "python")
    ]
    assert not silent, "no comment <!-- runs: ... --> or <!-- not run: ... --> before:\n" + "\n".join(silent)
    for fence in fences(page):
        if fence.mark == "runs":
            path = re.split(r"[ (（:]", fence.why or "")[0]
            assert (ROOT / path).is_file(), f"{page}:{fence.line}: there is no {path}"


@pytest.mark.parametrize("page", pages())
def test_code_fits_the_column_of_the_site(page: str) -> None:
    """Without scrolling sideways; a Chinese character takes two columns."""
    wide = [
        f"{page}:{fence.line + number}: {line}"
        for fence in fences(page)
        if fence.language in ("", "python", "bash", "shell")
        for number, line in enumerate(fence.code.splitlines(), 1)
        if sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in line) > COLUMNS
    ]
    assert not wide, "\n".join(wide)


def test_fences_are_found() -> None:
    """Indented fences would be missed: there are none; and the quick start is among those that run."""
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.search(r"^[ \t]+```", text, re.MULTILINE), page
        assert text.count("```") % 2 == 0, page
    assert {"README.md", "docs/tutorial/distributed.md"} <= set(PROGRAMS)


def script(name: str) -> ModuleType:
    """A program of docs/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


OUTPUTS = script("outputs")


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; there must be no warning."""
    for needed in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("html")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", ROOT / "docs", folder]
    assert run_process(build, directory=ROOT, timeout=600).stdout == ""
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_reference(name: str, html: Path) -> None:
    module = importlib.import_module(name)
    page = (html / "reference" / "api.html").read_text(encoding="utf-8").replace("<wbr>", "")
    told = {anchor.rpartition(".")[2] for anchor in re.findall(r'id="(bmtrain\.[\w.]+)"', page)}
    told |= set(re.findall(r'<span class="pre">(?:bmtrain\.)?(\w+)</span>', page))
    names = {member for member in module.__all__ if not isinstance(getattr(module, member), ModuleType)}
    assert names - told - {"__version__"} == set()


SCREENSHOTS = script("screenshots")


@pytest.fixture(scope="module")
def browser() -> str:
    found: str | None = SCREENSHOTS.find_browser()
    return found or pytest.skip("no browser: docs/screenshots.py takes chromium")


SEARCHES = [
    ("clip_grad_norm", "howto/whole-tensors.html"),
    ("分片", "zh/explanation/sharding.html"),
    ("重计算 策略", "zh/explanation/policies.html"),
    ("mixed precision", "howto/precision.html"),
    ("gradient accumulation", "explanation/policies.html"),
    ("activation checkpointing", "explanation/policies.html"),
    ("混合精度", "zh/howto/precision.html"),
    ("断点续训", "zh/howto/checkpoints.html"),
    ("显存", "zh/howto/memory.html"),
    ("梯度累积", "zh/explanation/policies.html"),
]
#: Searches one after the other, each until its page is found.
_SEARCH = """<!doctype html><body><script>
const searches = %s, found = [];
function next() {
  if (found.length == searches.length) {
    document.title = "done"; document.body.textContent = JSON.stringify(found); return;
  }
  const [address, page] = searches[found.length], frame = document.createElement("iframe");
  let looks = 0;
  function look() {
    const links = frame.contentDocument.querySelectorAll("ul.search a");
    const is_found = [...links].some(link => link.getAttribute("href").startsWith(page));
    if (!is_found && ++looks < 200) { setTimeout(look, 100); return; }
    found.push(is_found); frame.remove(); next();
  }
  frame.onload = look; frame.src = address; document.body.append(frame);
}
next();
</script></body>"""


@pytest.mark.slow
def test_pages_are_found(html: Path, browser: str) -> None:
    address = (html / "search.html").as_uri()
    searches = [(f"{address}?q={quote(words)}", page) for words, page in SEARCHES]
    found = shown_in(browser, html / "_search.html", _SEARCH % json.dumps(searches))
    assert [search for search, is_found in zip(SEARCHES, found, strict=True) if not is_found] == []


def shown_in(browser: str, holder: Path, page: str) -> list[Any]:
    """What a page shows when its title is "done"; it may look into the pages beside it."""
    holder.write_text(page, encoding="utf-8")
    dom = SCREENSHOTS.browse(browser, "--virtual-time-budget=600000", "--dump-dom", holder.as_uri())
    told = re.search(r"<title>done</title>.*?<body>(.*?)</body>", dom, re.DOTALL)
    assert told is not None
    shown: list[Any] = json.loads(unescape(told[1]))
    return shown


@pytest.mark.slow
def test_pages_fit_into_every_window(html: Path, browser: str) -> None:
    """No page is wider than its window, from a phone to a large screen, and no picture is missing."""
    pages, widths = list(SCREENSHOTS.PAGES), list(SCREENSHOTS.WIDTHS)
    assert SCREENSHOTS.measure(browser, html, pages, widths) == []


_COPY = """<!doctype html><body><iframe src="%s" style="width: 1200px"></iframe><script>
const frame = document.querySelector("iframe");
function copy() {
  const inside = frame.contentDocument, buttons = [...inside.querySelectorAll("button.copybtn")];
  if (!buttons.length) { setTimeout(copy, 100); return; }
  const copied = [];
  inside.execCommand = () => copied.push(inside.activeElement.value);
  buttons.forEach(button => button.click());
  document.title = "done"; document.body.textContent = JSON.stringify(copied);
}
frame.onload = copy;
</script></body>"""


@pytest.mark.slow
def test_copy_buttons_copy_commands_without_prompts_and_outputs(html: Path, browser: str) -> None:
    address = (html / "zh" / "howto" / "survive.html").as_uri()
    copied = shown_in(browser, html / "_copy.html", _COPY % address)
    assert copied[0].startswith("import torch\n") and "for shard in shards:" in copied[0]
    assert copied[1] == "bmtrain launch --nproc 4 --survive 1 train.py"


@pytest.mark.slow
def test_what_stands_around_a_page_has_its_language(html: Path) -> None:
    folders = {"howto": ("Running a job", "Next"), "zh/howto": ("运行作业", "下一页")}
    for folder, words in folders.items():
        page = (html / folder / "launch.html").read_text(encoding="utf-8")
        sidebar = page.partition('<div class="sidebar-tree">')[2].partition("</aside>")[0]
        assert words[0] in sidebar and words[1] in page
        others = (word for other, told in folders.items() if other != folder for word in told)
        assert not any(word in page for word in others)
        assert 'href="doctor.html"' in sidebar
    first, last = (html / f"{page}.html" for page in ("zh/index", "contributing/hang-report"))
    assert "prev-page" not in first.read_text(encoding="utf-8")
    assert "next-page" not in last.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "other"),
    [
        ("howto/plan", "../zh/howto/plan.html"),
        ("zh/howto/plan", "../../howto/plan.html"),
        ("index", "zh/index.html"),
    ],
)
def test_a_page_leads_to_the_same_page_in_the_other_language(page: str, other: str, html: Path) -> None:
    text = (html / f"{page}.html").read_text(encoding="utf-8")
    assert re.search(rf'class="language-switch">\s*<a href="{re.escape(other)}"', text)


def test_links_inside_lead_somewhere() -> None:
    broken = []
    for page in pages():
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            file, _, anchor = target.partition("#")
            path = (ROOT / page).parent / file if file else ROOT / page
            if not path.exists() or (anchor and anchor not in anchors(path)):
                broken.append(f"{page}: {target}")
    assert not broken, broken


@pytest.mark.parametrize("page", TRANSLATED)
def test_both_languages_have_the_same_code(page: str) -> None:
    """Programs but for comments, commands but for remarks, and the marks of what runs them."""
    english = twin(page)
    assert english is not None
    remark = re.compile(r" *#.*$", re.MULTILINE)
    for languages in (("shell", "bash", "console"), ("python",)):
        ours, theirs = ([f for f in fences(name) if f.language in languages] for name in (page, english))
        if languages == ("python",):
            codes = [ast.dump(ast.parse("".join(f.code for f in found))) for found in (ours, theirs)]
        else:
            codes = [str([remark.sub("", f.code) for f in found]) for found in (ours, theirs)]
        assert codes[0] == codes[1]
        assert [f.mark for f in ours if f.mark] == [f.mark for f in theirs if f.mark]


@pytest.mark.parametrize("page", [page for page in TRANSLATED if not page.endswith("index.md")])
def test_both_languages_have_the_same_parts(page: str) -> None:
    """As many headings of each level, rows of tables, items of lists, and pictures."""
    english = twin(page)
    assert english is not None
    assert parts(page) == parts(english)


def parts(page: str) -> dict[str, list[str]]:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    patterns = {"headings": r"^#+ ", "rows": r"^\|", "items": r"^(?:-|\d+\.) ", "pictures": r"!\["}
    return {name: re.findall(pattern, text, re.MULTILINE) for name, pattern in patterns.items()}


def test_what_a_newcomer_needs_is_there_in_both_languages() -> None:
    there = {twin(page) for page in TRANSLATED}
    assert there >= NEEDED
    assert all((ROOT / str(english)).is_file() for english in there)


def anchors(page: Path) -> set[str]:
    """What a link into a page can name: its headings, as myst and GitHub spell them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_pictures_are_what_the_script_draws() -> None:
    draw = script("draw")
    drawn = draw.pictures()
    there = {
        path.relative_to(ROOT / "docs").as_posix(): path.read_text(encoding="utf-8")
        for folder in ("images", "zh/images")
        for path in (ROOT / "docs" / folder).glob("*.svg")
    }
    assert there == drawn, "run python docs/draw.py"
    same = r"|(rank|block) \d|[A-Z]?\d?|[\d.,]+|[\w.]+\.(weight|bias)|FSDP2|bmtrain|bf16|fp32|\w+Error(: .*)?"
    same += "|gpipe|1f1b|interleaved|zb1p"
    for path, picture in drawn.items():
        labels = re.findall(">([^<>]+)</text>", picture) if path.startswith("zh/") else []
        english = [label for label in labels if label.isascii() and not re.fullmatch(same, label)]
        assert not english, f"{path}: translate them in CHINESE of docs/draw.py"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if output.is_slow else [])
        for name, output in OUTPUTS.OUTPUTS.items()
    ],
)
def test_pages_show_what_commands_print(name: str) -> None:
    assert list(OUTPUTS.pages_with(name)), f"no page shows {name}"
    assert OUTPUTS.differing(name) == [], f"run python docs/outputs.py {name}"


#: Of torch, NumPy, NCCL and the system, on the page of troubles.
FOREIGN = (
    "Failed to initialize NumPy",
    "CUDA out of memory",
    "can't optimize a non-leaf Tensor",
    "p is model.layer.weight",
    "Default process group has not been initialized",
    "Trying to backward through the graph a second time",
    "setStorage: ",
    "torch.func.{grad, vjp, jacrev, hessian} don't yet support",
    "a leaf Variable that requires grad is being used",
    "The differentiated Tensor ",
    "Could not get qualified name for class",
    "module is not installed as a submodule",
    "mat2 must be a matrix",
    "'weight' must be 2-D",
    "too many indices for tensor",
    "Expected weight to be of same shape as normalized_shape",
    "The size of tensor a ",
    "Segmentation fault",
    "failed to extend /dev/shm/nccl-",
    "Error while creating shared memory segment",
    "no socket interface found",
    "Connection refused",
    "ibv_reg_mr failed",
    "Cannot allocate memory",
    "NET/IB: Got completion ",
)


def test_messages_on_the_page_of_troubles_are_printed() -> None:
    """What stands in a message between dots, numbers and names is a text of the library, of its core or of setup.py."""
    sources = [ROOT / "setup.py", *(ROOT / "bmtrain").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    texts = re.sub(r'"\s*(?:\+\s*)?f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in sources))
    rows = re.findall(
        r"^\| (.*?) \| ", (ROOT / "docs/howto/trouble.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    quoted = [quote for row in rows for quote in re.findall("`([^`]+)`", row) if " " in quote]
    own = [quote for quote in quoted if not quote.startswith(FOREIGN)]
    parts = [
        part.strip(" ,:")
        for quote in own
        for part in re.split(r"\.\.\.|\d|: |\(| of group|[A-Z]\w+\.\w+", quote)
    ]
    assert len(own) > 20
    assert [part for part in parts if len(part) > 12 and part not in texts] == []
    assert [start for start in FOREIGN if not any(quote.startswith(start) for quote in quoted)] == []


def test_pages_name_commands_that_exist() -> None:
    """`python -m bmtrain TOOL` in any page is a tool of this version."""
    named = set()
    for page in pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        named |= set(re.findall(r"python3? -m bmtrain ([a-z]+)", text))
    told = subprocess.run(
        [sys.executable, "-m", "bmtrain", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {name for name in named if not re.search(rf"\b{name}\b", told)} == set()
