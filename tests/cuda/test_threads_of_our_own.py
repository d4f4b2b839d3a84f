"""Threads that have chosen no card open none but the rank's, since each would take memory for a context, and take their
buffers there."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from harness import Status, rank_outcomes
from harness.fake_nccl import ROOT
from torch.utils.cpp_extension import include_paths

SENDING = """
import ctypes, sys, threading
import torch
from bmtrain import _C

cards = ctypes.CDLL(sys.argv[1])
cards.cards_use(1)
lane = _C.StagingLane(torch.device("cuda", 1), 2)

def send():
    numbers = [torch.full((), 7.0, dtype=torch.float64) for _ in range(2)]
    sent = _C.SentNumber(lane, *numbers)
    copies = _C.SentGradients(lane, [torch.ones(4)], [torch.zeros(4)])
    copies.scale(sent)
    copies.drop()

thread = threading.Thread(target=send)
thread.start()
thread.join()
print("opened", cards.cards_opened(), "events", cards.cards_num_events())
"""


# A parameter without values: nothing is computed on the card.
BUFFERS = """
import ctypes, sys, threading
import torch
from bmtrain import _C

cards = ctypes.CDLL(sys.argv[1])
alone = _C.SingleCommunicator("alone")
group = _C.ShardedBuffer(
    label="block",
    parameters=[torch.nn.Parameter(torch.empty(4, 4, device="meta"))],
    names=["weight"],
    shapes=[[4, 4]],
    gather_comm=alone,
    reduce_comm=alone,
    pool=_C.BufferPool(1, False),
    dtype=torch.float32,
    device=torch.device("cuda", 1),
)

def receive():
    group.begin_backward([True])
    print("buffer", cards.cards_last_buffer())
    group.cancel_backward()

thread = threading.Thread(target=receive)
thread.start()
thread.join()
"""


ASKING = """
import ctypes, sys
import torch

cards = ctypes.CDLL(sys.argv[1])
answers = [cards.cards_ask()]
cards.cards_capture(1)
answers.append(cards.cards_ask())
print(*answers, "broken", cards.cards_capture_is_broken(), "opened", cards.cards_opened())
"""


@pytest.fixture(scope="module")
def cards_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], Path]:
    """Builds the library of two cards; once for each tuple of flags."""
    return functools.cache(lambda flags: build_cards(tmp_path_factory.mktemp("cards") / "libcards.so", flags))


def build_cards(library: Path, flags: Sequence[str]) -> Path:
    torch_folder = Path(torch.__file__).parent
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-fPIC", "-shared", *flags]
    command += [f"-isystem{path}" for path in include_paths("cpu")]
    command += [
        "-Icsrc",
        "tests/cuda/fake/two_cards.cpp",
        "csrc/common/device_runtime.cpp",
        "-o",
        str(library),
    ]
    command += [f"-L{torch_folder / 'lib'}", "-lc10"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return library


def run_script(script: str, library: str) -> None:
    sys.argv = ["-c", library]
    exec(script, {})


def run_on_two_cards(library: Path, script: str) -> list[str]:
    [outcome] = rank_outcomes(1, run_script, script, str(library), init=False, fresh=True)
    assert outcome.status is Status.RETURNED, outcome
    return outcome.output.split()


def test_a_thread_without_a_card_opens_none_but_the_ranks(
    cards_library: Callable[[Sequence[str]], Path],
) -> None:
    assert run_on_two_cards(cards_library(()), SENDING) == ["opened", str(1 << 1), "events", "0"]


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="a torch with CUDA asks the driver about tensors of cards"
)
def test_a_thread_without_a_card_takes_buffers_of_the_ranks(
    cards_library: Callable[[Sequence[str]], Path],
) -> None:
    assert run_on_two_cards(cards_library(()), BUFFERS) == ["buffer", "1"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [((), ["1", "1", "broken", "0"]), (("-DWITHOUT_MODES",), ["1", "0", "broken", "1"])],
    ids=["relaxed", "refused"],
)
def test_events_are_asked_on_their_card_and_during_captures(
    cards_library: Callable[[Sequence[str]], Path], flags: Sequence[str], told: list[str]
) -> None:
    """A graph that is captured meanwhile is left alone; where it cannot be, the answer is "not yet", no failure."""
    assert run_on_two_cards(cards_library(flags), ASKING) == [*told, "opened", str(1 << 1)]
