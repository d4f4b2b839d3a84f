"""What a script sets with ``torch.set_default_device`` is for its tensors: the library's are where they have to be."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from harness.checkpoint_run import Run, differences, state_of

import bmtrain as bmt


def everything(
    folder: str, optimizer: str, dtype: str, device: str | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    run = Run(optimizer, dtype)
    file = str(Path(folder) / "model.pt")
    with nullcontext() if device is None else torch.device(device):
        losses = run.train(3)
        run.manager.clip_grad_norm(run.optimizer.param_groups, 1.0)
        run.save(folder)
        run.train(1)
        run.load(folder)
        bmt.save(run.model, file)
        bmt.load(run.model, file)
        run.manager.load_state_dict(run.manager.state_dict(gather_opt=True))
        run.model.load_state_dict(run.model.state_dict())
        losses += run.train(2)
    return losses, state_of(run)


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [("adam", "float16"), ("offload", "bfloat16"), ("adam", "float32"), ("torch", "float32")],
)
def test_a_default_device_changes_nothing(optimizer: str, dtype: str, tmp_path: Path) -> None:
    results = []
    for device in (None, "meta"):  # a tensor there has no values, so that one which should have them is found
        folder = tmp_path / str(device)
        folder.mkdir()
        results.append(run_ranks(2, everything, str(folder), optimizer, dtype, device)[0])
    (losses, state), (other_losses, other_state) = results
    assert losses == other_losses
    assert differences(state, other_state) == []


FOUND: list[
    str
] = []  # global, as one that the module refers to would be after the second run what it was before


class Notes(bmt.DistributedModule):
    """Notes where the tensors go that its forwards make."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = bmt.nn.Linear(4, 4)

    def forward(self, x):
        FOUND.append(torch.empty(1).device.type)
        return self.linear(x)


def devices_of_two_runs(first: str | None, second: str | None) -> list[str]:
    FOUND.clear()
    block = bmt.Block(Notes())
    with nullcontext() if first is None else torch.device(first):
        loss = block(torch.ones(4, device="cpu")).sum()
    with nullcontext() if second is None else torch.device(second):
        loss.backward()
        after = torch.empty(1).device.type
    assert after == (second or "cpu")
    return FOUND


@pytest.mark.parametrize("recompute_on", [None, "cpu", "meta"])
@pytest.mark.parametrize("device", [None, "meta"])
def test_a_forward_runs_again_under_the_device_of_its_first_run(
    device: str | None, recompute_on: str | None
) -> None:
    assert run_ranks(1, devices_of_two_runs, device, recompute_on) == [[device or "cpu"] * 2]
