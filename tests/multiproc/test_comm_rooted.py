"""send, recv, scatter, gather and reduce of bmtrain.distributed: values, gradients, refusals."""

from __future__ import annotations

import time

import pytest
import torch
from harness import run_ranks

import bmtrain
from bmtrain import distributed

DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
WORLDS = pytest.mark.parametrize("world", [1, 2, 4])


def tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """0-d, empty, plain, strided, transposed and expanded tensors with small whole values."""
    base = (torch.arange(48).reshape(6, 8) % 5 + rank).to(dtype)
    return [base[0, 0], base[:0], base, base[::2, 1:7], base.t(), base[0].expand(3, 8)]


def values() -> None:
    size, rank = bmtrain.world_size(), bmtrain.rank()
    for dtype in DTYPES:
        per_rank = [tensors(r, dtype) for r in range(size)]
        for i, x in enumerate(per_rank[rank]):
            root, before = i % size, x.clone()
            parts = torch.stack([per_rank[r][i] for r in range(size)])
            gathered = distributed.gather(x, root)
            assert torch.equal(gathered, parts if rank == root else parts[:0])
            total = distributed.reduce(x, root)
            expected = parts.any(0) if dtype is torch.bool else parts.sum(0, dtype=dtype)
            assert torch.equal(total, expected if rank == root else parts[:0])
            # rows of another rank than the root hold what must not be seen
            rows = parts if rank == root else torch.zeros_like(parts)
            row = distributed.scatter(rows, root)
            assert torch.equal(row, x)
            for result in (gathered, total, row):
                assert result.is_contiguous()
                assert not result._is_view()
                result.zero_()
            assert torch.equal(x, before)
            assert torch.equal(rows, parts if rank == root else torch.zeros_like(parts))
    ops = {"sum": 6.0, "avg": 1.5, "max": 3.0, "min": 0.0, "prod": 0.0}
    for op, whole in ops.items():
        result = distributed.reduce(torch.tensor([float(rank)]), size - 1, op)
        if size == 4 and rank == 3:
            assert result.tolist() == [whole]


@WORLDS
def test_values(world: int) -> None:
    run_ranks(world, values, timeout=120)


def gradients() -> None:
    size, rank = bmtrain.world_size(), bmtrain.rank()
    weights = torch.arange(1.0, 5.0) * torch.arange(1.0, size + 1)[:, None]  # row r belongs to rank r
    for root in {0, size - 1}:
        at_root = rank == root
        x = torch.full((4,), float(rank), requires_grad=True)
        out = distributed.gather(x, root)
        (out * (weights if at_root else 1.0)).sum().backward()
        assert torch.equal(x.grad, weights[rank])

        rows = torch.ones(size, 4, requires_grad=True)
        (distributed.scatter(rows, root) * weights[rank]).sum().backward()
        assert torch.equal(rows.grad, weights if at_root else torch.zeros_like(weights))

        for op, divisor in (("sum", 1), ("avg", size)):
            x = torch.full((4,), float(rank), requires_grad=True)
            (distributed.reduce(x, root, op) * weights[root]).sum().backward()
            assert torch.equal(x.grad, weights[root] / divisor)
        x = torch.ones(4, requires_grad=True)
        with pytest.raises(NotImplementedError, match="max"):
            distributed.reduce(x, root, "max").sum().backward()
    assert not distributed.gather(torch.ones(3, dtype=torch.int64), 0).requires_grad


@WORLDS
def test_gradients(world: int) -> None:
    run_ranks(world, gradients)


def ring() -> None:
    """Every rank passes a tensor of its own shape to the next one; even ranks speak first."""
    size, rank = bmtrain.world_size(), bmtrain.rank()
    mine = torch.full((rank + 1, 2), float(rank), dtype=torch.float64, requires_grad=True)
    following, previous = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0:
        distributed.send(mine, following)
        got = distributed.recv(previous)
    else:
        got = distributed.recv(previous)
        distributed.send(mine, following)
    assert torch.equal(got, torch.full((previous + 1, 2), float(previous), dtype=torch.float64))
    assert not got.requires_grad


@pytest.mark.parametrize("world", [2, 4])
def test_send_and_recv(world: int) -> None:
    run_ranks(world, ring)


def overwritten() -> None:
    """A tensor may be changed as soon as the call is back, though the peer receives it later."""
    rank, numel = bmtrain.rank(), 1 << 22
    for kind in ("scatter", "gather", "send"):
        ones = torch.ones(2, numel) if kind == "scatter" else torch.ones(numel)
        if rank == 1:
            time.sleep(0.2)
        if kind == "scatter":
            found = distributed.scatter(ones, 0)
        elif kind == "gather":
            found = distributed.gather(ones, 1)
        elif rank == 0:
            distributed.send(ones, 1)
        else:
            found = distributed.recv(0)
        ones.zero_()
        if rank == 1:
            assert bool(found.eq(1).all()), kind
        bmtrain.synchronize()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_what_was_sent_may_be_overwritten(transport: str) -> None:
    run_ranks(2, overwritten, environment={"BMTRAIN_CPU_TRANSPORT": transport})


def refusals() -> None:
    size, rank = bmtrain.world_size(), bmtrain.rank()
    x = torch.ones(size, 2)
    for call in (distributed.gather, distributed.scatter, distributed.reduce):
        for root in (-1, size):
            with pytest.raises(ValueError, match=f"root: .* 0 to {size - 1}, got {root}"):
                call(x, root)
        with pytest.raises(TypeError, match="tensor"):
            call([1.0], 0)
        with pytest.raises(TypeError, match="comm"):
            call(x, 0, comm="world")
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match=f"first dimension of {size}"):
            distributed.scatter(torch.ones(size + 1, 2), 0)
    with pytest.raises(ValueError, match="first dimension"):
        distributed.scatter(torch.ones(()), 0)
    with pytest.raises(ValueError, match="sum, avg, max, min, prod"):
        distributed.reduce(x, 0, "median")
    for peer in (-1, size, rank):
        with pytest.raises(ValueError, match="dst: .* other than this rank"):
            distributed.send(x, peer)
        with pytest.raises(ValueError, match="src: .* other than this rank"):
            distributed.recv(peer)


@pytest.mark.parametrize("world", [1, 2])
def test_refusals(world: int) -> None:
    run_ranks(world, refusals)


def before_init() -> None:
    x = torch.ones(1)
    for call in (distributed.gather, distributed.scatter, distributed.reduce, distributed.send):
        with pytest.raises(RuntimeError, match="not initialized"):
            call(x, 0)
    with pytest.raises(RuntimeError, match="not initialized"):
        distributed.recv(0)


def test_before_init() -> None:
    run_ranks(1, before_init, init=False)
