"""bmtrain.distributed: values and gradients, for every kind of tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import prod

import pytest
import torch
from harness import run_ranks
from harness.twins import check_gradients

import bmtrain
from bmtrain import distributed

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
OTHERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
WORLDS = pytest.mark.parametrize("world", [1, 2, 4])


def tensors(rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """0-d, empty, plain, strided, transposed and expanded tensors with small whole values."""
    base = (torch.arange(48).reshape(6, 8) % 5 + rank).to(dtype)
    return [base[0, 0], base[:0], base, base[::2, 1:7], base.t(), base[0].expand(3, 8), base[1:2]]


def all_values() -> None:
    size, rank = bmtrain.world_size(), bmtrain.rank()
    for dtype in FLOATS + OTHERS:
        per_rank = [tensors(r, dtype) for r in range(size)]
        for i, x in enumerate(per_rank[rank]):
            before = x.clone()
            parts = [per_rank[r][i] for r in range(size)]
            gathered = distributed.all_gather(x)
            assert torch.equal(gathered, torch.stack(parts))
            fresh(gathered, x)
            for op, reference in (
                ("sum", torch.add),
                ("max", torch.maximum),
                ("min", torch.minimum),
                ("prod", torch.mul),
            ):
                expected = parts[0]
                for part in parts[1:]:
                    expected = reference(expected, part)
                result = distributed.all_reduce(x, op)
                assert result.dtype == dtype
                assert torch.equal(result, expected), (dtype, i, op)
                fresh(result, x)
            copied = distributed.broadcast(x, size - 1)
            assert torch.equal(copied, parts[-1])
            fresh(copied, x)
            if x.dim() and x.shape[0] % size == 0:
                rows = x.shape[0] // size
                expected = (
                    sum(part.long() for part in parts)
                    if dtype is not torch.bool
                    else torch.stack(parts).any(0)
                )
                part = distributed.reduce_scatter(x)
                assert torch.equal(part, expected.to(dtype)[rank * rows : (rank + 1) * rows])
                fresh(part, x)
            assert torch.equal(x, before)


def fresh(result: torch.Tensor, x: torch.Tensor) -> None:
    assert result is not x
    assert not result._is_view()
    assert result.is_contiguous()
    assert result.numel() == 0 or result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    result.zero_()


@WORLDS
def test_values(world: int) -> None:
    run_ranks(world, all_values, timeout=120)


def average() -> None:
    size, rank = bmtrain.world_size(), bmtrain.rank()
    for dtype in FLOATS:
        x = torch.tensor([1.0, 3.0], dtype=dtype) * (rank + 1)
        expected = torch.tensor([1.0, 3.0]) * sum(range(1, size + 1)) / size
        assert torch.equal(distributed.all_reduce(x, "avg"), expected.to(dtype))
        pair = distributed.reduce_scatter(x.repeat(size), "avg")
        assert torch.equal(pair, expected.to(dtype))
    with pytest.raises(ValueError, match="avg"):
        distributed.all_reduce(torch.ones(2, dtype=torch.int64), "avg")


@WORLDS
def test_average(world: int) -> None:
    run_ranks(world, average)


def rounding() -> None:
    size, rank = bmtrain.world_size(), bmtrain.rank()
    for dtype in FLOATS:
        generator = torch.Generator().manual_seed(3)
        rows = [
            (torch.rand(256, generator=generator, dtype=torch.float64) + 0.5).to(dtype) for _ in range(size)
        ]
        exact = [row if dtype is torch.float64 else row.float() for row in rows]
        others = prod([row for r, row in enumerate(exact) if r != rank])
        weight = rows[0].flip(0)
        assert torch.equal(distributed.all_reduce(rows[rank]), sum(exact).to(dtype))
        assert torch.equal(distributed.all_reduce(rows[rank], "prod"), prod(exact).to(dtype))
        got = gradient(lambda x: distributed.all_reduce(x, "prod"), rows[rank], weight)
        assert torch.equal(got, (weight.to(others.dtype) * others).to(dtype))


def test_rounding() -> None:
    run_ranks(4, rounding)


def gradient(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """The gradient of (function(x) * weight).sum(); the result is overwritten before and after backward."""
    x = x.clone().requires_grad_()
    out = function(x)
    loss = (out * weight).sum()
    with torch.no_grad():
        out.fill_(7.0)
    loss.backward()
    with torch.no_grad():
        out.fill_(9.0)
    assert x.grad is not None
    return x.grad


def gradients(dtype_name: str) -> None:  # BC-71
    dtype = getattr(torch, dtype_name)
    size, rank = bmtrain.world_size(), bmtrain.rank()
    weight = (torch.arange(1.0, 5.0) * (rank + 1)).to(dtype)
    rows = [torch.tensor([0.0, 2.0, 3.0 + r, 4.0 if r % 2 else -4.0]).to(dtype) for r in range(size)]
    x = rows[rank]
    assert torch.equal(gradient(distributed.all_reduce, x, weight), weight)
    assert torch.equal(gradient(lambda x: distributed.all_reduce(x, "avg"), x, weight), weight / size)
    for op, best in (("max", torch.stack(rows).amax(0)), ("min", torch.stack(rows).amin(0))):
        got = gradient(lambda x, op=op: distributed.all_reduce(x, op), x, weight)
        assert torch.equal(got, torch.where(x == best, weight, 0))
    others = torch.ones(4)
    for r, row in enumerate(rows):
        if r != rank:
            others = others * row.float()
    got = gradient(lambda x: distributed.all_reduce(x, "prod"), x, weight)
    assert torch.equal(got, (weight.float() * others).to(dtype))
    wide = torch.stack([weight * (r + 2) for r in range(size)])
    assert torch.equal(gradient(distributed.all_gather, x, wide), wide[rank])
    total = sum(range(1, size + 1))
    expected = (torch.arange(1.0, 5.0) * total).to(dtype)
    assert torch.equal(gradient(lambda x: distributed.broadcast(x, size - 1), x, weight), expected)
    long = torch.arange(4.0 * size).to(dtype)
    whole = torch.cat([(torch.arange(1.0, 5.0) * (r + 1)).to(dtype) for r in range(size)])
    assert torch.equal(gradient(distributed.reduce_scatter, long, weight), whole)
    got = gradient(lambda x: distributed.reduce_scatter(x, "avg"), long, weight)
    assert torch.equal(got, whole / size)


@WORLDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_gradients(world: int, dtype: str) -> None:
    run_ranks(world, gradients, dtype)


def odd_cases() -> None:
    size, rank = bmtrain.world_size(), bmtrain.rank()
    x = torch.ones(4 * size, requires_grad=True)
    distributed.reduce_scatter(x, "max").detach()
    with pytest.raises(NotImplementedError, match="max"):
        distributed.reduce_scatter(x, "max").sum().backward()
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="divides"):
            distributed.reduce_scatter(torch.ones(4 * size + 1) if size > 1 else torch.ones(()))
    for call in (distributed.all_reduce, distributed.reduce_scatter):
        with pytest.raises(ValueError, match="sum, avg, max, min, prod"):
            call(x, "median")
    with pytest.raises(ValueError, match="root"):
        distributed.broadcast(x, size)
    with pytest.raises(TypeError, match="tensor"):
        distributed.all_reduce(3.0)
    with pytest.raises(TypeError, match="comm"):
        distributed.all_reduce(x, "sum", "world")
    # only some ranks need a gradient
    for op in ("sum", "max", "prod"):
        y = torch.full((3,), 2.0, requires_grad=rank == 0)
        out = distributed.all_reduce(y, op)
        assert out.requires_grad == (rank == 0)
    assert not distributed.all_gather(torch.ones(2, dtype=torch.int64)).requires_grad
    # a group of this rank alone
    alone = bmtrain.config["tp_comm"]
    assert torch.equal(distributed.all_gather(torch.arange(3), alone), torch.arange(3)[None])


@pytest.mark.parametrize("world", [1, 2])
def test_odd_cases(world: int) -> None:
    run_ranks(world, odd_cases)


def gather_results() -> None:
    size, rank = bmtrain.world_size(), bmtrain.rank()
    t = torch.arange(36.0).reshape(6, 6) + 100 * rank
    expected = torch.cat([(torch.arange(36.0).reshape(6, 6) + 100 * r)[:2, :3] for r in range(size)])
    assert torch.equal(bmtrain.gather_result(t[:2, :3]), expected)
    assert bmtrain.gather_result(torch.tensor(rank)).tolist() == list(range(size))
    assert torch.equal(bmtrain.sum_loss(torch.tensor(float(rank))), torch.tensor((size - 1) / 2))


@WORLDS
def test_gather_result(world: int) -> None:
    run_ranks(world, gather_results)


def activations() -> None:  # BC-77
    comm = bmtrain.config["comm"]
    rank, peer = comm.rank, 1 - comm.rank
    for x in [
        torch.randn(2, 3, 4),
        torch.randn(4, 6).t(),
        torch.tensor(3, dtype=torch.int64),
        torch.empty(0, 5, dtype=torch.float16),
        torch.randn(7).bfloat16().requires_grad_(),
        torch.tensor([True, False]),
    ]:
        if rank == 0:
            distributed.send_activations(x, peer, comm)
            got = distributed.recv_activations(peer, comm)
        else:
            got = distributed.recv_activations(peer, comm)
            distributed.send_activations(x, peer, comm)
        assert torch.equal(got, x)
        assert got.dtype == x.dtype
        assert not got.requires_grad


def test_activations() -> None:
    run_ranks(2, activations)


def activations_along_the_pipeline() -> float:  # BC-77
    comm = bmtrain.config["pipe_comm"]
    if bmtrain.config["topology"].stage_id == 0:
        distributed.send_activations(torch.full((3,), float(bmtrain.rank())), 1, comm)
        return -1.0
    return float(distributed.recv_activations(0, comm).mean())


def test_activations_along_the_pipeline() -> None:
    assert run_ranks(4, activations_along_the_pipeline, init={"pipe_size": 2}) == [-1.0, -1.0, 0.0, 1.0]


class Scaled(torch.nn.Module):
    """Features times a learnt temperature, as of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(3, 3), torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale.exp()


