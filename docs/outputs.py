"""Write what the commands print into these pages: `python docs/outputs.py` runs them, `--check` compares.

A page marks the place by ``<!-- output: NAME -->`` before a block of ``text``; NAME is one of `OUTPUTS`. Where figures
change from machine to machine, `--check` compares the words of the lines alone.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OUTPUTS", "Output", "differing", "pages_with", "words"]

ROOT = Path(__file__).resolve().parents[1]
PLACE = re.compile(
    r"(^<!-- output: (?P<name>[\w-]+) -->\n+```text\n)(?P<text>.*?)(^```$)",
    re.MULTILINE | re.DOTALL,
)

_TRAIN = """
import torch
import bmtrain as bmt
bmt.init_distributed(seed=0)
device = bmt.config["device"]
model = bmt.TransformerBlockList([bmt.Block(bmt.nn.Linear(512, 512)) for _ in range(4)])
bmt.init_parameters(model)
manager = bmt.optim.OptimManager()
manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
for step in range(14):
    manager.zero_grad()
    manager.backward(model(torch.ones(256, 512, device=device)).square().mean())
    manager.step()
bmt.save(model, "model.pt")
"""

_FAIL = """
import time
import bmtrain as bmt
bmt.init_distributed(timeout=20)
layer = bmt.nn.Linear(8, 8)
bmt.init_parameters(layer)
if bmt.rank() == 1:
    time.sleep(5)  # until rank 0 waits in its gather
    raise ValueError("bad sample")
layer.weight.sum()
"""

_GPU_SCRIPT = """
import torch
import bmtrain as bmt
bmt.init_distributed(seed=0)
layer = bmt.nn.Linear(8, 8).cuda()
bmt.init_parameters(layer)
x = torch.ones(4, 8).cuda()
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = layer(x).float().square().mean()
torch.cuda.synchronize()
"""


def _program(page: str) -> str:
    """The Python blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@dataclass(frozen=True)
class Output:
    """A command whose output pages show."""

    command: str
    #: Programs that it needs: file name -> text.
    files: tuple[tuple[str, str], ...] = ()
    #: A command that runs before it, whose output is not shown.
    before: str = ""
    #: Start of a line beyond which it depends on the machine.
    columns: int | None = None
    is_slow: bool = True
    #: Whether every machine prints the same figures.
    is_exact: bool = False
    #: The exit status.
    status: int = 0


_TORCHRUN = "python -m torch.distributed.run --standalone --nproc-per-node 2"
_RECORDED = f"BMTRAIN_TIMELINE=out/timeline {_TORCHRUN} train.py"

OUTPUTS = {
    "plan": Output(
        "python -m bmtrain plan --layers 40 --dim 5120 --heads 40 --machine a100-80gb --nodes 4 --micro-batch 8",
        is_slow=False,
        is_exact=True,
    ),
    "plan-too-large": Output(
        "python -m bmtrain plan --layers 40 --dim 5120 --heads 40 --machine a100-80gb --nodes 1 --devices 2"
        " --micro-batch 8",
        is_slow=False,
        is_exact=True,
        status=1,
    ),
    "doctor": Output("python -m bmtrain doctor", columns=16),
    "timeline": Output(
        "python -m bmtrain timeline out/timeline --no-png",
        files=(("train.py", _TRAIN),),
        before=_RECORDED,
    ),
    "convert": Output(
        "python -m bmtrain convert model.pt model.safetensors",
        files=(("train.py", _TRAIN),),
        before=_RECORDED,
    ),
    "blame": Output(
        "python -m bmtrain blame flights",
        files=(("train.py", _FAIL),),
        before=f"BMTRAIN_FLIGHT_DIR=flights {_TORCHRUN} train.py || true",
    ),
    "run-cpu": Output(
        "python -m bmtrain run --cpu train.py", files=(("train.py", _GPU_SCRIPT),)
    ),
    "bench": Output(
        "python -m bmtrain bench step --layers 4 --dim 256 --repeat 3 --variants alone,ddp,fsdp2,bmtrain-3,bmtrain-2"
    ),
    "inspect": Output(
        "python train.py", files=(("train.py", _program("docs/howto/inspect.md")),)
    ),
    "soak": Output("python -m bmtrain soak --ranks 2 --steps 20 --runs 2"),
}


def run(output: Output) -> str:
    """What the command prints, both streams together."""
    folder = prepare(output.files, output.before).name
    ran = _shell(f"{output.command} 2>&1", folder)
    if ran.returncode != output.status:
        raise RuntimeError(f"{output.command}: exit status {ran.returncode}\n{ran.stdout}")
    return ran.stdout.replace(str(ROOT), "...").replace(folder, "...")


@functools.cache
def prepare(
    files: tuple[tuple[str, str], ...], before: str
) -> tempfile.TemporaryDirectory[str]:
    """The folder of a command; commands with the same files after the same command share it."""
    folder = tempfile.TemporaryDirectory()
    for name, text in files:
        (Path(folder.name) / name).write_text(text, encoding="utf-8")
    if before:
        _shell(before, folder.name).check_returncode()
    return folder


def _shell(command: str, folder: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **ours, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
    )


def compared(text: str, output: Output) -> list[str]:
    """What must be equal of a text on a page and of the output of the command."""
    return text.splitlines() if output.is_exact else words(text, output.columns)


def words(text: str, columns: int | None = None) -> list[str]:
    """The words of an output: figures, units, bars and places in files are left out."""
    found: list[str] = []
    for line in text.splitlines():
        line = re.sub(r"[\w./-]*/[\w./-]+|\b[\da-f]{12,}\b", "", line[:columns])
        found += [word for word in re.findall(r"[A-Za-z]+", line) if word not in _UNITS]
    return found


_UNITS = {"ms", "s", "us", "KiB", "MiB", "GiB", "MB", "GB", "kB", "B", "x"}


def pages_with(name: str | None = None) -> Iterable[tuple[Path, re.Match[str]]]:
    """Each place that shows this output, or any."""
    for page in sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").rglob("*.md")]):
        for place in PLACE.finditer(page.read_text(encoding="utf-8")):
            if name in (None, place["name"]):
                yield page, place


def differing(name: str) -> list[str]:
    """The pages that show something else than the command prints now; prints what that is, where there are any."""
    output = OUTPUTS[name]
    printed = run(output)
    expected = compared(printed, output)
    found = [
        page.relative_to(ROOT).as_posix()
        for page, place in pages_with(name)
        if compared(place["text"], output) != expected
    ]
    if found:
        print(printed)
    return found


def write(name: str, text: str) -> None:
    """Put an output into all pages that show it."""

    def filled(place: re.Match[str]) -> str:
        return place[1] + text + place[4] if place["name"] == name else place[0]

    for page in {page for page, _ in pages_with(name)}:
        old = page.read_text(encoding="utf-8")
        page.write_text(PLACE.sub(filled, old), encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {name}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="outputs to write or compare; default: all"
    )
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    names = options.names or list(OUTPUTS)
    if unknown := set(names) - set(OUTPUTS):
        parser.error(
            f"expected some of {', '.join(OUTPUTS)}, got {', '.join(sorted(unknown))}"
        )
    if options.check:
        found = [f"{page}: {name}" for name in names for page in differing(name)]
        print("\n".join(found) or "all pages are up to date")
        return 1 if found else 0
    for name in names:
        write(name, run(OUTPUTS[name]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
