"""The loader: who gets which samples, epochs, and going on in the middle of one, on any number of ranks."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import bmtrain as bmt
from bmtrain.global_var import context
from bmtrain.virtual import shards_of

SIZE = 50


def epochs(number: int, batch_size: int, **options: Any) -> list[list[list[int]]]:
    """The batches of this rank in so many epochs."""
    batches = bmt.data.loader(range(SIZE), batch_size, seed=3, **options)
    assert len(batches) == SIZE // (batch_size * bmt.config["tp_zero_size"])
    found = []
    for epoch in range(number):
        found.append([batch.tolist() for batch in batches])
        state = batches.state_dict()
        assert (state["epoch"], state["samples"]) == (batches.epoch, 0) == (epoch + 1, 0)
    return found


def of_torch(number: int, batch_size: int) -> list[list[list[int]]]:
    """The same by hand; DistributedSampler is not told who this rank is."""
    sampler = DistributedSampler(range(SIZE), seed=3, drop_last=True)
    loader = DataLoader(range(SIZE), batch_size, sampler=sampler, drop_last=True)
    found = []
    for epoch in range(number):
        sampler.set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
    return found


def test_each_rank_has_its_own_samples_in_another_order_each_epoch() -> None:
    for world in (1, 2, 4):
        ranks = run_ranks(world, epochs, 3, 4)
        assert ranks == run_ranks(world, of_torch, 3, 4)
        for epoch in range(3):
            had = list(chain(*(chain(*rank[epoch]) for rank in ranks)))
            assert len(had) == len(set(had)) == SIZE // (4 * world) * 4 * world
        assert ranks[0][0] != ranks[0][1] != ranks[0][2]
    in_order = run_ranks(2, epochs, 1, 5, shuffle=False)
    assert in_order[1][0][1] == [11, 13, 15, 17, 19]


def of_one_replica() -> list[int]:
    """As an evaluation has it that each rank makes alone."""
    return list(DistributedSampler(range(6), num_replicas=1, rank=0, shuffle=False))


def test_a_sampler_of_torch_knows_the_ranks() -> None:
    one, two = run_ranks(2, of_torch, 1, 5)
    assert not set(chain(*one[0])) & set(chain(*two[0]))
    assert run_ranks(2, of_one_replica) == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("init", [{"tp_size": 2}, {"pipe_size": 2}])
def test_ranks_that_compute_one_loss_have_the_same_samples(init: dict[str, Any]) -> None:
    ranks = run_ranks(4, epochs, 1, 2, init=init)
    if "tp_size" in init:
        assert ranks[0] == ranks[1] and ranks[2] == ranks[3]
        ranks = ranks[::2]
    had = list(chain(*(chain(*rank[0]) for rank in ranks)))  # a pipeline takes a loss of each of its ranks
    assert len(had) == len(set(had))


class Noisy(Dataset[tuple[int, float]]):
    """Samples with a random number each, as an augmentation would draw."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(torch.rand(()))


def interrupted(stop: int, workers: int) -> tuple[list[Any], list[Any], bool]:
    """What follows batch ``stop`` of two epochs, without and with an interruption there."""

    def make() -> bmt.data.Loader:
        return bmt.data.loader(Noisy(), 4, seed=1, num_workers=workers, collate_fn=list)

    def rest(batches: bmt.data.Loader) -> list[list[int]]:
        return [[index for index, _ in batch] for _ in range(batches.epoch, 2) for batch in batches]

    torch.manual_seed(0)
    whole = rest(make())
    after = torch.rand(3)

    batches = make()
    state = batches.state_dict()
    ahead = chain.from_iterable(iter(batches) for _ in range(2))
    for _ in islice(ahead, stop):
        state = batches.state_dict()  # the workers are further on
    resumed = make()
    resumed.load_state_dict(state)
    torch.manual_seed(0)
    continued = rest(resumed)
    # Without workers the samples are drawn from the program's own generator.
    return whole[stop:], continued, not workers or torch.equal(torch.rand(3), after)


@pytest.mark.parametrize(("stop", "workers"), [(0, 0), (2, 0), (2, 1), (6, 0), (9, 0)])
def test_goes_on_in_the_middle_of_an_epoch(stop: int, workers: int) -> None:
    for expected, found, same_generator in run_ranks(2, interrupted, stop, workers):
        assert found == expected
        assert same_generator