def loss_over_all_ranks() -> None:
    torch.manual_seed(0)
    plain = Scaled()
    model = bmtrain.BMTrainModelWrapper(copy.deepcopy(plain))
    whole = torch.randn(8, 3)
    labels = torch.arange(8) ^ 1

    def contrast(features: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(features @ features.t() - 9 * torch.eye(8), labels)

    contrast(plain(whole)).backward()
    size = bmtrain.world_size()
    own = model(whole.chunk(size)[bmtrain.rank()])
    loss = contrast(distributed.all_gather(own).flatten(0, 1))
    bmtrain.optim.OptimManager().backward(loss * size)
    check_gradients(plain, model, tolerance=1e-5)


@WORLDS
def test_a_loss_over_all_ranks_is_multiplied_by_their_number(world: int) -> None:
    run_ranks(world, loss_over_all_ranks)


def rows_against_all_columns(way: str) -> None:
    """Both remedies for contrastive losses that `all_gather` names, against one process."""
    size, rank = bmtrain.world_size(), bmtrain.rank()
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3 * size, 5, generator=generator).requires_grad_()
    target = torch.arange(3 * size)
    torch.nn.functional.cross_entropy(whole @ whole.sin().t(), target).backward()
    rows = slice(3 * rank, 3 * rank + 3)
    x = whole.detach()[rows].clone().requires_grad_()
    if way == "all rows":
        columns = distributed.all_gather(x).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(columns @ columns.sin().t(), target)
        (loss * size).backward()
    else:
        sources = [x if r == rank else x.detach().requires_grad_() for r in range(size)]
        columns = torch.cat([distributed.broadcast(source, r) for r, source in enumerate(sources)])
        loss = torch.nn.functional.cross_entropy(x @ columns.sin().t(), target[rows])
        loss.backward()
    torch.testing.assert_close(x.grad / size, whole.grad[rows])


@WORLDS
@pytest.mark.parametrize("way", ["all rows", "own rows"])
def test_contrastive_losses_have_the_gradients_of_one_process(world: int, way: str) -> None:
    run_ranks(world, rows_against_all_columns, way)
