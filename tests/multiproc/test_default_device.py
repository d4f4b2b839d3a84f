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
