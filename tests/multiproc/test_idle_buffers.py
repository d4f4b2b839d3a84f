"""Buffers between their uses: how many stay, and that they go where memory runs out."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from harness import run_process, run_ranks

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain.global_var import context

WIDTHS = [40 * k for k in range(1, 13)]


def idle_beside_many_sizes() -> tuple[int, int]:
    """Idle bytes after steps of twelve blocks of different sizes, and bytes of the largest block."""
    gc.collect()
    pool = current_engine(context()).pool
    pool.trim()
    blocks = [bmt.Block(bmt.nn.Linear(128, width)) for width in WIDTHS]
    for _ in range(2):
        sum(block(torch.ones(2, 128)).sum() for block in blocks).backward()  # type: ignore[union-attr]
    layout = blocks[-1]._storages[0].shards.layout
    return pool.stats()["bytes_idle"], 4 * layout.partition * layout.num_ranks


def test_idle_buffers_of_many_sizes_are_about_two_of_the_largest() -> None:
    for idle, largest in run_ranks(2, idle_beside_many_sizes):
        assert 0 < idle <= 2.2 * largest


NO_MEMORY = """
import resource, sys, torch, bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain.global_var import context
torch.set_num_threads(1)
bmt.init_distributed()
policy = bmt.BlockPolicy(compute_dtype=torch.bfloat16)
first, second = (bmt.Block(bmt.nn.Linear(2048, width, bias=False), policy=policy) for width in (8192, 8200))
x = torch.ones(1, 2048)
with torch.no_grad():
    first(x), second(x[:, :0].new_ones(1, 2048))
    current_engine(context()).pool.trim()
    first(x)
    idle = current_engine(context()).pool.stats()["bytes_idle"]
    assert idle >= 2**25, idle
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**22, resource.getrlimit(resource.RLIMIT_AS)[1]))
    second(x)
print("ran", current_engine(context()).pool.stats()["bytes_idle"] < 1.5 * idle)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_idle_buffers_go_where_memory_runs_out(tmp_path: Path) -> None:
    script = tmp_path / "no_memory.py"
    script.write_text(NO_MEMORY)
    assert "ran True" in run_process([sys.executable, str(script)]).stdout