def left_by_break() -> list[list[list[int]]]:
    """Two loops: the first is left in its epoch, the second has the next epoch from its beginning.

    A third is left too, before the loader goes back to where the first was left.
    """
    batches = bmt.data.loader(range(SIZE - 1), 5, seed=3)  # the last samples fill no step
    first = [batch.tolist() for batch in islice(batches, 2)]
    state = batches.state_dict()
    again = [batch.tolist() for batch in batches]
    assert (batches.epoch, batches.state_dict()["samples"]) == (2, 0)
    whole = bmt.data.loader(range(SIZE - 1), 5, seed=3)
    epochs = [[batch.tolist() for batch in whole] for _ in range(2)]
    assert len(epochs[0]) == len(whole) == (SIZE - 1) // 10
    assert (first, again) == (epochs[0][:2], epochs[1])
    next(iter(batches))
    batches.load_state_dict(state)
    assert [batch.tolist() for batch in batches] == epochs[0][2:]
    return epochs


def test_a_loop_after_a_break_is_the_next_epoch() -> None:
    run_ranks(2, left_by_break)


def drawn_by_workers() -> list[list[float]]:
    batches = bmt.data.loader(Noisy(), 5, num_workers=1, collate_fn=list)
    assert batches.state_dict()["seed"] == 0
    return [[noise for batch in batches for _, noise in batch] for _ in range(2)]


def test_workers_draw_other_numbers_on_each_rank_and_in_each_epoch() -> None:
    one, two = run_ranks(2, drawn_by_workers)
    drawn = [*chain(*one, *two)]
    assert len(set(drawn)) == len(drawn) == 2 * SIZE


