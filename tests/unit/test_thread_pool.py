"""The pool of threads for loops over memory, seen from Python: its threads are like the caller's, and cost nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from bmtrain import _C, _ops


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_flushed_denormals_are_flushed_on_every_thread() -> None:
    """Threads of the pool treat numbers as the calling thread does."""
    x = torch.full((200_000,), 1e-40)
    try:
        assert _ops.squared_sum([x]).item() > 0
        if torch.set_flush_denormal(True):
            assert _ops.squared_sum([x]).item() == 0
    finally:
        torch.set_flush_denormal(False)


def test_pool_survives_a_fork() -> None:
    x = torch.ones(200_000)
    assert _ops.squared_sum([x]).item() == 200_000
    child = os.fork()
    if child == 0:
        os._exit(0 if _ops.squared_sum([x]).item() == 200_000 else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("processors", [1, 2])
def test_threads_without_work_take_no_processor_time(processors: int) -> None:
    """Also where there are processors enough for them to watch for work before they sleep."""
    x = torch.ones(200_000)
    _C.set_processor_share(processors)
    try:
        for _ in range(100):
            assert _ops.squared_sum([x]).item() == 200_000
        begin = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - begin < 0.1
    finally:
        _C.set_processor_share(os.cpu_count() or 1)
