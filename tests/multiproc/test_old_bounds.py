"""Files of three ranks from before the shards of blocks were aligned to 128 bytes.

They were written by the program in `train`, with the code of then: bounds of the Block's shards were multiples of 214
elements, and are of 224 now.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.distributed import checkpoint
from bmtrain.distributed.checkpoint.layout import MANIFEST, read_manifest

FILES = Path(__file__).parents[1] / "files" / "before_alignment"


def untrained() -> tuple[torch.nn.ModuleList, bmt.optim.OptimManager]:
    net = torch.nn.ModuleList([bmt.Block(bmt.nn.Linear(37, 11)), bmt.nn.Linear(5, 7)])
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(net[0].parameters(), lr=0.1))
    manager.add_optimizer(torch.optim.AdamW(net.parameters(), lr=0.1))
    return net, manager


def train(net: torch.nn.ModuleList, manager: bmt.optim.OptimManager) -> None:
    for k in range(2):
        manager.zero_grad(set_to_none=True)
        loss = net[0](torch.ones(2, 37) * (k + 1)).square().sum() + net[1](torch.ones(2, 5)).sum()
        manager.backward(loss)
        manager.step()


def expected() -> dict[str, Any]:
    values: dict[str, Any] = torch.load(FILES / "whole.pt")
    return values


def assert_weights(net: torch.nn.Module) -> None:
    for name, p in net.named_parameters():
        assert p.gather().equal(expected()["model"][name]), name


def assert_states(manager: bmt.optim.OptimManager) -> None:
    whole = manager.state_dict(gather_opt=True)
    for now, then in zip(whole["optimizers"], expected()["optimizers"]["optimizers"], strict=True):
        assert now["state"].keys() == then["state"].keys()
        for number, entry in then["state"].items():
            for key, value in entry.items():
                assert torch.as_tensor(now["state"][number][key]).equal(torch.as_tensor(value)), (number, key)


def loads_state_of_each_rank() -> None:
    net, manager = untrained()
    assert net[0]._storages[0].shards.layout.partition == 224
    manager.load_state_dict(torch.load(FILES / f"optimizers-{bmt.rank()}.pt"))
    assert_states(manager)
    manager.load_state_dict(manager.state_dict())  # of today
    assert_states(manager)


def loads_the_checkpoint() -> None:
    net, manager = untrained()
    checkpoint.load(FILES / "checkpoint", net, manager)
    assert_weights(net)
    assert_states(manager)


def loads_pickles() -> None:
    net = pickle.loads((FILES / f"model-{bmt.rank()}.pkl").read_bytes())
    assert net[0]._storages[0].shards.layout.partition == 224
    assert_weights(net)
    again = pickle.loads(pickle.dumps(net))
    assert_weights(again)


def a_parameter_alone() -> None:
    net = pickle.loads((FILES / f"model-{bmt.rank()}.pkl").read_bytes())
    weight = pickle.loads(pickle.dumps(net[0]._module.weight))  # bounds of today, in no Block
    assert weight.gather().equal(expected()["model"]["0.weight"])


@pytest.mark.parametrize(
    "loads", [loads_state_of_each_rank, loads_the_checkpoint, loads_pickles, a_parameter_alone]
)
def test_files_from_before_alignment_load_with_the_same_bits(loads: Any) -> None:
    run_ranks(3, loads)


def state_of_another_shape(folder: str) -> None:
    """An optimizer's own tensors, in a checkpoint without the mark of today's bounds."""
    net, manager = untrained()
    train(net, manager)
    adam = manager.optimizers[1]
    for p in net.parameters():
        adam.state[p]["odd"] = torch.full((2, 3), float(bmt.rank()))
    checkpoint.save(folder, 1, net, manager)
    checkpoint.load(folder, net, manager)
    step = Path(folder, "step-0000001")
    if bmt.rank() == 0:
        manifest = read_manifest(step)
        for entry in manifest.values["optimizers"][1]["entries"].values():
            del entry["odd"]["slice_bytes"]
        (step / MANIFEST).write_bytes(manifest.to_bytes())
    bmt.synchronize()
    if bmt.world_size() == 1:  # whose bounds are the same
        checkpoint.load(folder, net, manager)
        return
    with pytest.raises(ValueError, match="parameter 0: odd is not sharded like its parameter"):
        checkpoint.load(folder, net, manager)


@pytest.mark.parametrize("world", [1, 3])
def test_state_that_cannot_be_moved_is_refused(world: int, tmp_path: Path) -> None:
    run_ranks(world, state_of_another_shape, str(tmp_path))
