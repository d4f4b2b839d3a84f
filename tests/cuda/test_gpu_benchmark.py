"""``bench gpu`` and ``doctor --gpus``: that neither breaks on its own code at its first run on a GPU.

The whole of ``bench gpu`` runs here with the CPU in the place of the card; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bmtrain._ranks import context as _context
from bmtrain._tools.checkup import gpus
from bmtrain.benchmark import gpu
from bmtrain.cpu_run import Redirection

SMALL = (
    "--exponent 10 --rows 8 --vocab 64 --layers 2 --dim 16 --heads 2 --seq 8 --batch 2 --tokens 16 --repeat 3"
)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu, "_GIB", 1 << 10)
    monkeypatch.setattr(gpu, "_VOCAB", 64)
    monkeypatch.setattr(gpu, "_require_card", lambda: None)
    with Redirection():
        yield
    _context.uninstall()
    if dist.is_initialized():
        dist.destroy_process_group()


def arguments(*more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    return parser.parse_args([*SMALL.split(), *more])


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/cuda/run.sh runs it on the GPU")
def test_every_part_of_the_benchmark_runs_and_reports(
    card: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bench.json"
    gpu.run(arguments("--json", str(file)))
    found: dict[str, Any] = json.loads(file.read_text())
    assert [part for part in found.values() if isinstance(part, dict) and "error" in part] == []
    assert list(found) == [
        "card",
        "copy GB/s",
        "adam",
        "norm",
        "cross-entropy",
        "step",
        "policies",
        "tiers",
        "offload",
    ]
    assert found["adam"]["of copy"] > 0 and found["step"]["bmtrain / fsdp2"] > 0
    printed = capsys.readouterr().out
    for name in ("times as fast as torch", "in place, ms", "bmtrain-3, peak GiB", "chosen fraction"):
        assert name in printed


def test_a_part_that_fails_is_named_and_leaves_the_others(
    card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        raise ValueError  # without a word

    def out_of_order() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setattr(gpu, "measure_adam", broken)
    monkeypatch.setattr(torch.cuda, "empty_cache", out_of_order)
    file = tmp_path / "bench.json"
    with pytest.raises(SystemExit) as failed:
        gpu.run(arguments("--parts", "adam,norm", "--json", str(file)))
    assert failed.value.code == 1
    found = json.loads(file.read_text())
    assert found["adam"] == {"error": "ValueError: "}
    assert found["norm"] == {"error": "RuntimeError: CUDA error: an illegal memory access was encountered"}


def test_the_proof_reports_what_failed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """... although after an error of the device nothing works that the report itself would use."""

    def broken(context: Any) -> str:
        monkeypatch.setattr(torch, "tensor", broken)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpus, "_kernels", broken)
    try:
        checks = list(gpus.prove(10.0))
    finally:
        _context.uninstall()
    assert [check.name for check in checks if check.is_problem] == ["kernels"]
    assert "illegal memory access" in checks[-1].found
