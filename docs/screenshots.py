"""Pictures of the built pages in a headless browser, and whether a page is wider than its window.

    python docs/screenshots.py OUT                     # builds the pages into OUT/html, a PNG for each page and width
    python docs/screenshots.py OUT --check             # no pictures: names what is wider than the window, of all pages

It takes chromium, chromium-browser or google-chrome from PATH, or what BROWSER names. Chinese needs a font that has it,
such as fonts-noto-cjk.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

DOCS = Path(__file__).resolve().parent
#: Phones, half a screen, laptops with and without a scroll bar, and a large screen.
WIDTHS = (360, 390, 800, 1280, 1390, 1440, 1920)
PAGES = (
    "index",
    "tutorial/quickstart",
    "tutorial/distributed",
    "howto/migrate-from",
    "howto/hangs",
    "howto/memory",
    "howto/plan",
    "howto/tensor-parallel",
    "explanation/sharding",
    "explanation/scale",
    "reference/api",
    "reference/environment",
    "reference/glossary",
    "zh/index",
    "zh/tutorial/quickstart",
    "zh/howto/memory",
    "zh/howto/migrate-from",
    "zh/explanation/sharding",
)

# A page that holds the others, one after the other, and writes down what is wider than its frame.
_MEASURE = """<!doctype html><body><script>
const jobs = %s;
const found = [];
function next() {
  const job = jobs.shift();
  if (!job) { document.title = "done"; document.body.textContent = JSON.stringify(found); return; }
  const frame = document.createElement("iframe");
  frame.style.width = job.width + "px"; frame.style.height = "900px"; frame.src = job.url;
  frame.onload = () => {
    const inside = frame.contentDocument;
    const excess = inside.documentElement.scrollWidth - inside.documentElement.clientWidth;
    const pictures = [...inside.images].filter(i => !i.naturalWidth).map(i => i.src);
    if (excess > 0 || pictures.length) found.push({page: job.page, width: job.width, excess, pictures});
    frame.remove(); next();
  };
  document.body.append(frame);
}
next();
</script></body>"""


def find_browser() -> str | None:
    names = [os.environ.get("BROWSER"), "chromium", "chromium-browser", "google-chrome"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build(html: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", str(DOCS), str(html)], check=True
    )


def browse(browser: str, *options: str) -> str:
    with tempfile.TemporaryDirectory() as profile:
        ran = subprocess.run(
            [
                browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--disable-dev-shm-usage", "--allow-file-access-from-files", f"--user-data-dir={profile}", *options,
            ],
            check=True, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    return ran.stdout


def measure(
    browser: str, html: Path, pages: list[str], widths: list[int]
) -> list[dict[str, object]]:
    """The pages that are wider than their window, or lack a picture: ``page, width, excess, pictures``."""
    jobs = [
        {"page": page, "width": width, "url": (html / f"{page}.html").as_uri()}
        for page in pages
        for width in widths
    ]
    holder = html / "_measure.html"
    holder.write_text(_MEASURE % json.dumps(jobs), encoding="utf-8")
    try:
        dom = browse(browser, "--virtual-time-budget=600000", "--dump-dom", holder.as_uri())
    finally:
        holder.unlink()
    told = re.search(r"<title>done</title>.*?<body>(.*?)</body>", dom, re.DOTALL)
    if told is None:
        raise RuntimeError(f"the browser did not come to the end of {len(jobs)} pages")
    found: list[dict[str, object]] = json.loads(unescape(told[1]))
    return found


def photograph(browser: str, html: Path, page: str, width: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    browse(
        browser,
        f"--window-size={width},{1800}",
        f"--screenshot={path}",
        (html / f"{page}.html").as_uri(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--check", action="store_true", help="measure all pages instead")
    parser.add_argument("--pages", nargs="+", default=list(PAGES), metavar="PAGE")
    parser.add_argument(
        "--widths", nargs="+", type=int, default=list(WIDTHS), metavar="PIXELS"
    )
    options = parser.parse_args()
    browser = find_browser()
    if browser is None:
        print(
            "screenshots: found no browser: install chromium, or name one in BROWSER",
            file=sys.stderr,
        )
        return 2
    html = options.out.resolve() / "html"
    build(html)
    if options.check:
        pages = sorted(
            path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")
        )
        found = measure(browser, html, pages, options.widths)
        for page in found:
            print(json.dumps(page))
        print(
            f"{len(pages)} pages at {len(options.widths)} widths, {len(found)} with something wrong"
        )
        return 1 if found else 0
    for page in options.pages:
        for width in options.widths:
            path = options.out / f"{page.replace('/', '-')}-{width}.png"
            photograph(browser, html, page, width, path)
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