def after(state: dict[str, int] | None, steps: int) -> tuple[list[list[int]], dict[str, int]]:
    """This rank's batches in some steps from a state on."""
    batches = bmt.data.loader(range(SIZE), 8 // bmt.world_size(), seed=2)
    if state is not None:
        batches.load_state_dict(state)
    had = []
    for batch in islice(batches, steps):
        had.append(batch.tolist())
        state = batches.state_dict()
    assert state is not None
    return had, state


def test_goes_on_with_another_number_of_ranks() -> None:
    (whole, _) = run_ranks(1, after, None, 6)[0]
    first = run_ranks(2, after, None, 2)
    assert first[0][1] == first[1][1]
    second = run_ranks(4, after, first[0][1], 4)
    for steps, ranks in ((whole[:2], first), (whole[2:], second)):
        for step, expected in enumerate(steps):
            assert sorted(chain(*(had[step] for had, _ in ranks))) == sorted(expected)


def virtual_steps(steps: int) -> list[tuple[int, list[int]]]:
    """The shards of each step with their batches."""
    batches = iter(bmt.data.loader(range(SIZE), 3, seed=4))
    return [
        (step * 4 + shard.index, batch.tolist())
        for step in range(steps)
        for shard, batch in zip(bmt.virtual_shards(step), batches, strict=False)
    ]


def test_virtual_shards_have_the_same_samples_on_any_number_of_ranks() -> None:
    found = []
    for world in (1, 2, 3, 4):
        ranks = run_ranks(world, virtual_steps, 4, init={"virtual_shards": 4})
        found.append(sorted({number: batch for own in ranks for number, batch in own}.items()))
        assert all(pair in found[0] for own in ranks for pair in own)  # of repeated shards too
    assert all(pairs == found[0] for pairs in found)
    assert [number for number, _ in found[0]] == list(range(16))


def resumed_steps(first: int, state: dict[str, int] | None, steps: int) -> tuple[list[Any], dict[str, int]]:
    batches = bmt.data.loader(range(SIZE), 3, seed=4)
    if state is not None:
        batches.load_state_dict(state)
    ahead, found = chain.from_iterable(batches for _ in range(2)), []
    for step in range(first, first + steps):
        found += [(step * 4 + shard.index, next(ahead).tolist()) for shard in bmt.virtual_shards(step)]
    return found, batches.state_dict()


def test_virtual_shards_go_on_in_the_middle_of_an_epoch_on_another_number_of_ranks() -> None:
    init = {"virtual_shards": 4}
    [whole] = run_ranks(1, virtual_steps, 4, init=init)
    for before, after in ((1, 2), (4, 3)):
        first = run_ranks(before, resumed_steps, 0, None, 2, init=init)
        assert all(state == first[0][1] for _, state in first)
        second = run_ranks(after, resumed_steps, 2, first[0][1], 2, init=init)
        found = {number: batch for own, _ in (*first, *second) for number, batch in own}
        assert sorted(found.items()) == whole


class Stream(IterableDataset[int]):
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(range(SIZE))


class SizedStream(Stream):
    def __len__(self) -> int:
        return SIZE


def refused() -> None:
    for stream in (Stream(), SizedStream(), set(range(SIZE)), iter(range(SIZE))):
        with pytest.raises(TypeError, match=rf"length and indices, got {type(stream).__name__}.*dp_rank"):
            bmt.data.loader(stream, 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sampler: the loader decides"):
        bmt.data.loader(range(SIZE), 4, sampler=None)
    with pytest.raises(ValueError, match="at least 80 samples, 40 for each of 2 ranks.*got 50"):
        bmt.data.loader(range(SIZE), 40)
    with pytest.raises(ValueError, match="batch_size: expected at least 1"):
        bmt.data.loader(range(SIZE), 0)
    loader = bmt.data.loader(range(80), 40)
    assert len(loader) == 1 and len(loader.dataset) == 80
    state = bmt.data.loader(range(SIZE), 4, seed=1).state_dict()
    with pytest.raises(ValueError, match="seed"):
        bmt.data.loader(range(SIZE), 4, seed=1).load_state_dict({"epoch": 0, "samples": 0})
    with pytest.raises(ValueError, match="expected the seed .* 2, got 1"):
        bmt.data.loader(range(SIZE), 4, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="expected the size .* 40, got 50"):
        bmt.data.loader(range(40), 4, seed=1).load_state_dict(state)

    with pytest.raises(RuntimeError, match="expected init_distributed"):
        bmt.batches(range(SIZE), 4)


def test_what_cannot_be_loaded_is_refused() -> None:
    run_ranks(2, refused)


def refused_by_step() -> None:
    with pytest.raises(TypeError, match="length and indices, got Stream"):
        bmt.batches(Stream(), 4)
    with pytest.raises(ValueError, match="batch_size: expected at least 1"):
        bmt.batches(range(SIZE), 0)
    with pytest.raises(
        ValueError, match="at least 80 samples, 20 for each of 4 ranks or virtual shards, got 50"
    ):
        bmt.batches(range(SIZE), 20)
    assert len(bmt.batches(range(80), 20)) == 1
    with pytest.raises(ValueError, match="step: expected at least 0"):
        bmt.batches(range(80), 20)[-1]
    with pytest.raises(ValueError, match="start: expected at least 0"):
        bmt.batches(range(80), 20).sampler(-1)
    assert next(bmt.batches(range(80), 20, shuffle=False).sampler())[:3] == [0, 4, 8]


def test_batches_by_step_that_cannot_be_are_refused() -> None:
    run_ranks(1, refused_by_step, init={"virtual_shards": 4})


def by_step(steps: int) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], list[int]]]:
    """The samples of this rank's shards in each step, of `batches` and of the loader."""
    batches, loader = bmt.batches(range(SIZE), 3, seed=3), bmt.data.loader(range(SIZE), 3, seed=3)
    assert len(batches) == SIZE // 12
    found, loaded = {}, {}
    ahead = iter(DataLoader(range(SIZE), batch_sampler=batches.sampler(2), num_workers=2))
    of_loader = chain.from_iterable(loader for _ in range(2))
    for step in range(steps):
        whole = next(ahead) if step >= 2 else batches[step]
        for index in shards_of(context().topology, 4):
            shard = bmt.virtual.VirtualShard(index, 4)
            found[step, index] = shard.of(batches[step]).tolist()
            assert shard.of(whole).tolist() == found[step, index]
            loaded[step, index] = next(of_loader).tolist()
    return found, loaded


def test_batches_by_step_are_those_of_the_loader_on_any_number_of_ranks() -> None:
    [(whole, loaded)] = run_ranks(1, by_step, 7, init={"virtual_shards": 4})
    assert whole == loaded
    for world in (2, 3):
        for found, _ in run_ranks(world, by_step, 7, init={"virtual_shards": 4}):
            assert found.items() <= whole.items()
