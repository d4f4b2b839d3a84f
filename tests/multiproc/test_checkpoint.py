"""Folder checkpoints: training goes on bit for bit, on as many ranks or on others."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from harness import run_ranks
from harness.checkpoint_run import Run, differences, state_of
from harness.peaks import GIVE_BACK, peak_of

import bmtrain as bmt
from bmtrain.distributed import checkpoint
from bmtrain.distributed.checkpoint import saving, writer


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize(
    ("world", "optimizer", "dtype"),
    [(1, "adam", "float32"), (2, "adam", "float16"), (2, "offload", "bfloat16"), (4, "torch", "float32")],
)
def test_training_continues_bit_for_bit(world, optimizer, dtype, non_blocking, tmp_path):
    run_ranks(world, check_resume, str(tmp_path), optimizer, dtype, non_blocking)


def check_resume(folder: str, optimizer: str, dtype: str, non_blocking: bool) -> None:
    run = Run(optimizer, dtype)
    with torch.no_grad():
        run.model.scale += bmt.rank()  # plain parameters are each rank's own
    run.train(3)
    draws()  # of normal numbers, both kinds have one left
    may_write = threading.Event()
    if not non_blocking:
        may_write.set()

    class Late(writer.Saving):
        def write_shard(self, *arguments: Any) -> None:
            may_write.wait(60)
            super().write_shard(*arguments)

    with mock.patch.object(saving, "Saving", Late):
        handle = run.save(folder, non_blocking=non_blocking)
    losses = run.train(3)  # before anything is written in the background
    may_write.set()
    drawn = draws()
    handle.wait()
    expected = state_of(run)
    own_scale = run.model.scale.detach().clone()
    assert checkpoint.latest(folder) == handle.path == Path(folder) / "step-0000003"

    other = Run(optimizer, dtype, seed=2)
    other.train(1)
    found = other.load(folder)
    assert found.step == 3
    assert found.data == {"position": 3, "rank": bmt.rank()}
    assert found.data_of_ranks == tuple({"position": 3, "rank": r} for r in range(bmt.world_size()))
    assert found.extra["note"] == ("a", None)
    assert found.extra["table"].tolist() == [0, 1, 2]
    assert other.train(3) == losses
    assert draws() == drawn
    assert differences(expected, state_of(other)) == []
    assert torch.equal(other.model.scale, own_scale)


def draws() -> list[float]:
    """Numbers of all generators that a checkpoint restores."""
    of_numpy = numpy.random.rand(), numpy.random.randn()
    return [torch.rand(1).item(), random.random(), random.gauss(0, 1), *of_numpy]


class Own(bmt.DistributedModule):
    """A plain parameter, which each rank has for itself, beside one that all share."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shared = bmt.DistributedParameter(torch.ones(5))
        self.own = torch.nn.Parameter(torch.ones(shape))

    def forward(self, uses_own: bool) -> torch.Tensor:
        return self.shared.sum() * (self.own.sum() if uses_own else 1)


