"""Files: what a sharded model saves is what the plain model has, and the other way round."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from harness import run_ranks
from harness.stored_models import assert_same_state, load_model, make_model, save_model

import bmtrain as bmt
from bmtrain import store
from bmtrain.distributed import checkpoint

WORLDS = (1, 2, 4)


# ---- one model, plain and sharded


@pytest.mark.parametrize("world", WORLDS)
def test_bc57_state_dict_is_that_of_the_plain_model(world):
    run_ranks(world, check_state_dict)


def check_state_dict() -> None:
    state = make_model(True).state_dict()
    expected = make_model(False).state_dict()
    assert_same_state(state, expected)
    assert state._metadata == expected._metadata
    assert all(type(value) is torch.Tensor for value in state.values())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in state.values())


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_bc58_bc64_files_go_between_plain_torch_and_any_number_of_ranks(world, non_blocking, tmp_path):
    path = str(tmp_path / "model.pt")
    run_ranks(world, save_model, path, non_blocking=non_blocking)
    assert os.listdir(tmp_path) == ["model.pt"]
    state = torch.load(path, weights_only=True)
    expected = make_model(False).state_dict()
    assert_same_state(state, expected)
    assert state._metadata == expected._metadata
    assert state["head.tied"].data_ptr() == state["embedding"].data_ptr()  # tied weights lie in the file once
    twin = make_model(False, seed=1)
    twin.load_state_dict(state)
    assert_same_state(twin.state_dict(), expected)
    for other in WORLDS:
        run_ranks(other, load_model, path)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_bc58_a_file_of_torch_loads(world, legacy, tmp_path):
    path = str(tmp_path / "model.pt")
    torch.save(make_model(False).state_dict(), path, _use_new_zipfile_serialization=not legacy)
    run_ranks(world, load_model, path)


# ---- strictness


@pytest.mark.parametrize("world", WORLDS)
def test_bc59_missing_and_unexpected_keys(world, tmp_path):
    path = str(tmp_path / "model.pt")
    state = make_model(False).state_dict()
    del state["layers.1.half_precise"], state["plain.bias"], state["odd.mask"]
    state["layers.1.other"] = torch.ones(2)
    state["stranger"] = torch.ones(2)
    torch.save(state, path)
    run_ranks(world, check_strictness, path)


def check_strictness(path: str) -> None:
    missing = {"layers.1.half_precise", "plain.bias", "odd.mask"}
    unexpected = {"layers.1.other", "stranger"}
    model = make_model(True, seed=1)
    result = bmt.load(model, path, strict=False)
    assert set(result.missing_keys) == missing
    assert set(result.unexpected_keys) == unexpected
    state = model.state_dict()
    old, new = make_model(False, seed=1).state_dict(), make_model(False).state_dict()
    for key, value in state.items():
        assert torch.equal(value, (old if key in missing else new)[key]), key
    for call in (
        lambda: bmt.load(make_model(True), path),
        lambda: make_model(True).load_state_dict(torch.load(path)),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        assert all(key in str(caught.value) for key in missing | unexpected)


@pytest.mark.parametrize("world", (1, 2))
def test_a_shape_that_differs_is_named_and_nothing_of_it_copied(world, tmp_path):
    path = str(tmp_path / "model.pt")
    state = make_model(False).state_dict()
    state["layers.0.weight"] = torch.ones(15)
    state["odd.scalar"] = torch.ones(2)
    torch.save(state, path)
    run_ranks(world, check_shapes, path)


def check_shapes(path: str) -> None:
    model = make_model(True, seed=1)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers.0.weight.*\(15,\).*\(5, 3\)") as caught:
        bmt.load(model, path)
    assert "size mismatch for odd.scalar" in str(caught.value)
    after, before = model.state_dict(), make_model(False, seed=1).state_dict()
    for key in ("layers.0.weight", "odd.scalar"):
        assert torch.equal(after[key], before[key])


# ---- memory


def test_only_rank_0_holds_the_full_state(tmp_path):
    run_ranks(2, check_memory, str(tmp_path / "model.pt"))


def check_memory(path: str) -> None:
    class Many(bmt.DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            for index in range(8):
                self.register_parameter(f"p{index}", bmt.DistributedParameter(torch.randn(1 << 18)))

    model = Many()
    kept: list[int] = []
    full = store._full_state(model, copy=False)
    kept.append(sum(value.nbytes for value in full.values() if value.device.type != "meta"))
    assert kept[0] == ((8 << 20) if bmt.rank() == 0 else 0)
    bmt.save(model, path)
    comm = bmt.config["comm"]
    comm.reset_traffic()
    bmt.load(model, path)
    sent = sum(size for _, size in comm.traffic().values())
    assert sent < ((4 << 20) + 20_000 if bmt.rank() == 0 else 20_000)  # rank 1's half, and the names


# ---- what can go wrong


@pytest.mark.parametrize("world", (1, 2))
def test_a_save_in_the_background_has_the_values_of_its_call(world, tmp_path):
    run_ranks(world, check_background, str(tmp_path / "model.pt"))


def check_background(path: str) -> None:
    model = make_model(True)
    write, started = torch.save, []

    def slow(state, file):
        started.append(1)
        time.sleep(0.3)
        write(state, file)

    torch.save = slow
    try:
        handle = bmt.save(model, path, non_blocking=True)
        if bmt.rank() == 0:
            assert bmt.config["finish_save"] is False
            assert bmt.config["save_thread"] is not None
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data.zero_()
        handle.wait()
        assert bmt.config["finish_save"] is True
        bmt.synchronize()
        load_model(path)
        bmt.save(model, path, non_blocking=True)
        bmt.load(model, path)  # waits for it
        assert model.state_dict()["embedding"].count_nonzero() == 0
    finally:
        torch.save = write


class Graph(bmt.DistributedModule):
    """A sparse matrix beside a parameter, as of a graph network."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(4))
        self.register_buffer("edges", torch.eye(3).to_sparse())


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("world", (1, 2))
def test_sparse_buffers_are_saved_as_they_are_then(world, non_blocking, tmp_path):
    path = tmp_path / "model.pt"
    run_ranks(world, save_and_change_edges, str(path), non_blocking)
    found = torch.load(path)
    assert torch.equal(found["edges"].to_dense(), torch.eye(3))
    assert torch.equal(found["weight"], torch.ones(4))


