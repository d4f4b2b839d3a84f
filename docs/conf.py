"""How Sphinx builds these pages: `python -m sphinx -W docs docs/_build`."""

from pathlib import Path

project = "bmtrain"
release = (Path(__file__).parents[1] / "bmtrain" / "_version.py").read_text().split('"')[-2]
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"bmtrain {release}"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