@pytest.mark.parametrize("optimizer", ["adam", "torch", "torch, then adam"])
@pytest.mark.parametrize("trained_by", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize(
    "shape", [(), (70_000,)]
)  # which begins in one chunk of the file and ends in another
def test_each_rank_gets_the_state_of_its_own_parameters_back(shape, trained_by, optimizer, tmp_path):
    run_ranks(2, check_own_state, str(tmp_path), shape, trained_by, optimizer)


def check_own_state(folder: str, shape: tuple[int, ...], trained_by: tuple[int, ...], optimizer: str) -> None:
    kinds = {"adam": bmt.optim.AdamOptimizer, "torch": torch.optim.Adam}
    model, other = Own(shape), Own(shape)
    names = optimizer.split(", then ")
    first, second = kinds[names[0]](model.parameters()), kinds[names[-1]](other.parameters())
    (model(bmt.rank() in trained_by) * (bmt.rank() + 1)).backward()
    first.step()
    checkpoint.save(folder, 1, model, first)
    checkpoint.load(folder, other, second)
    assert (model.own in first.state) == (other.own in second.state) == (bmt.rank() in trained_by)
    for key, value in first.state.get(model.own, {}).items():
        assert torch.equal(
            torch.as_tensor(second.state[other.own][key]).float(), torch.as_tensor(value).float()
        ), key


def check_empty_state(folder: str) -> None:
    model = Own((3,))
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    model(False).backward()
    optimizer.step()
    assert not optimizer.state[model.own]  # torch makes an entry of what is looked up
    checkpoint.save(folder, 1, model, optimizer)
    checkpoint.load(folder, model, optimizer)
    assert optimizer.state[model._parameters["shared"]]["step"] == 1


def test_a_state_that_was_looked_up_before_there_was_one_loads(tmp_path):
    run_ranks(2, check_empty_state, str(tmp_path))


class Rows(torch.optim.SGD):
    """Has state of shards that is not shaped like them: the largest gradient, in a tensor of one element."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"largest": p.grad.abs().max().view(1, 1)}


class Versioned(bmt.DistributedModule):
    """Finds out which version of itself has written a state dict."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.arange(1.0, 5.0))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        self.found = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


def save_rows(folder: str) -> list[float]:
    model = Versioned()
    optimizer = Rows(model.parameters(), lr=1.0)
    model.weight.square().sum().backward()
    optimizer.step()
    checkpoint.save(folder, 1, model, optimizer)
    return [state["largest"].item() for state in optimizer.state.values()]


def load_rows(folder: str) -> list[float]:
    model = Versioned()
    optimizer = Rows(model.parameters(), lr=1.0)
    if bmt.world_size() == 2:
        checkpoint.load(folder, model, optimizer)
        assert model.found == 3
    else:
        with pytest.raises(ValueError, match="optimizer 0, parameter 0: largest is not sharded like its"):
            checkpoint.load(folder, model, optimizer)
    return [state["largest"].item() for state in optimizer.state.values()]


def test_state_that_is_not_shaped_like_shards_loads_at_the_same_layout(tmp_path):
    assert run_ranks(2, save_rows, str(tmp_path)) == run_ranks(2, load_rows, str(tmp_path)) == [[8.0], [16.0]]
    assert run_ranks(1, load_rows, str(tmp_path)) == [[]]


SIZES = [
    (1, {}, False),
    (2, {}, False),
    (4, {}, False),
    (2, {"tp_size": 2}, False),
    (4, {"tp_size": 2}, False),
    (2, {"pipe_size": 2}, True),
    (4, {"pipe_size": 2, "tp_size": 2}, True),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint made at each size, of the same values."""
    folders = []
    for number, (world, init, pipeline) in enumerate(SIZES):
        folder = tmp_path_factory.mktemp(f"saved{number}")
        run_ranks(world, save_known, str(folder), pipeline, init=init)
        folders.append(str(folder))
    return folders


def parallel(pipeline: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with tensor-parallel layers of every cut, and an optimizer with known state."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = bmt.PipelineTransformerBlockList if pipeline else bmt.TransformerBlockList
            mode = "PIPE" if pipeline else "BLOCK"
            self.layers = kind([bmt.Block(Pair(), mode=mode) for _ in range(2)])
            self.outside = Pair()
            self.alone = bmt.Block(Pair(), mode=mode)

    class Pair(bmt.DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            tp = bmt.config["tp_size"]
            self.rows = bmt.DistributedParameter(torch.zeros(8 // tp, 6), tp_mode=True, tp_split_dim=0)
            self.columns = bmt.DistributedParameter(torch.zeros(6, 8 // tp), tp_mode=True, tp_split_dim=1)
            self.middle = bmt.DistributedParameter(torch.zeros(3, 4 // tp, 5), tp_mode=True, tp_split_dim=1)
            self.copies = bmt.DistributedParameter(torch.zeros(5), tp_mode=True, tp_split_dim=-1)
            self.plain = bmt.DistributedParameter(torch.zeros(7, 3))

    model = Net()
    return model, bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)


def save_known(folder: str, pipeline: bool) -> None:
    model, optimizer = parallel(pipeline)
    generator = torch.Generator().manual_seed(3)
    known = {k: torch.randn(v.shape, generator=generator) for k, v in model.state_dict().items()}
    model.load_state_dict(known)
    gathered = optimizer.state_dict(gather=True)
    for number, p in enumerate(model.parameters()):
        moments = {
            name: torch.randn(p._tp_original_shape.numel(), generator=generator)
            for name in ("exp_avg", "exp_avg_sq")
        }
        gathered["state"][number] = {"step": 7, **moments}
    optimizer.load_state_dict(gathered)
    checkpoint.save(folder, 1, model, optimizer)
    full = {f"model/{k}": v for k, v in model.state_dict().items()}
    for number, entry in optimizer.state_dict(gather=True)["state"].items():
        full.update({f"{number}/{key}": torch.as_tensor(value) for key, value in entry.items()})
    if bmt.rank() == 0:
        torch.save(full, f"{folder}/expected.pt")


@pytest.mark.parametrize("size", range(len(SIZES)))
def test_a_checkpoint_loads_at_every_size(size, saved):
    world, init, pipeline = SIZES[size]
    run_ranks(world, check_known, saved, pipeline, init=init)


def check_known(folders: list[str], pipeline: bool) -> None:
    for folder in folders:
        model, optimizer = parallel(pipeline)
        checkpoint.load(folder, model, optimizer)
        full = {f"model/{k}": v for k, v in model.state_dict().items()}
        for number, entry in optimizer.state_dict(gather=True)["state"].items():
            full.update({f"{number}/{key}": torch.as_tensor(value) for key, value in entry.items()})
        expected = torch.load(f"{folder}/expected.pt")
        assert len(expected) == 20 + 20 * 3
        assert differences(full, expected) == [], folder


def test_a_run_goes_on_at_another_size(tmp_path):
    run_ranks(4, save_after_training, str(tmp_path))
    for world in (1, 2):
        run_ranks(world, check_continues, str(tmp_path))


def save_after_training(folder: str) -> None:
    run = Run("torch", "bfloat16")
    run.train(2)
    run.save(folder)
    state = state_of(run)
    if bmt.rank() == 0:
        torch.save(state, f"{folder}/expected.pt")


def check_continues(folder: str) -> None:
    run = Run("torch", "bfloat16", seed=9)
    found = run.load(folder)
    assert (found.world_size, found.data, len(found.data_of_ranks)) == (4, None, 4)
    assert differences(state_of(run), torch.load(f"{folder}/expected.pt")) == []
    assert all(loss < 100 for loss in run.train(2))


def test_a_position_of_all_ranks_is_found_at_another_size(tmp_path):
    run_ranks(2, save_position, str(tmp_path))
    for world in (1, 2, 4):
        run_ranks(world, check_position, str(tmp_path))


def position() -> Any:
    return bmt.data.loader(range(20), batch_size=4 // bmt.world_size(), seed=1)


def save_position(folder: str) -> None:
    batches = position()
    next(iter(batches))
    checkpoint.save(folder, 1, data=batches.state_dict())


def check_position(folder: str) -> None:
    batches, other = position(), iter(position())
    batches.load_state_dict(checkpoint.load(folder).data)
    next(other)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in other]


def test_each_rank_reads_its_part_only(tmp_path):
    run_ranks(4, save_large, str(tmp_path))
    verified = run_ranks(4, count_bytes, str(tmp_path))
    whole = sum(path.stat().st_size for path in tmp_path.glob("step-*/*.bin"))
    chunk = checkpoint.manifest.CHUNK
    assert whole > 16 * chunk
    assert max(verified) <= whole / 4 + 4 * chunk  # its part, and the rest of the chunks at the ends


def save_large(folder: str) -> None:
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(1024, 2048))
    checkpoint.save(folder, 0, model)


def count_bytes(folder: str) -> int:
    readers = []

    class Counting(checkpoint.Reader):
        def __init__(self, *arguments) -> None:
            super().__init__(*arguments)
            readers.append(self)

    original, checkpoint.Reader = checkpoint.Reader, Counting
    try:
        checkpoint.load(folder, bmt.BMTrainModelWrapper(torch.nn.Linear(1024, 2048)))
    finally:
        checkpoint.Reader = original
    return readers[0].bytes_verified


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_peak_memory_of_loading_is_one_shard(world, tmp_path):
    run_ranks(2, save_layers, str(tmp_path / "large"), 8)
    run_ranks(2, save_layers, str(tmp_path / "small"), 1)
    tensor = LAYER.numel() * 4
    shard = 8 * tensor // min(world, 2)  # the rank's or a file's, the larger one
    for peak in run_ranks(world, load_under_watch, str(tmp_path), environment=GIVE_BACK, fresh=True):
        assert peak <= shard + tensor // world + (8 << 20)


LAYER = torch.Size([1024, 2048])  # 8 MiB


def layers(number: int) -> torch.nn.Module:
    return bmt.BMTrainModelWrapper(torch.nn.Sequential(*(torch.nn.Linear(*LAYER) for _ in range(number))))


def save_layers(folder: str, number: int) -> None:
    checkpoint.save(folder, 0, layers(number))


def load_under_watch(folder: str) -> int:
    model = layers(8)
    checkpoint.load(f"{folder}/small", layers(1))
    return peak_of(lambda: checkpoint.load(f"{folder}/large", model))


def test_only_as_many_are_kept_as_wanted(tmp_path):
    run_ranks(2, check_keep, str(tmp_path))


def check_keep(folder: str) -> None:
    root = Path(folder)
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(3, 2))

    def steps() -> list[str]:
        bmt.synchronize()
        found = sorted(path.name for path in root.iterdir())
        bmt.synchronize()
        return found

    for step in (1, 2, 3):
        checkpoint.save(root, step, model, keep=2)
    assert steps() == ["latest", "step-0000002", "step-0000003"]
    checkpoint.save(root, 1, model, keep=2)  # somebody went back
    assert steps() == ["latest", "step-0000001", "step-0000003"]
    assert checkpoint.latest(root) == root / "step-0000001"
    if bmt.rank() == 0:
        (root / "step-0000009").mkdir()
        (root / "step-0000009" / "shard-0-of-2-ab.bin").write_bytes(b"unfinished")
        (root / "step-0000001" / "manifest.json").write_bytes(b"damaged")
    bmt.synchronize()
    assert checkpoint.latest(root) == root / "step-0000003"
    checkpoint.prune(root, 1)
    assert "step-0000009" not in steps()
    assert checkpoint.latest(root) == root / "step-0000003"
    if bmt.rank() == 0:
        (root / "step-0000003" / "manifest.json").write_bytes(b"damaged")
    bmt.synchronize()
    before = steps()
    checkpoint.prune(root, 1)
    assert steps() == before  # nothing is known to be good: nothing goes
    assert checkpoint.latest(root) is None
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        checkpoint.load(root, model)
    for keep in (0, -1):
        with pytest.raises(ValueError, match="keep: expected at least 1"):
            checkpoint.save(root, 5, model, keep=keep)
    with pytest.raises(ValueError, match="step: expected"):
        checkpoint.save(root, -5, model)
    # An integer of another type.
    assert checkpoint.save(root, torch.tensor(4), model).path.name == "step-0000004"


def test_what_does_not_fit_changes_nothing(tmp_path):
    run_ranks(2, check_misfit, str(tmp_path))


def check_misfit(folder: str) -> None:
    run = Run()
    run.train(1)
    run.save(folder)
    for build, error, text in (
        (lambda: torch.nn.Linear(3, 2), RuntimeError, "Missing key"),
        (lambda: wider(), RuntimeError, "size mismatch for embed"),
    ):
        model = bmt.BMTrainModelWrapper(build())
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(error, match=text):
            checkpoint.load(folder, model)
        assert differences(before, model.state_dict()) == []
    run.train(1)
    before = state_of(run)
    members = run.optimizer.param_groups[0]["params"]
    few = torch.optim.SGD(list(run.model.parameters())[:2], lr=1.0)
    for optim, text in (
        (few, "optimizer 0: saved over"),
        ([few, few], "expected 1 optimizers"),
        (bmt.optim.LionOptimizer(members), "a state of LionOptimizer"),
        (
            bmt.optim.AdamOptimizer([{"params": [p]} for p in members]),
            f"expected {len(members)} parameter groups",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            checkpoint.load(folder, run.model, optim)
    assert differences(before, state_of(run)) == []
    with pytest.raises(TypeError, match="expected tensors, numbers"):
        checkpoint.save(folder, 8, run.model, data=object() if bmt.rank() == 1 else None)
    assert checkpoint.load(folder, run.model).step == 1


def wider() -> torch.nn.Module:
    model = Run().model
    model.embed = bmt.DistributedParameter(torch.zeros(8, 12))
    return model


def test_a_file_of_save_is_accepted(tmp_path):
    run_ranks(2, check_file, str(tmp_path / "model.pt"))


def check_file(path: str) -> None:
    run, other = Run(), Run(seed=4)
    bmt.save(run.model, path)
    found = checkpoint.load(path, other.model)
    assert (found.path, found.step) == (Path(path), None)
    assert differences(dict(run.model.state_dict()), dict(other.model.state_dict())) == []


def test_the_manifest_is_json_that_anybody_reads(tmp_path):
    run_ranks(2, save_large, str(tmp_path))
    told = json.loads((tmp_path / "step-0000000" / "manifest.json").read_text())["manifest"]
    assert (told["world_size"], told["step"], told["format"]) == (2, 0, 1)
    weight = told["tensors"]["model/weight"]
    file, offset, _, begin, count = weight["pieces"][0]
    data = (tmp_path / "step-0000000" / told["files"][file]["name"]).read_bytes()[offset:]
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, weight["dtype"]), count=count)
    assert (begin, count, weight["shape"]) == (0, 1024 * 1024, [2048, 1024])
    torch.manual_seed(0)
    assert torch.isfinite(values).all()


def continued(folder: str, kind: str) -> list[float]:
    """Steps once from the latest checkpoint, saves, and returns the number of steps of each parameter here."""
    block = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.LayerNorm(10)))
    model = torch.nn.ModuleList([bmt.Block(block)])
    optimizer = {"adam": bmt.optim.AdamOptimizer, "torch": torch.optim.Adam}[kind](model.parameters())
    step = 0
    if checkpoint.latest(folder) is not None:
        step = checkpoint.load(folder, model, optimizer).step
    model[0](torch.ones(2, 10)).square().sum().backward()
    optimizer.step()
    checkpoint.save(folder, step + 1, model, optimizer)
    return [float(optimizer.state[p]["step"]) for p in model.parameters() if p.numel()]


@pytest.mark.parametrize("kind", ["adam", "torch"])
def test_steps_are_counted_through_numbers_of_ranks_at_which_partitions_are_rounded(kind, tmp_path):
    """A rank of three without elements of a parameter began to count again, and the file got its number."""
    for step, world in enumerate((2, 3, 3, 1), 1):
        for steps in run_ranks(world, continued, str(tmp_path), kind):
            assert set(steps) <= {step}
