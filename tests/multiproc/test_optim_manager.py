"""Training steps on several ranks against one plain torch process that has the whole batch."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.managed_model import (
    Model,
    assert_gradients,
    assert_weights,
    batch,
    loss_of,
    make_manager,
    of_all_ranks,
    own_loss,
    whole,
)
from torch.utils._python_dispatch import TorchDispatchMode

import bmtrain as bmt
from bmtrain.lr_scheduler import Noam
from bmtrain.optim import clip_grad_norm
from bmtrain.optim._grad_stats import first_overflow
from bmtrain.optim.optim_manager import check_overflow

WORLDS = [1, 2, 4]


# --- gradients, steps, clipping


def gradient_of_the_mean_loss(loss_scale: float | None) -> None:  # BC-40
    model, reference = Model(True), Model(False)
    manager = make_manager(torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=loss_scale)
    manager.backward(own_loss(model))
    loss_of(reference, batch()).backward()
    assert_gradients(model, reference, 1 / manager.loss_scale)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("loss_scale", [None, 8.0])
def test_gradient_of_the_mean_loss(world: int, loss_scale: float | None) -> None:
    run_ranks(world, gradient_of_the_mean_loss, loss_scale)


def two_losses_of_one_forward() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    model = bmt.BMTrainModelWrapper(torch.nn.ModuleList([copy.deepcopy(plain)]))
    manager = make_manager(torch.optim.SGD(model.parameters(), lr=0.1), loss_scale=4.0)
    x = torch.randn(3, 4)
    result, expected = model[0](x), plain(x)
    manager.backward(result.square().mean(), retain_graph=True)
    manager.backward(result.sum())
    (expected.square().mean() + expected.sum()).backward()
    for p, reference in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.gather_grad() / 4, reference.grad)


@pytest.mark.parametrize("world", [1, 2])
def test_backward_may_keep_the_graph(world: int) -> None:
    run_ranks(world, two_losses_of_one_forward)


def tensor_parallel_gradient(parts_add_up: bool) -> None:  # BC-40: two tp ranks share a loss
    model, reference = Model(True), Model(False)
    grad_scale = None if parts_add_up else bmt.config["zero_size"]  # as in 1.0: each rank's loss is a mean
    manager = make_manager(torch.optim.SGD(model.parameters(), lr=0.1), grad_scale=grad_scale)
    assert manager.grad_scale == (2 if parts_add_up else 4)
    topology = bmt.config["topology"]
    shared = batch().chunk(2)[topology.tp_idx]
    own = loss_of(model, shared.chunk(2)[topology.tp_id])  # each tp rank takes half of the tokens
    manager.backward(own / 2 if parts_add_up else own)
    loss_of(reference, batch()).backward()
    assert_gradients(model, reference)


@pytest.mark.parametrize("parts_add_up", [True, False])
def test_tensor_parallel_gradient(parts_add_up: bool) -> None:
    run_ranks(4, tensor_parallel_gradient, parts_add_up, init={"tp_size": 2})


def steps_equal_one_process(clip: float | None, loss_scale: float | None) -> None:  # BC-41
    model, reference = Model(True), Model(False)
    optimizer, plain = (
        torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01) for m in (model, reference)
    )
    manager = make_manager(optimizer, Noam(optimizer, 0.1, 2, None), loss_scale=loss_scale)
    plain_scheduler = Noam(plain, 0.1, 2, None)
    for step in range(5):
        manager.zero_grad()
        manager.backward(own_loss(model, step))
        plain.zero_grad()
        loss_of(reference, batch(step)).backward()
        if clip is not None:
            norm = manager.clip_grad_norm(optimizer.param_groups, clip)
            expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        manager.step()
        plain.step()
        plain_scheduler.step()
    assert_weights(model, reference, rtol=0, atol=2e-6)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("clip", "loss_scale"), [(None, None), (0.1, None), (0.1, 1024.0)])
def test_steps_equal_one_process(world: int, clip: float | None, loss_scale: float | None) -> None:
    run_ranks(world, steps_equal_one_process, clip, loss_scale)


def clip_equals_torch(norm_type: Any, scale: float) -> tuple[float, ...]:  # BC-46
    model, reference = Model(True), Model(False)
    (own_loss(model) * scale / bmt.world_size()).backward()
    loss_of(reference, batch()).backward()
    extras, references = (
        [],
        [],
    )  # strided as one in channels_last is, and of a dtype without kernels of the core
    for grad in (torch.tensor([0.25, 0, 0]), torch.rand(3, 2).t() / 8, torch.rand(4).double() / 8):
        extra, extra_reference = (torch.nn.Parameter(torch.zeros_like(grad)) for _ in range(2))
        extra.grad = grad * scale * (1 if bmt.rank() == 0 else 17)  # rank 0's counts
        extra_reference.grad = grad.clone()
        extras.append(extra)
        references.append(extra_reference)
    groups = [{"params": list(model.parameters())}, {"params": extras}]
    norms = []
    for max_norm in (1e3, 0.05):
        norm = clip_grad_norm(groups, max_norm, scale, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(
            [*reference.parameters(), *references], max_norm, float(norm_type)
        )
        torch.testing.assert_close(norm.to(expected), expected, rtol=1e-6, atol=0)
        assert_gradients(model, reference, 1 / scale)
        for extra, expected in zip(extras, references, strict=True):
            factor = scale * (1 if bmt.rank() == 0 else 17)
            torch.testing.assert_close(extra.grad, expected.grad * factor, rtol=1e-5, atol=0)
        norms.append(norm.item())
    after = clip_grad_norm(groups, 1e3, scale, norm_type)
    assert 0.0499 < after <= 0.05 * (1 + 1e-6)
    return tuple(norms)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("norm_type", [2, 3, "inf"])
def test_clip_equals_torch(world: int, norm_type: Any) -> None:
    for scale in (1.0, 256.0):
        results = run_ranks(world, clip_equals_torch, norm_type, scale)
        assert len(set(results)) == 1  # identical on all ranks


def norm_with_nan(norm_type: Any, rank: int) -> tuple[float, list[float]]:
    p = bmt.DistributedParameter(torch.zeros(8))
    p.grad = torch.full_like(p.data, 3.0)
    if bmt.rank() == rank:
        p.grad[0] = math.nan
    norm = clip_grad_norm([{"params": [p]}], 1.0, 1.0, norm_type)
    return norm.item(), p.grad[1:].tolist()


@pytest.mark.parametrize("norm_type", [2, 3, "inf"])
def test_a_nan_of_any_rank_is_in_the_norm(norm_type: Any) -> None:
    for rank in range(2):
        for norm, grad in run_ranks(2, norm_with_nan, norm_type, rank):
            assert not math.isfinite(norm)
            assert set(grad) == {3.0}  # nothing is clipped by such a norm


def tensor_parallel_norm() -> float:
    tp_rank = bmt.config["tp_rank"]
    split = bmt.DistributedParameter(torch.zeros(2, 3), tp_mode=True, tp_split_dim=0)
    repeated = bmt.DistributedParameter(torch.zeros(5), tp_mode=True)
    ordinary = bmt.DistributedParameter(torch.zeros(7))
    split.grad = torch.full_like(split.data, 1.0 + tp_rank)
    repeated.grad = torch.full_like(repeated.data, 3.0)
    ordinary.grad = torch.full_like(ordinary.data, 5.0)
    return clip_grad_norm([{"params": [split, repeated, ordinary]}], 1e9, 1.0).item()


@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel_norm(world: int) -> None:
    expected = math.sqrt(6 * 1 + 6 * 4 + 5 * 9 + 7 * 25)
    assert run_ranks(world, tensor_parallel_norm, init={"tp_size": 2}) == pytest.approx([expected] * world)


def nothing_to_clip() -> None:  # BC-42
    model = Model(True)
    assert clip_grad_norm([], 1.0, 1.0) == 0
    assert clip_grad_norm([{"params": list(model.parameters())}], 1.0, 1.0) == 0
    assert not check_overflow([{"params": list(model.parameters())}])
    gain = model.first._parameters["gain"]
    gain.grad = torch.full_like(gain.data, 3.0)  # the other ranks own nothing of it
    assert clip_grad_norm([{"params": [gain]}], 1.0, 1.0) == 3
    manager = make_manager(torch.optim.Adam([model.unused, gain], lr=0.1), loss_scale=2.0)
    manager.step()
    assert manager.steps_since_last_scale == 1
    assert torch.equal(whole(model.unused, model.unused), torch.ones(5))


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_to_clip(world: int) -> None:
    run_ranks(world, nothing_to_clip)


def legal_but_unusual_steps() -> None:  # BC-43
    model = Model(True)
    manager = make_manager(torch.optim.Adam(model.parameters(), lr=0.01), loss_scale=64.0)
    groups = manager.optimizers[0].param_groups
    for step in range(4):
        manager.zero_grad()
        if step == 0:
            manager.backward(own_loss(model) * 0)
        elif step != 2:  # step 2: a bad loss that all ranks leave out
            for micro in range(3):
                manager.backward(own_loss(model, micro) / 3)
                manager.clip_grad_norm(groups, 1.0)
        manager.step()
    assert manager.steps_since_last_scale == 4
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("world", WORLDS)
def test_legal_but_unusual_steps(world: int) -> None:
    run_ranks(world, legal_but_unusual_steps)


# --- overflow


def one_bad_element_stops_all(where: str, value: float) -> str:  # BC-44
    model = Model(True)
    extra = torch.nn.Parameter(torch.ones(3))
    named = [*model.named_parameters(), ("extra", extra)]
    optimizer = torch.optim.Adam([p for _, p in named], lr=0.01)
    scheduler = Noam(optimizer, 0.1, 2, None, num_iter=1)
    manager = make_manager(optimizer, scheduler, loss_scale=1024.0)
    for step in range(2):
        manager.zero_grad()
        manager.backward(own_loss(model, step) + (extra**2).sum())
        manager.step()
    before = copy.deepcopy(([p.detach() for _, p in named], optimizer.state_dict(), scheduler.state_dict()))
    manager.zero_grad()
    manager.backward(own_loss(model, 2) + (extra**2).sum())
    bad = dict(named)[where]
    sizes = of_all_ranks(bad.grad.numel())
    if bmt.rank() == max(r for r, size in enumerate(sizes) if size):
        bad.grad.view(-1)[-1] = value
    with contextlib.redirect_stdout(io.StringIO()) as out:
        manager.step()
    assert (manager.loss_scale, manager.steps_since_last_scale) == (512.0, 0)
    for (name, p), old in zip(named, before[0], strict=True):
        assert torch.equal(p.detach(), old), name
        assert p.grad is None or not p.grad.any(), name
    assert scheduler.state_dict() == before[2]
    torch.testing.assert_close(optimizer.state_dict(), before[1], rtol=0, atol=0)
    index = [name for name, _ in named].index(where)
    if bmt.rank() == 0:
        assert f"parameter {index} of {len(named)}" in out.getvalue()
        assert "1024 -> 512\n" in out.getvalue()
    return out.getvalue()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("where", ["first.weight", "first.gain", "blocks.1.bias", "extra"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_one_bad_element_stops_all(world: int, where: str, value: float) -> None:
    printed = run_ranks(world, one_bad_element_stops_all, where, value)
    assert not any(printed[1:])  # only rank 0 reports


def messages_of_a_step() -> list[dict[str, int]]:
    model = Model(True)
    manager = make_manager(torch.optim.Adam(model.parameters(), lr=0.01), loss_scale=64.0)
    comm = bmt.config["comm"]
    manager.backward(own_loss(model))
    counts = []

    def count() -> None:
        counts.append({name: messages for name, (messages, _) in comm.traffic().items() if messages})
        comm.reset_traffic()

    count()
    manager.clip_grad_norm(manager.optimizers[0].param_groups, 1.0)
    count()
    manager.step()
    count()
    return counts[1:]


def test_one_all_reduce_to_clip_and_one_to_step() -> None:
    assert run_ranks(2, messages_of_a_step) == [[{"all_reduce": 1}] * 2] * 2


# --- several models


def two_managers_and_a_teacher() -> None:  # BC-52
    student, teacher, other = Model(True), Model(True, seed=8), Model(True, seed=9)
    alone = Model(True)
    kept = [p.detach().clone() for p in teacher.parameters()]
    first = make_manager(torch.optim.SGD(student.parameters(), lr=0.1), loss_scale=4.0)
    second = make_manager(torch.optim.SGD(other.parameters(), lr=0.1))
    third = make_manager(torch.optim.SGD(alone.parameters(), lr=0.1), loss_scale=4.0)
    for step in range(3):
        x = batch(step).chunk(bmt.world_size())[bmt.rank()]
        with torch.no_grad():
            target = teacher(x)
        first.zero_grad()
        second.zero_grad()
        first.backward(((student(x) - target) ** 2).mean())
        second.backward(own_loss(other, step))
        second.step()
        first.step()
        third.zero_grad()
        third.backward(((alone(x) - target) ** 2).mean())
        third.step()
    for p, old in zip(teacher.parameters(), kept, strict=True):
        assert torch.equal(p, old)
        assert p.grad is None
    for p, q in zip(student.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)
    assert first.loss_scale == 4.0
    assert second.loss_scale == 1


@pytest.mark.parametrize("world", WORLDS)
def test_two_managers_and_a_teacher(world: int) -> None:
    run_ranks(world, two_managers_and_a_teacher)


class Reads(TorchDispatchMode):
    """Counts the numbers that the host reads."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


def overflow_at(where: dict[int, int]) -> tuple[int, int]:
    """The first parameter that overflowed, given that of each rank, and the number of reads."""
    params = [bmt.DistributedParameter(torch.zeros(4)) for _ in range(5)]
    for number, param in enumerate(params[1:], 1):  # the first has no gradient
        param.grad = torch.full_like(param, math.nan if where.get(bmt.rank()) == number else 1.0)
    with Reads() as reads:
        found = first_overflow(params)
    return found, reads.count


def test_the_first_overflow_is_found_by_one_read() -> None:
    for where, first in (({}, 5), ({1: 2}, 2), ({0: 4, 1: 3}, 3)):
        assert run_ranks(2, overflow_at, where) == [(first, 1)] * 2