def save_and_change_edges(path: str, non_blocking: bool) -> None:
    write, may_write = torch.save, threading.Event()
    if not non_blocking:
        may_write.set()
    torch.save = lambda state, file: (may_write.wait(), write(state, file))
    try:
        model = Graph()
        handle = bmt.save(model, path, non_blocking=non_blocking)
        model.edges._values().zero_()
        may_write.set()
        if handle is not None:
            handle.wait()
    finally:
        torch.save = write


class Turning(torch.nn.Module):
    """Buffers that are one's conjugate and the negative of its angle: the same memory, read otherwise."""

    def __init__(self, angles: torch.Tensor) -> None:
        super().__init__()
        forward = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("forth", forward)
        self.register_buffer("back", forward.conj())
        self.register_buffer("down", self.back.imag)


FORMATS = {
    "file": (bmt.save, bmt.load),
    "safetensors": (bmt.weights.save, bmt.weights.load),
    "folder": (
        lambda model, path: checkpoint.save(path, 1, model),
        lambda model, path: checkpoint.load(path, model),
    ),
    "torch's folder": (
        lambda model, path: (
            bmt.rank() or torch_dcp.save({"model": model.state_dict()}, checkpoint_id=path, no_dist=True)
        ),
        lambda model, path: bmt.dcp.load(path, model),
    ),
    "folder for torch": (
        lambda model, path: bmt.dcp.save(path, model),
        lambda model, path: torch_dcp.load({"model": model.state_dict()}, checkpoint_id=path, no_dist=True),
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("world", (1, 2))
def test_conjugates_are_carried_out(world, kind, tmp_path):
    run_ranks(world, check_conjugates, str(tmp_path / "model"), kind)


def check_conjugates(path: str, kind: str) -> None:
    save, load = FORMATS[kind]
    model, other = Turning(torch.tensor([0.5, 1.5])), Turning(torch.zeros(2))
    other.back, other.down = other.back.resolve_conj(), other.down.resolve_neg()
    save(model, path)
    bmt.synchronize()
    load(other, path)
    assert torch.equal(other.forth, model.forth)
    assert torch.equal(other.back, model.back)
    assert torch.equal(other.down, model.down)


def test_bad_arguments(tmp_path):
    run_ranks(1, check_bad_arguments)


def check_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got dict"):
        bmt.save({}, "x.pt")
    with pytest.raises(TypeError, match="file_name: expected a path, got NoneType"):
        bmt.load(torch.nn.Linear(1, 1), None)
    with pytest.raises(IsADirectoryError):
        bmt.save(torch.nn.Linear(1, 1), "/tmp")


# ---- other layouts


LAYOUTS = [
    (1, {}),
    (2, {"pipe_size": 2}),
    (2, {"tp_size": 2}),
    (4, {"pipe_size": 2, "tp_size": 2}),
    (4, {"tp_size": 2}),
]


class ParallelLayer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.up = bmt.nn.ColumnParallelLinear(6, 8)
        self.down = bmt.nn.RowParallelLinear(8, 6)
        self.register_buffer("scale", torch.zeros(3))


class ParallelModel(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = bmt.PipelineTransformerBlockList([ParallelLayer() for _ in range(3)])
        self.embedding = bmt.nn.VPEmbedding(10, 6, dtype=torch.float32)


def full_parallel_state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"up.weight": (8, 6), "up.bias": (8,), "down.weight": (6, 8), "down.bias": (6,)}
    names = {f"layers.{i}.scale": (3,) for i in range(3)}
    names |= {f"layers.{i}.{name}": shape for i in range(3) for name, shape in shapes.items()}
    names["embedding.weight"] = (10, 6)
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def load_and_save_again(source: str, target: str) -> list[dict]:
    model = ParallelModel()
    assert tuple(bmt.load(model, source)) == ([], [])
    state, expected = model.state_dict(), full_parallel_state()
    assert set(state) == set(expected)
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    bmt.save(model, target)
    return bmt.inspect.inspect_model(model, "*")


def test_bc64_bc67_files_and_statistics_do_not_depend_on_the_layout(tmp_path):
    source = str(tmp_path / "0.pt")
    torch.save(full_parallel_state(), source)
    reference = None
    for number, (world, init) in enumerate(LAYOUTS, 1):
        target = str(tmp_path / f"{number}.pt")
        for rows in run_ranks(world, load_and_save_again, source, target, init=init):
            reference = reference or rows
            assert rows == reference
        assert_same_values(torch.load(target), full_parallel_state())
        source = target


def assert_same_values(actual, expected) -> None:
    assert set(actual) == set(expected)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
