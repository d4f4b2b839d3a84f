"""How a process over NCCL ends, and what it refuses after a failure."""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_process
from harness.fake_nccl import ROOT

import bmtrain as bmt
from bmtrain._ranks import orderly_end
from bmtrain.errors import CommunicationError
from bmtrain.global_var import context

SCRIPT = """
import atexit, ctypes, sys
from harness.fake_nccl import install_one_of_two
from bmtrain import _C
from bmtrain._ranks import orderly_end

fake = ctypes.CDLL(sys.argv[1])
_C.install_device_runtime(sys.argv[1])
install_one_of_two()
fake.fake_mirror(1)
atexit.register(lambda: print("destroyed", fake.fake_calls(b"CommDestroy"), "open", fake.fake_open()))
orderly_end.register()
if sys.argv[2]:
    raise getattr(__builtins__, sys.argv[2])
"""


@pytest.mark.parametrize("error", ["", "ValueError", "KeyboardInterrupt", "SystemExit"])
def test_a_process_ends_its_communicators(fake_path: Path, error: str) -> None:
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "BMTRAIN_NCCL_LIBRARY": str(fake_path)}
    command = [sys.executable, "-c", SCRIPT, str(fake_path), error]
    done = run_process(command, environment=environment, timeout=100, check=False)
    assert "destroyed 2 open 0" in done.stdout, done.stdout


def test_what_is_under_way_is_over_first(one_of_two: ctypes.CDLL) -> None:
    one_of_two.fake_stuck(1, 0)
    work = context().world.comm.all_reduce(torch.ones(1), bmt._C.ReduceOp.SUM)
    with ThreadPoolExecutor(1) as pool:
        ending = pool.submit(orderly_end.end_in_order)
        with pytest.raises(TimeoutError):
            ending.result(0.5)
        assert one_of_two.fake_calls(b"CommFinalize") == 0
        one_of_two.fake_stuck(0, 0)
        ending.result(60)
    work.wait()
    assert one_of_two.fake_calls(b"CommDestroy") == 2
    assert one_of_two.fake_aborted() == 0


def test_what_never_ends_has_a_limit(one_of_two: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orderly_end, "_HASTY_SECONDS", 0.2)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)  # an exception has ended the program
    one_of_two.fake_stuck(1, 0)
    context().world.comm.all_reduce(torch.ones(1), bmt._C.ReduceOp.SUM)
    orderly_end.end_in_order()
    assert one_of_two.fake_calls(b"CommDestroy") == 1  # the other one


def reads(
    model: torch.nn.Module, manager: bmt.optim.OptimManager, folder: Path
) -> dict[str, Callable[[], Any]]:
    return {
        "model": model.state_dict,
        "optimizer": manager.optimizers[0].state_dict,
        "manager": manager.state_dict,
        "save": lambda: bmt.save(model, folder / "model.pt"),
        "weights": lambda: bmt.weights.save(model, folder / "model.safetensors"),
        "checkpoint": lambda: bmt.distributed.checkpoint.save(folder, 1, model, manager),
        "pickle": lambda: pickle.dumps(next(model.parameters())),  # as torch.save does
    }


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("what", ["model", "optimizer", "manager", "save", "weights", "checkpoint", "pickle"])
def test_values_behind_a_failure_are_refused(
    one_of_two: ctypes.CDLL, tmp_path: Path, level: int, what: str
) -> None:
    block = bmt.Block(bmt.nn.Linear(4, 4), policy=bmt.BlockPolicy(level=level))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(block.parameters()))
    manager.backward(block(torch.ones(2, 4)).sum())
    manager.step()
    if what in ("optimizer", "manager"):
        reads(block, manager, tmp_path)[what]()
    one_of_two.fake_async_error(6)  # NCCL learns that a rank has gone; nobody has asked it yet
    with pytest.raises(CommunicationError):
        reads(block, manager, tmp_path)[what]()
    assert list(tmp_path.glob("*")) == []
    if what in ("optimizer", "manager"):
        with pytest.raises(
            CommunicationError,
            match=r"state_dict\(\): not possible after a failure.*last checkpoint.*remote process",
        ):
            reads(block, manager, tmp_path)[what]()
