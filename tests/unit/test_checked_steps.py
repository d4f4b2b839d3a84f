"""Steps by pieces: the bits of plain steps, the sums of what they read and write, and a record to complete them."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from bmtrain._C import StepCheck, StepJournal, copy_and_sum, step_of_groups, word_sums
from bmtrain._ops import scale_

SIZES = (1, 2048, 5003)
COMMON: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "scale": 1.0, "maximize": False}
ADAM = {
    **COMMON,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "decoupled": True,
    "folded": False,
    "hold_steps": 0,
}
SGD = {**COMMON, "momentum": 0.9, "dampening": 0.0, "nesterov": False}
LION = {**COMMON, "beta1": 0.9, "beta2": 0.99}
FACTORS = [[], [0.37], [0.5, 1 / 3]]


def shared_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that forked processes share."""
    memory = mmap.mmap(-1, tensor.nbytes)
    return torch.frombuffer(memory, dtype=tensor.dtype).copy_(tensor)


class Lists:
    """Parallel lists of tensors, the same each time; ``dtype`` is that of gradients and rounded weights."""

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype,
        sizes: Sequence[int] = SIZES,
        place: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone,
    ) -> None:
        generator = torch.Generator().manual_seed(1)

        def draw() -> list[torch.Tensor]:
            return [torch.randn(size, generator=generator) for size in sizes]

        self.kind, self.weights = kind, draw()
        self.rounded = [] if dtype is torch.float32 else [w.to(dtype) for w in self.weights]
        self.grads = [grad.to(dtype) for grad in draw()]
        self.state = [draw(), [x.square() for x in draw()]] if kind == "adam" else [draw()]
        self.weights, self.rounded = list(map(place, self.weights)), list(map(place, self.rounded))
        self.state = [list(map(place, arrays)) for arrays in self.state]

    def step(self, check: StepCheck | None = None, number: int = 3) -> None:
        count = len(self.weights)
        lists, sizes = (self.weights, self.rounded, self.grads, *self.state), [1] * count
        if self.kind == "adam":
            is_fp32 = not self.rounded
            step_of_groups(
                "adam", [*lists, [number] * count], sizes, [ADAM] * count, as_torch=is_fp32, check=check
            )
        elif self.kind == "sgd":
            step_of_groups("sgd", [*lists, [False] * count], sizes, [SGD] * count, check=check)
        else:
            step_of_groups("lion", lists, sizes, [LION] * count, check=check)

    def arrays(self) -> list[torch.Tensor]:
        """The arrays of each tensor in turn, the gradient last."""
        rounded = [self.rounded] if self.rounded else []
        lists = [self.weights, *rounded, *self.state, self.grads]
        return [array for arrays in zip(*lists, strict=True) for array in arrays]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adam", "sgd", "lion"])
