"""How Sphinx builds these pages: `python -m sphinx -W docs docs/_build`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the reference is made from the docstrings of this tree

project = "bmtrain"
release = (ROOT / "bmtrain" / "_version.py").read_text().split('"')[-2]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"bmtrain {release}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
