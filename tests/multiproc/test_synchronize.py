"""`synchronize`, `sum_loss`, `gather_result`: barrier and reductions for logging."""

from __future__ import annotations

import warnings

import pytest
import torch
from harness import run_ranks

import bmtrain


def mean_loss() -> tuple[float, float, torch.dtype, list[str]]:
    loss = torch.tensor(float(bmtrain.rank() + 1), requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mean = bmtrain.sum_loss(loss)
        bmtrain.sum_loss(loss)
    mean.backward()
    assert loss.grad is not None
    half = bmtrain.sum_loss(loss.detach().half())
    return mean.item(), loss.grad.item(), half.dtype, [warning.filename for warning in caught]


@pytest.mark.parametrize("world", [1, 2])
def test_sum_loss_is_the_mean(world: int) -> None:
    mean = (world + 1) / 2
    for rank, (value, gradient, dtype, told) in enumerate(run_ranks(world, mean_loss, fresh=True)):
        assert (value, gradient, dtype) == (mean, 1 / world, torch.float16)
        assert told == ([] if rank else [__file__])


def gathered(kind: str) -> torch.Tensor:
    rank = bmtrain.rank()
    whole = torch.arange(12).reshape(3, 4) + 100 * rank
    given = {
        "slice": whole[:2, 1:3],
        "transposed": whole.t(),
        "scalar": torch.tensor(rank, dtype=torch.float64),
        "bool": whole > 105,
        "empty": whole[:0],
    }[kind]
    before = given.clone()
    result = bmtrain.gather_result(given)
    assert torch.equal(given, before)
    assert result.device == given.device
    return result


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["slice", "transposed", "scalar", "bool", "empty"])
def test_bc_70_gather_result_concatenates_in_rank_order(world: int, kind: str) -> None:
    wholes = [torch.arange(12).reshape(3, 4) + 100 * rank for rank in range(world)]
    parts = {
        "slice": [whole[:2, 1:3] for whole in wholes],
        "transposed": [whole.t() for whole in wholes],
        "scalar": [torch.tensor([rank], dtype=torch.float64) for rank in range(world)],
        "bool": [whole > 105 for whole in wholes],
        "empty": [whole[:0] for whole in wholes],
    }[kind]
    for result in run_ranks(world, gathered, kind):
        assert result.dtype == parts[0].dtype
        assert torch.equal(result, torch.cat(parts))


def before_init() -> list[str]:
    model = torch.nn.Linear(2, 2)
    calls = [
        lambda: bmtrain.save(model, "nowhere.pt"),
        lambda: bmtrain.load(model, "nowhere.pt"),
        lambda: bmtrain.inspect.inspect_model(model, "*"),
        lambda: bmtrain.store.allgather_objects(1),
        lambda: bmtrain.store.broadcast_object(1),
        lambda: bmtrain.store.DistributedStateDictWrapper({}),
        lambda: bmtrain.benchmark.all_gather(),
        lambda: bmtrain.init_parameters(model),
        lambda: bmtrain.optim.OptimManager(loss_scale=2).step(),
        lambda: bmtrain.optim.OptimManager().clip_grad_norm(model.parameters(), 1.0),
        bmtrain.synchronize,
        bmtrain.wait_loader,
        lambda: bmtrain.sum_loss(torch.ones(1)),
        lambda: bmtrain.gather_result(torch.ones(1)),
    ]
    found = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_bc_3_before_init() -> None:
    for messages in run_ranks(1, before_init, init=False):
        assert all("not initialized" in message for message in messages), messages
