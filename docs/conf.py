"""How Sphinx builds these pages: `python -m sphinx -W docs docs/_build`."""

import posixpath
import re
import sys
from pathlib import Path

from sphinx import addnodes
from sphinx.environment.adapters.toctree import TocTree
from sphinx.search import SearchEnglish, languages

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the reference is made from the docstrings of this tree

project = "bmtrain"
release = (ROOT / "bmtrain" / "_version.py").read_text().split('"')[-2]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
templates_path = ["templates"]
exclude_patterns = ["_build"]
html_theme = "furo"
highlight_language = "text"  # a block without a language is an output, not Python
html_title = f"bmtrain {release}"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["pages.css"]
copybutton_prompt_text = r"\$ "  # a copied console block has its commands alone
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = (
    "py:obj"  # `name` in a docstring: a link where there is such a name, code elsewhere
)


class SearchBoth(SearchEnglish):
    """Finds Chinese words too, which nothing separates: any two neighbouring characters are a word."""

    js_splitter_code = r"""
var splitQuery = (query) => query
  .split(/[^\p{Letter}\p{Number}_]+|(?<=[\u4e00-\u9fff])(?![\u4e00-\u9fff])|(?<![\u4e00-\u9fff])(?=[\u4e00-\u9fff])/u)
  .filter((word) => word)
  .flatMap((word) => /[\u4e00-\u9fff]{2}/.test(word)
    ? Array.from({length: word.length - 1}, (_, i) => word.slice(i, i + 2)) : [word]);
"""

    def split(self, input):
        words = []
        for word in super().split(input):
            for part in re.findall("[\u4e00-\u9fff]+|[^\u4e00-\u9fff]+", word):
                is_chinese = "\u4e00" <= part[0] <= "\u9fff" and len(part) > 1
                words += (
                    [part[i : i + 2] for i in range(len(part) - 1)]
                    if is_chinese
                    else [part]
                )
        return words


languages["en"] = SearchBoth


_WORDS_OF_THE_THEME = {
    "Back to top": "回到顶部",
    "Home": "首页",
    "Next": "下一页",
    "On this page": "本页内容",
    "Previous": "上一页",
    "Search": "搜索",
    "Skip to content": "跳到正文",
    "View this page": "查看本页源文件",
}


def speak_chinese(app, pagename, templatename, context, doctree):
    """What stands around a Chinese page is Chinese: the sidebar lists the pages of ``zh/index`` alone."""
    if not pagename.startswith("zh/"):
        return
    translate = _WORDS_OF_THE_THEME.get
    context["_"] = context["gettext"] = lambda text: translate(" ".join(text.split()), text)
    context["language"] = "zh-CN"
    context["master_doc"] = "zh/index"  # where the title leads
    resolve = TocTree(app.env).resolve
    context["toctree"] = lambda **options: "".join(
        app.builder.render_partial(resolve(pagename, app.builder, tree, **options))[
            "fragment"
        ]
        for tree in app.env.get_doctree("zh/index").findall(addnodes.toctree)
    )


def link_other_language(app, pagename, templatename, context, doctree):
    """The same page in the other language: Chinese pages lie in ``zh/`` under the English page's name."""
    is_chinese = pagename.startswith("zh/")
    twin = pagename.removeprefix("zh/") if is_chinese else f"zh/{pagename}"
    if twin not in app.env.found_docs:
        twin = "zh/index"  # the reference is in English
    if pagename in app.env.found_docs:
        context["other_language"] = {
            "address": context["pathto"](twin),
            "code": "en" if is_chinese else "zh-CN",
            "name": "English" if is_chinese else "中文",
            "title": "This page in English" if is_chinese else "本页中文版",
        }


def stay_in_language(app, pagename, templatename, context, doctree):
    """No page leads on or back to one in the other language, although the first Chinese page follows an English one."""
    for way in ("prev", "next"):
        link = (context.get(way) or {}).get("link", "")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(pagename), link))
        if link and target.startswith("zh/") != pagename.startswith("zh/"):
            context[way] = None


def break_names(app, pagename, templatename, context, doctree):
    """Lets a long name in a table be broken after an underscore, a dot and such marks, and between its words."""

    def break_code(code):
        if len(code[2]) <= 14:
            return f'<span class="pre short">{code[2]}'
        marks = r"(?<=[_./=(\[,:-])(?<!--)(?=[\w\"'])(?!(\d+|py)(\W|$))|(?<=[a-z])(?=[A-Z])"
        return code[1] + re.sub(marks, "<wbr>", code[2])

    def break_table(table):
        return re.sub(r'(<span class="pre">)([^<]+)', break_code, table[0])

    context["body"] = re.sub(
        "<table.*?</table>", break_table, context.get("body", ""), flags=re.DOTALL
    )


def setup(app):
    app.connect("html-page-context", break_names)
    app.connect("html-page-context", stay_in_language)
    app.connect("html-page-context", link_other_language)
    app.connect("html-page-context", speak_chinese, priority=400)  # before the theme
