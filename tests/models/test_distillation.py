"""A student taught by two models: one taken out of its Blocks and resident, one in its Blocks under no_grad.

The student and the matrix that maps its hidden states to the teacher's have an optimizer each.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from harness.llama import Llama
from harness.parity import (
    Batch,
    Run,
    assert_same_training,
    saved,
    token_batches,
    train_plain,
    train_sharded,
)

import bmtrain as bmt

STUDENT = {"dim": 8, "num_layers": 2, "num_heads": 2}


class Pupil(torch.nn.Module):
    """What is trained; the teachers are not among its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Llama(**STUDENT)
        self.bridge = torch.nn.Linear(8, 16, bias=False)
        self.teachers: list[torch.nn.Module] = []

    def teach(self, *teachers: torch.nn.Module) -> Pupil:
        self.__dict__["teachers"] = list(teachers)
        return self


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    ids = batch[0][:, :-1]
    resident, blocked = model.teachers
    with torch.no_grad():
        soft = (resident(ids) / 2).softmax(-1)
        hidden = blocked.hidden(ids)
    student_hidden = model.student.hidden(ids)
    logits = model.student.head(student_hidden)
    hard = F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
    imitation = F.kl_div(
        (logits / 2).log_softmax(-1).flatten(0, 1), soft.flatten(0, 1), reduction="batchmean"
    )
    return hard + 4 * imitation + 0.1 * F.mse_loss(model.bridge(student_hidden), hidden)


def batches() -> list[Batch]:
    return token_batches(43, 8, 9)


def un_blocked(model: torch.nn.Module) -> torch.nn.Module:
    """Gives every Block's parameters their full data and takes the modules out, so that nothing is gathered."""
    full = model.state_dict()
    for name, p in model.layers.named_parameters(prefix="layers"):
        p.data = full[name]
    model.layers = torch.nn.ModuleList([block._module for block in model.layers])
    return model


def optimizers_of(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    adam = bmt.optim.AdamOptimizer if bmt.init.is_initialized() else torch.optim.Adam
    return [
        adam(model.student.parameters(), lr=3e-3),
        torch.optim.SGD(model.bridge.parameters(), lr=0.05, momentum=0.9),
    ]


def sharded(paths: list[str]) -> Run:
    pupil = bmt.BMTrainModelWrapper(Pupil())
    bmt.load(pupil, paths[0])
    teachers = [bmt.BMTrainModelWrapper(Llama()) for _ in range(2)]
    for teacher, path in zip(teachers, paths[1:], strict=True):
        bmt.load(teacher, path)
        teacher.requires_grad_(False)
    with torch.no_grad():
        before = [teacher(batches()[0][0]) for teacher in teachers]
        resident = un_blocked(teachers[0])
        assert not any(isinstance(layer, bmt.Block) and type(layer) is bmt.Block for layer in resident.layers)
        assert torch.equal(resident(batches()[0][0]), before[0])
    run = train_sharded(pupil.teach(resident, teachers[1]), loss_of, batches(), optimizers=optimizers_of)
    with torch.no_grad():
        for teacher, outputs in zip(teachers, before, strict=True):
            assert torch.equal(teacher(batches()[0][0]), outputs)
    assert all(p.grad is None for teacher in teachers for p in teacher.parameters())
    return run


def plain(paths: list[str], parts: int) -> Run:
    pupil = Pupil()
    teachers = [Llama(), Llama()]
    for model, path in zip([pupil, *teachers], paths, strict=True):
        model.load_state_dict(torch.load(path))
    return train_plain(pupil.teach(*teachers), loss_of, batches(), parts, optimizers=optimizers_of)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bc_36_two_teachers_and_two_optimizers(world: int, tmp_path: Path) -> None:
    torch.manual_seed(7)
    models = [Pupil(), Llama(), Llama()]
    paths = [saved(model, tmp_path / f"{index}.pt") for index, model in enumerate(models)]
    ours = run_ranks(world, sharded, paths)
    assert_same_training(ours, plain(paths, 1), plain(paths, world))
