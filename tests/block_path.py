"""Files of one Block's forward and backward, held by ceilings: in Python measured by profiling a step, in C++ listed.

    python tests/block_path.py

Prints the files that a recomputed Block of one module executes, in the order of first use, with their lines. Exit
status 1 if a ceiling is exceeded. The page docs/explanation/architecture.md describes the files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import bmtrain

ROOT = Path(bmtrain.__file__).resolve().parents[1]
#: Ceilings. A commit that raises one gives the reason in its message.
FILES, LINES = 14, 3000
#: Files of the core before a transport, by folder; features that no plain call uses are left out (shards in memory of
#: the host, data and memory that come from elsewhere, other ways of a reduction, virtual shards, dropped gradients),
#: and the layout, which is computed when a Block is built. The ceilings hold the files of a call on GPUs; a call on
#: the CPU executes two features more (products in place, sums ahead of their time), whose files are printed by
#: themselves.
CORE = ("csrc/shard/*", "csrc/comm/communicator.*")
FEATURES = ("flat_layout", "host_lane", "new_memory", "reduction_ways", "tree_sum")
ONLY_ON_CPU = ("products", "sum_ahead")
CORE_FILES, CORE_LINES = 14, 2191
#: Steps in which the order of calls is learnt, before the one that is measured.
LEARNING_STEPS = 2


class Layer(bmtrain.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmtrain.DistributedParameter(torch.full((4, 4), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


def executed_files() -> list[Path]:
    """Returns the files of bmtrain that the third forward and backward of a list of Blocks execute; needs one rank."""
    layers = bmtrain.TransformerBlockList([bmtrain.Block(Layer()) for _ in range(3)])
    x = torch.ones(2, 4)
    for _ in range(LEARNING_STEPS):
        layers(x).sum().backward()
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.setdefault(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        layers(x).sum().backward()
    finally:
        sys.setprofile(None)
    package = ROOT / "bmtrain"
    return [Path(name) for name in found if package in Path(name).parents]


def is_within(files: list[Path], most_files: int, most_lines: int) -> bool:
    """Prints the files, and returns whether they are at most ``most_files`` with ``most_lines`` together."""
    total = 0
    for path in files:
        lines = path.read_bytes().count(b"\n")
        total += lines
        print(f"{lines:>6}  {path.relative_to(ROOT)}")
    print(f"{len(files)} files (ceiling: {most_files}), {total} lines (ceiling: {most_lines})")
    return len(files) <= most_files and total <= most_lines


def main() -> int:
    bmtrain.init_distributed()
    found = [path for pattern in CORE for path in sorted(ROOT.glob(pattern))]
    core = [path for path in found if path.stem not in FEATURES + ONLY_ON_CPU]
    on_cpu = [path for path in found if path.stem in ONLY_ON_CPU]
    are_within = [is_within(executed_files(), FILES, LINES), is_within(core, CORE_FILES, CORE_LINES)]
    names = ", ".join(str(path.relative_to(ROOT)) for path in on_cpu)
    lines = sum(path.read_bytes().count(b"\n") for path in core + on_cpu)
    print(f"on CPU ranks {len(core + on_cpu)} files with {lines} lines: also {names}")
    if not all(are_within):
        print(
            "error: remove code from the path of a Block, or give the reason for a higher ceiling",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
