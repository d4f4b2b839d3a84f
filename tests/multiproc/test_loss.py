"""Cross-entropy over a vocabulary that is divided among the ranks of a tensor-parallel group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.loss import FusedCrossEntropy

NUM_ROWS, NUM_CLASSES = 21, 24
ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-8, torch.float32: 2e-6}


def equals_the_whole_vocabulary(dtype: torch.dtype, options: dict[str, Any], extreme: bool) -> float:  # BC-75
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(NUM_ROWS, NUM_CLASSES, generator=generator) * 3).to(dtype)
    target = torch.randint(0, NUM_CLASSES, (NUM_ROWS,), generator=generator)
    target[::4] = options.get("ignore_index", -100)
    if extreme:
        logits[1, 12:] = -torch.inf  # the last ranks hold nothing but -inf in this row
        target[1] = 3
        logits[2] = -6e4
        logits[3, :6] = 6e4
        logits[5] = 1.0
        logits[6, 12:] = -torch.inf  # and the others hold logits whose exponentials underflow
        logits[6, :12] -= 200
        target[6] = 3
    j, tp = bmt.config["tp_rank"], bmt.config["tp_size"]
    columns = slice(j * NUM_CLASSES // tp, (j + 1) * NUM_CLASSES // tp)
    part = logits[:, columns].contiguous().requires_grad_()
    whole = logits.float().requires_grad_()
    ours = FusedCrossEntropy(parallel=True, **options)(part, target.int())
    theirs = torch.nn.functional.cross_entropy(whole, target, **options)
    torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-7)
    direction = torch.linspace(1, 2, ours.numel()).reshape(ours.shape) * 64
    (ours * direction).sum().backward()
    (theirs * direction).sum().backward()
    expected = whole.grad[:, columns]
    torch.testing.assert_close(
        part.grad.float(),
        expected,
        rtol=ROUNDING[dtype],
        atol=2e-6 * float(whole.grad.abs().max()),
        equal_nan=True,
    )
    assert not part.grad[target == options.get("ignore_index", -100)].any()
    return ours.sum().item()


OPTIONS = [
    {},
    {"reduction": "sum", "ignore_index": 5},
    {"reduction": "none", "weight": torch.linspace(0.1, 2, NUM_CLASSES)},
    {"weight": torch.linspace(0.1, 2, NUM_CLASSES), "label_smoothing": 0.2},
    {"label_smoothing": 0.1},
]


def all_options(dtype: torch.dtype) -> list[float]:
    return [
        equals_the_whole_vocabulary(dtype, options, extreme)
        for options in OPTIONS
        for extreme in (False, True)
        if not (extreme and options.get("label_smoothing"))  # infinite in torch too
    ]


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equals_the_whole_vocabulary(world: int, tp: int, dtype: torch.dtype) -> None:
    losses = run_ranks(world, all_options, dtype, init={"tp_size": tp})
    assert all(of_rank == losses[0] for of_rank in losses)


def messages() -> dict[str, int]:
    comm = bmt.config["tp_comm"]
    comm.reset_traffic()
    logits = torch.randn(8, 6, requires_grad=True)
    FusedCrossEntropy(parallel=True)(logits, torch.arange(8)).backward()
    return {name: count for name, (count, _) in comm.traffic().items() if count}


def test_one_maximum_and_one_sum() -> None:
    assert run_ranks(2, messages, init={"tp_size": 2}) == [{"all_reduce": 2}] * 2


def bad_targets_and_weights() -> None:
    logits = torch.randn(4, 6)
    target = torch.arange(4)
    target[2] = 12
    with pytest.raises(IndexError, match=r"target 12 in row 2 is out of range: expected \[0, 12\)"):
        FusedCrossEntropy(parallel=True)(logits, target)
    with pytest.raises(ValueError, match="each of the 12 classes, got 6"):
        FusedCrossEntropy(torch.ones(6), parallel=True)(logits, torch.arange(4))


def test_bad_targets_and_weights() -> None:
    run_ranks(2, bad_targets_and_weights, init={"tp_size": 2})
