"""The benchmark of offload on GPUs runs over the fake device; what a GPU makes of it is no matter of a test."""

from __future__ import annotations

import ctypes
import json

import pytest
import torch

from bmtrain.benchmark import _offload_gpu
from bmtrain.benchmark._offload_bound import Rates, Unit, least_seconds
from bmtrain.benchmark._offload_gpu import Shape, measure_offload, print_offload

SHAPE = Shape(layers=2, dim=16, heads=2, seq=8, tokens=(16, 32), repeat=2, vocab=64)


def test_measures_and_reports(staged: ctypes.CDLL, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(json.dumps(measure_offload(SHAPE)))
    assert found["same bits"] is True
    assert min(found["rates"].values()) > 0
    rows = {(row["tokens"], row["variant"]): row for row in found["results"] if "tokens" in row}
    ours = ["fraction 0", "chosen fraction", "inside step", "on the device"]
    assert list(rows) == [(tokens, name) for name in ours for tokens in (32, 16)]
    for row in rows.values():
        assert row["ms"] > 0
        assert row["bound ms"] >= row["forward ms"] + row["backward ms"] - 1e-9
        assert row["of bound"] == pytest.approx(row["ms"] / row["bound ms"])
        assert len(row["losses"]) == 4
    # Nothing of the update is on the host there.
    twin = rows[16, "on the device"]
    assert twin["bound ms"] == pytest.approx(twin["forward ms"] + twin["backward ms"])
    assert rows[16, "fraction 0"]["bound ms"] > twin["bound ms"]
    print_offload(found)
    printed = capsys.readouterr().out
    assert "32 chosen fraction" in printed
    assert "the same, bit for bit" in printed


def test_a_variant_that_does_not_fit_leaves_the_others(
    staged: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = _offload_gpu._Training.step

    def failing(self: _offload_gpu._Training, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 4 and type(self.optimizer).__name__ == "AdamOptimizer":
            raise torch.OutOfMemoryError("no memory")
        return step(self, batch)

    monkeypatch.setattr(_offload_gpu._Training, "step", failing)
    rows = measure_offload(SHAPE)["results"]
    errors = [(row["tokens"], row["variant"]) for row in rows if "error" in row and "tokens" in row]
    assert errors == [(32, "on the device")]


def test_the_bound_waits_for_what_is_slowest() -> None:
    units = [Unit(0, 0.0), *[Unit(10, 0.25)] * 4]
    fast = Rates(1e9, 1e9, 1e12)
    assert least_seconds(units, 2, 4, fast) == pytest.approx(6)
    # 40 parameters of 28 bytes at 140 bytes a second: 8 s after the backward, then the last block's forward.
    assert least_seconds(units, 2, 4, Rates(1e9, 1e9, 140)) == pytest.approx(4 + 8 + 0.5)
    # 20 bytes a block at 5 bytes a second: each block's gradients take 4 s, the last ones 16 s after the first start.
    assert least_seconds(units, 2, 4, Rates(5, 1e9, 1e12)) == pytest.approx(1 + 16 + 4 * 0.5)
    assert least_seconds(units, 2, 4, Rates(1e9, 5, 1e12)) == pytest.approx(4 + 16 + 0.5)


def test_steps_have_whole_sequences() -> None:
    with pytest.raises(ValueError, match="tokens: expected multiples of the sequence length 8, got 12"):
        _offload_gpu._batches(SHAPE, 12, torch.device("cpu"))
