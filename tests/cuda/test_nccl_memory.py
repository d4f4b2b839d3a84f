"""Buffers that NCCL has allocated and communicators register, over the fake device and NCCL: no bit depends on them,
nothing is left behind, every failure reaches the caller, and all ranks decide alike."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.fake_nccl import build_fake

import bmtrain as bmt
from bmtrain import _C, _comm_nccl
from bmtrain.errors import BMTrainError, CommunicationError
from bmtrain.global_var import context

CPU = torch.device("cpu")
RESULTS = range(1, 7)


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(24, 24) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.nn.functional.linear(x, self.weight)
        return result


def train(num_steps: int = 3, **policy: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        model = bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(4)])
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    x = torch.randn(3, 24)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def register() -> None:
    context().engine.pool.set_source(_C.NcclMemory(world().library, CPU), 1)


def world() -> Any:
    return context().groups["zero"].comm


@pytest.fixture
def checked(fake: ctypes.CDLL) -> Iterator[None]:
    """When the communicators are gone nothing may be left, whatever happened."""
    gc.collect()  # of earlier tests
    fake.fake_reset()
    yield
    gc.collect()
    wait_for(lambda: fake.fake_open() == 0)
    assert (fake.fake_registered(), fake.fake_allocated(), fake.fake_misused()) == (0, 0, 0)


@pytest.fixture
def clean(checked: None, one_of_two: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    yield one_of_two
    one_of_two.fake_stuck(0, 0)
    engine = context().engine
    engine.drop_stale_reductions()  # as the next forward would
    with suppress(CommunicationError):
        engine.schedule.drop_ahead()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("policy", [{}, {"gather_dtype": torch.bfloat16}], ids=["fp32", "through bf16"])
def test_no_bit_changes_and_nothing_is_allocated_in_a_steady_step(
    clean: ctypes.CDLL, policy: dict[str, Any], lazy: bool
) -> None:
    expected = train(**policy)
    clean.fake_lazy(lazy)
    register()
    found = train(**policy)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert clean.fake_calls(b"CommRegister") > 0
    before = clean.fake_calls(b"MemAlloc"), clean.fake_calls(b"CommRegister")
    clean.fake_journal()
    train(5, **policy)
    assert (clean.fake_calls(b"MemAlloc"), clean.fake_calls(b"CommRegister")) == before
    assert "synchronize" not in clean.fake_journal().decode()


def test_what_is_trimmed_is_deregistered_everywhere_and_freed(clean: ctypes.CDLL) -> None:
    register()
    train()
    assert clean.fake_registered() >= clean.fake_allocated() > 0
    context().engine.pool.trim()
    assert (clean.fake_registered(), clean.fake_allocated(), clean.fake_misused()) == (0, 0, 0)
    train()  # and allocated anew
    assert clean.fake_allocated() > 0


def test_closing_deregisters_first(clean: ctypes.CDLL) -> None:
    register()
    train()
    for group in context().groups.values():
        group.comm.close()
        group.reduce_comm.close()
    wait_for(lambda: clean.fake_open() == 0)
    assert clean.fake_registered() == 0
    assert clean.fake_calls(b"CommDeregister") == clean.fake_calls(b"CommRegister")


@pytest.mark.parametrize("result", RESULTS)
def test_memory_that_nccl_does_not_have(clean: ctypes.CDLL, result: int) -> None:
    register()
    pool = context().engine.pool
    clean.fake_fail(b"MemAlloc", result, 0)
    with pytest.raises(
        CommunicationError, match=rf"could not allocate .*BMTRAIN_NCCL_REGISTER=0.*result {result}"
    ):
        train()
    assert (pool.stats()["buffers_in_use"], pool.stats()["bytes_in_use"]) == (0, 0)


@pytest.mark.parametrize("calls_before", [0, 5])
@pytest.mark.parametrize("result", RESULTS)
def test_a_registration_that_fails_ends_all(clean: ctypes.CDLL, result: int, calls_before: int) -> None:
    register()
    clean.fake_fail(b"CommRegister", result, calls_before)
    with pytest.raises(CommunicationError, match=rf"registering its memory.*result {result}"):
        train()
    wait_for(lambda: clean.fake_open() == 0)
    with pytest.raises(CommunicationError, match="was aborted"):
        world().barrier()


@pytest.mark.parametrize("call", [b"CommDeregister", b"MemFree"])
@pytest.mark.parametrize("result", RESULTS)
def test_failures_at_the_end_are_silent(clean: ctypes.CDLL, call: bytes, result: int) -> None:
    register()
    clean.fake_fail(call, result, 0)
    train()
    context().engine.pool.trim()


def test_abort_with_operations_under_way(clean: ctypes.CDLL) -> None:
    register()
    train()
    assert clean.fake_registered() > 0
    clean.fake_stuck(1, 0)
    works = [
        comm.all_reduce(torch.zeros(4), _C.ReduceOp.SUM)
        for comm in (world(), context().groups["zero"].reduce_comm)
    ]
    for comm in (world(), context().groups["zero"].reduce_comm):
        comm.abort("a test said so")
    wait_for(lambda: clean.fake_open() == 0)
    assert clean.fake_registered() == 0
    assert clean.fake_allocated() > 0  # freed after, by whoever has it
    context().engine.pool.trim()
    for work in works:
        with pytest.raises(CommunicationError, match="a test said so"):
            work.wait()


class Answer:
    """The world's communicator, on which another rank says whether it works there."""

    def __init__(self, comm: Any, works: bool) -> None:
        self.comm, self.works = comm, works

    def all_reduce(self, tensor: torch.Tensor, op: Any, label: str) -> Any:
        tensor.mul_(int(self.works))
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("fault", [None, b"MemAlloc", b"CommRegister"])
def test_all_ranks_decide_alike(
    clean: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, fault: bytes | None, elsewhere: bool
) -> None:
    comm = world()
    monkeypatch.setattr(_C, "GuardedCommunicator", Answer)
    guard = Answer(comm, elsewhere)
    guard.inner = comm  # type: ignore[attr-defined]
    here: Any = SimpleNamespace(
        groups={"zero": SimpleNamespace(comm=guard)}, device=CPU, engine=context().engine
    )
    if fault is not None:
        clean.fake_fail(fault, 2, 0)
    works = fault is None and elsewhere
    assert _comm_nccl.register_buffers(here, "auto") == works
    if not works:
        reason = "works on this rank, but not on another" if fault is None else "result 2"
        with pytest.raises(BMTrainError, match=rf"BMTRAIN_NCCL_REGISTER=1: .*{reason}"):
            _comm_nccl.register_buffers(here, "1")
    assert not world().closed  # a trial that fails costs nothing
    assert clean.fake_allocated() == 0


def test_libraries_without_the_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: ctypes.CDLL
) -> None:
    monkeypatch.setenv("BMTRAIN_NCCL_LIBRARY", str(build_fake(tmp_path, "-DFAKE_WITHOUT_MEMORY")))
    library = _C.NcclLibrary([])
    with pytest.raises(RuntimeError, match="cannot allocate and register memory"):
        _C.NcclMemory(library, CPU)
    comm = _C.NcclCommunicator(library, library.make_unique_id(), 0, 1, "zero", CPU, 60.0)
    assert comm.try_registration() == "NCCL 2.28.9 has no functions for it"


@pytest.mark.parametrize(("text", "setting"), [("", "0"), ("0", "0"), ("auto", "auto"), ("1", "1")])
def test_setting(monkeypatch: pytest.MonkeyPatch, text: str, setting: str) -> None:
    monkeypatch.setenv("BMTRAIN_NCCL_REGISTER", text)
    assert _comm_nccl.read_registration() == setting
    monkeypatch.setenv("BMTRAIN_NCCL_REGISTER", "yes")
    with pytest.raises(ValueError, match="BMTRAIN_NCCL_REGISTER: expected 0, auto or 1, got 'yes'"):
        _comm_nccl.read_registration()