def test_bits_and_sums(kind, dtype):
    plain, checked = Lists(kind, dtype), Lists(kind, dtype)
    before = word_sums(checked.arrays())
    for grad, factors in zip(plain.grads, FACTORS, strict=True):
        for factor in factors:
            scale_([grad], torch.tensor(factor, dtype=torch.float64))
    plain.step()
    check = StepCheck(FACTORS)
    checked.step(check)
    for one, other in zip(plain.arrays(), checked.arrays(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert check.before == before
    num_arrays = len(before) // len(SIZES)
    after = word_sums(checked.arrays())
    after[num_arrays - 1 :: num_arrays] = [0] * len(SIZES)  # none of the gradient
    assert check.after == after


@pytest.mark.parametrize("factors", [[], [[], []]])
def test_factors_for_other_tensors_raise(factors):
    with pytest.raises(ValueError, match="checked step: expected factors for each of 3 tensors"):
        Lists("lion", torch.float32).step(StepCheck(factors))


@pytest.mark.parametrize(("formula", "number"), [("adam", 6), ("sgd", 5), ("lion", 4)])
def test_a_wrong_number_of_lists_raises(formula, number):
    with pytest.raises(ValueError, match=f"lists: expected {number} for {formula}, got 3"):
        step_of_groups(formula, [[], [], []], [], [])


@pytest.mark.parametrize("sizes", [[3, 1], [1, 1], [-1, 4]])
@pytest.mark.parametrize(("kind", "options"), [("adam", ADAM), ("sgd", SGD), ("lion", LION)])
def test_groups_that_do_not_have_all_tensors_raise(kind, options, sizes):
    of = Lists(kind, torch.float32)
    rest = {"adam": [[1] * len(SIZES)], "sgd": [[False] * len(SIZES)], "lion": []}[kind]
    with pytest.raises(ValueError, match=f"{kind}: sizes: expected"):
        step_of_groups(kind, [of.weights, of.rounded, of.grads, *of.state, *rest], sizes, [options] * 2)


@pytest.mark.parametrize("size", [0, 3, 100_001])
def test_a_copy_and_its_sum(size):
    tensor = torch.randn(size).to(torch.bfloat16)
    place = torch.zeros_like(tensor)
    assert copy_and_sum([place], [tensor]) == word_sums([tensor])
    assert torch.equal(place, tensor)
    with pytest.raises(ValueError, match="copy_and_sum: expected contiguous CPU tensors of one size"):
        copy_and_sum([place], [torch.zeros(size + 1)])


@pytest.mark.parametrize("kind", ["adam", "sgd", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_a_dead_process_left_is_completed(kind, dtype):
    """The process is killed at a random moment of steps without an end."""
    sizes = (5003, 40000, 1)
    counts = [StepJournal.num_pieces_of(size) for size in sizes]
    first_pieces = [sum(counts[:k]) for k in range(len(counts))]
    expected, done = Lists(kind, dtype, sizes), 0
    left = Lists(kind, dtype, sizes, shared_tensor)
    memory = shared_tensor(torch.zeros(StepJournal.nbytes(sum(counts)), dtype=torch.uint8))
    for _ in range(4):
        # The child computes with one thread: those of the pool are not there after a fork.
        child = os.fork()
        if child == 0:
            journal = StepJournal(memory, sum(counts))
            for step in range(done + 1, 1 << 30):
                journal.start(step)
                left.step(StepCheck([[]] * len(sizes), journal, first_pieces), number=step)
        while memory.view(torch.int64)[0] <= done:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        journal = StepJournal(memory, sum(counts))
        number = journal.step
        left.step(StepCheck([[]] * len(sizes), journal, first_pieces), number=number)
        for step in range(done + 1, number + 1):
            expected.step(number=step)
        done = number
        for one, other in zip(expected.arrays(), left.arrays(), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["adam", "sgd", "lion"])
def test_recorded_steps(kind, threads):
    """A step that has run is not run again."""
    sizes = (300_000, 5003)
    plain, recorded = Lists(kind, torch.bfloat16, sizes), Lists(kind, torch.bfloat16, sizes)
    counts = [StepJournal.num_pieces_of(size) for size in sizes]
    memory = shared_tensor(torch.zeros(StepJournal.nbytes(sum(counts)), dtype=torch.uint8))
    journal, known = StepJournal(memory, sum(counts)), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for number in (1, 1, 2):
            journal.start(number)
            recorded.step(StepCheck([[], []], journal, [0, counts[0]]), number=number)
    finally:
        torch.set_num_threads(known)
    for number in (1, 2):
        plain.step(number=number)
    for one, other in zip(plain.arrays(), recorded.arrays(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_a_piece_that_was_being_updated_is_put_back():
    """A journal with a piece in a slot and another one done, as a process leaves them."""
    plain, torn = Lists("adam", torch.float32, (5000,)), Lists("adam", torch.float32, (5000,))
    memory = torch.zeros(StepJournal.nbytes(3) + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][: StepJournal.nbytes(3)]
    head, slots = memory.view(torch.int64), memory[StepJournal.head_nbytes(3) :].view(torch.float32)
    head[0] = head[1 + 0] = 7  # the first piece is done
    head[1 + 3 + 5] = 1 + 2  # the third one is in a slot
    arrays = torn.weights[0], torn.state[0][0], torn.state[1][0]
    for k, array in enumerate(arrays):
        slots[5 * 4 * 2048 :][k * 904 :][:904] = array[4096:]
        array[4096:4500] = float("nan")
    plain.step(number=7)
    for array, updated in zip(arrays, (plain.weights[0], plain.state[0][0], plain.state[1][0]), strict=True):
        array[:2048] = updated[:2048]
    torn.step(StepCheck([[]], StepJournal(memory, 3), [0]), number=7)
    for one, other in zip(plain.arrays(), torn.arrays(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("num_pieces", "offset"), [(100, 0), (2, 8)])
def test_memory_that_does_not_fit_a_journal(num_pieces, offset):
    memory = torch.zeros(StepJournal.nbytes(2) + 128, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 + offset :][: StepJournal.nbytes(2)]
    with pytest.raises(ValueError, match=r"journal: expected \d+ contiguous bytes"):
        StepJournal(memory, num_pieces)
