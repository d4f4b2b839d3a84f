"""Every documented name is there, the same object under each of its paths; broken ones are told."""

from __future__ import annotations

import sys

import pytest
import torch
from harness import run_process, run_ranks

import bmtrain
from bmtrain.__main__ import main
from bmtrain._tools import doctor


def test_every_documented_name_resolves() -> None:
    output = run_process([sys.executable, "-m", "bmtrain", "doctor", "--api"]).stdout
    assert "PROBLEM" not in output
    assert "class bmtrain.block_layer.Block" in output
    assert output.splitlines()[-1].endswith(" names, 0 with problems")


def test_problems_fail_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "API", {"init.no_such_name": "", "save": "store.load", "load": "store.load"})
    assert main(["doctor", "--api"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "PROBLEM" in line]
    assert [line.split()[0] for line in lines] == ["bmtrain.init.no_such_name", "bmtrain.store.load"]
    assert "not the object that save is" in lines[1]


def test_imports_of_old_programs() -> None:
    from bmtrain.synchronize import gather_result, sum_loss, synchronize, wait_loader

    assert bmtrain.synchronize is synchronize
    assert (bmtrain.gather_result, bmtrain.sum_loss, bmtrain.wait_loader) == (
        gather_result,
        sum_loss,
        wait_loader,
    )


def parameters_in_a_context() -> None:
    linear = bmtrain.nn.Linear(3, 5)
    bmtrain.init_parameters(linear)
    full = linear.weight.detach().clone()
    block = bmtrain.Block(linear)
    x = torch.randn(2, 3)
    outside = block(x).detach()
    with bmtrain.block_layer.CheckpointBlockContext(block):
        assert torch.equal(block.weight, full)
        assert torch.equal(block(x), outside)
        with pytest.raises(RuntimeError, match="do not nest"):
            bmtrain.zero_context.ZeroContext(block).__enter__()
    assert block.weight.dim() == 1
    block(x).sum().backward()
    assert block.weight.grad.shape == block.weight.shape


@pytest.mark.parametrize("world", [1, 2])
def test_zero_context(world: int) -> None:
    run_ranks(world, parameters_in_a_context)
