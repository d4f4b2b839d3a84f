"""Files: what a sharded model saves is what the plain model has, and the other way round."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from harness import Status, rank_outcomes, run_process, run_ranks

import bmtrain as bmt
from bmtrain import store

WORLDS = (1, 2, 4)


# ---- one model, plain and sharded


def modules_for(sharded: bool):
    """The base class of modules, the class of parameters, and what to wrap a layer in."""
    if sharded:
        return bmt.DistributedModule, bmt.DistributedParameter, bmt.Block
    return torch.nn.Module, torch.nn.Parameter, lambda layer: layer


def make_model(sharded: bool, seed: int = 0) -> torch.nn.Module:
    base, parameter, block = modules_for(sharded)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    class Layer(base):
        def __init__(self) -> None:
            super().__init__()
            self.weight = parameter(random(5, 3))
            self.half_precise = parameter(random(7, dtype=torch.float16))
            self.brain = parameter(random(2, 2, dtype=torch.bfloat16))
            self.register_buffer("steps", random(4).mul(100).long())
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    class Odd(base):
        _version = 3

        def __init__(self) -> None:
            super().__init__()
            self.scalar = parameter(random())
            self.one = parameter(random(1, 1))
            self.empty = parameter(random(0, 4))
            self.counts = parameter(random(6).mul(50).to(torch.uint8), requires_grad=False)
            self.register_parameter("nothing", None)
            self.register_buffer("mask", random(5) > 0)
            self.register_buffer("byte_values", random(5).mul(50).to(torch.uint8))
            self.register_buffer("zero_dim", random().double())
            self.register_buffer("no_elements", torch.zeros(0))

    class Model(base):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = parameter(random(11, 4))
            self.layers = torch.nn.ModuleList([block(Layer()) for _ in range(3)])
            self.odd = Odd()
            self.plain = torch.nn.Linear(3, 2)
            self.norm = torch.nn.BatchNorm1d(2)
            with torch.no_grad():
                for tensor in (self.plain.weight, self.plain.bias, self.norm.weight, self.norm.running_mean):
                    tensor.copy_(random(*tensor.shape))
            self.head = torch.nn.Module()
            self.head.tied = self.embedding if not sharded else None
            if sharded:
                self.head = base()
                self.head.tied = self._parameters["embedding"]

    return Model()


def assert_same_state(actual, expected) -> None:
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert actual[key].shape == value.shape, key
        assert torch.equal(actual[key], value), key


def save_model(path: str, seed: int = 0, **options) -> None:
    handle = bmt.save(make_model(True, seed), path, **options)
    if options:
        handle.wait()
        bmt.synchronize()


def load_model(path: str) -> None:
    model = make_model(True, seed=1)
    result = bmt.load(model, path)
    assert tuple(result) == ([], [])
    assert_same_state(model.state_dict(), make_model(False, seed=0).state_dict())


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
    run_ranks(world, save_model, path, **({"non_blocking": True} if non_blocking else {}))
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


# ---- load_state_dict and the wrapper


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", (1, 2))
def test_bc60_an_edited_state_dict_takes_effect_in_mid_training(world, dtype):
    run_ranks(world, check_edit_in_training, dtype)


def check_edit_in_training(dtype: torch.dtype) -> None:
    class Net(bmt.DistributedModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = bmt.DistributedParameter(torch.ones(3, 5, dtype=dtype))

        def forward(self, x):
            return (x * self.weight).float().sum()

    model = Net()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.25)
    x = torch.ones(3, 5, dtype=dtype)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        return model.state_dict()["weight"]

    assert torch.equal(step(), torch.full((3, 5), 0.75, dtype=dtype))
    state = model.state_dict()
    state["weight"] = torch.full((3, 5), 8.0)
    model.load_state_dict(state)
    assert torch.equal(model.state_dict()["weight"], torch.full((3, 5), 8.0, dtype=dtype))
    assert torch.equal(step(), torch.full((3, 5), 7.75, dtype=dtype))


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_bc61_rank_0_content_wins(world, everywhere):
    run_ranks(world, check_wrapper, everywhere)


def check_wrapper(everywhere: bool) -> None:
    real = make_model(False).state_dict()
    other = make_model(False, seed=7).state_dict() if everywhere else {}
    wrapper = store.DistributedStateDictWrapper(real if bmt.rank() == 0 else other)
    assert wrapper.copy() is wrapper
    assert list(wrapper) == list(wrapper.keys()) == list(real)
    assert len(wrapper) == len(real)
    assert "embedding" in wrapper
    assert "nothing" not in wrapper
    assert wrapper.get("nothing", 3) == 3
    assert wrapper._metadata == real._metadata
    for key, handle in wrapper.items():
        assert handle.shape == real[key].shape
        assert handle.dtype == real[key].dtype
        assert handle.numel() == real[key].numel()
        full = handle.broadcast()
        assert full.dtype == real[key].dtype
        assert torch.equal(full, real[key])
        full.zero_()  # it belongs to the caller
    for strict in (True, False):
        model, plain = make_model(True, seed=1), make_model(False, seed=1)
        assert tuple(model.load_state_dict(wrapper, strict)) == ([], [])
        assert_same_state(model.state_dict(), real)
        assert tuple(plain.load_state_dict(wrapper, strict=strict)) == ([], [])
        assert_same_state(plain.state_dict(), real)


@pytest.mark.parametrize("world", (1, 2))
def test_values_that_are_no_tensors_travel_too(world, tmp_path):
    run_ranks(world, check_other_values, str(tmp_path / "model.pt"))


def check_other_values(path: str) -> None:
    model = Counting()
    extra = {
        "seen": (1, 2.5, None, True),
        3: ["x", torch.arange(3)],
        "nested": OrderedDict(a=torch.ones(2, 0)),
    }
    model.extra = extra if bmt.rank() == 0 else None
    bmt.save(model, path)
    model.extra = None
    bmt.load(model, path)
    assert str(model.extra) == str(extra)
    assert type(model.extra["nested"]) is OrderedDict
    with pytest.raises(TypeError, match="expected tensors, numbers"):
        store.DistributedStateDictWrapper({"a": object()} if bmt.rank() == 0 else {})
    with pytest.raises(TypeError, match="expected a mapping on rank 0, got list"):
        store.DistributedStateDictWrapper([] if bmt.rank() == 0 else {})


class Counting(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(3))
        self.extra: object = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


# ---- overridden state dicts


@pytest.mark.parametrize("world", WORLDS)
def test_bc62_an_overriding_state_dict_may_use_save_to_rank0(world, tmp_path):
    run_ranks(world, check_override, str(tmp_path / "model.pt"))


class Overriding(bmt.DistributedModule):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.full((3, 4), fill))
        self.inner = OverridingChild(fill)
        self.blocks = bmt.TransformerBlockList([bmt.Block(Counting()) for _ in range(2)])
        self.plain = torch.nn.Linear(2, 2)

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        return store._save_to_rank0(self, destination, prefix)


class OverridingChild(bmt.DistributedModule):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.bias = bmt.DistributedParameter(torch.full((5,), fill))

    def state_dict(self, *args, **kwargs):
        raise AssertionError("not to be called")


def check_override(path: str) -> None:
    model = Overriding(2.0)
    bmt.save(model, path)
    loaded = Overriding(1.0)
    bmt.load(loaded, path)
    state = loaded.state_dict()
    if bmt.rank() == 0:
        assert list(state) == list(torch.load(path)) == [
            "weight", "inner.bias", "blocks.0.weight", "blocks.0._extra_state", "blocks.1.weight",
            "blocks.1._extra_state", "plain.weight", "plain.bias",
        ]  # fmt: skip
        assert torch.equal(state["weight"], torch.full((3, 4), 2.0))
        assert torch.equal(state["inner.bias"], torch.full((5,), 2.0))
    else:
        assert not state
    given = OrderedDict(first=1)
    result = store._save_to_local_rank0(model, given, "x.")
    assert result is given
    assert ("x.inner.bias" in given) == (bmt.config["local_rank"] == 0)


@pytest.mark.parametrize("world", (1, 2))
def test_save_to_infer_model_gives_one_block_at_a_time(world):
    run_ranks(world, check_infer_model)


def check_infer_model() -> None:
    class Infer:
        def __init__(self) -> None:
            self.received: list[dict] = []

        def load_layer_state_dict(self, state: dict) -> None:
            self.received.append(dict(state))

    infer = Infer()
    store._save_to_infer_model(make_model(True), infer)
    expected = make_model(False).state_dict()
    if bmt.config["local_rank"] != 0:
        assert not infer.received
        return
    assert [next(iter(state)) for state in infer.received] == [
        "layers.0.weight", "layers.1.weight", "layers.2.weight", "embedding",
    ]  # fmt: skip
    together = {key: value for state in infer.received for key, value in state.items()}
    assert set(together) == set(expected)
    assert all(torch.equal(together[key], value) for key, value in expected.items())


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


def same_error(outcomes, name: str) -> str:
    assert {outcome.status for outcome in outcomes} == {Status.RAISED}, outcomes
    assert {outcome.error for outcome in outcomes} == {name}
    (message,) = {outcome.message for outcome in outcomes}
    return message


def load_into_model(path: str) -> None:
    bmt.load(make_model(True), path)


def test_a_missing_file_is_the_same_error_on_all_ranks(tmp_path):
    path = str(tmp_path / "nothing.pt")
    message = same_error(rank_outcomes(4, load_into_model, path, timeout=20), "FileNotFoundError")
    assert path in message


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 and no more"])
def test_an_unreadable_file_is_the_same_error_on_all_ranks(content, tmp_path):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    message = same_error(rank_outcomes(2, load_into_model, str(path), timeout=20), "UnreadableFileError")
    assert str(path) in message


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("/nonexistent/should-not-be-tried",)


@pytest.mark.parametrize("value", [Harmful(), [1, 2]])
def test_code_in_a_file_is_refused_by_name(value, tmp_path):
    path = str(tmp_path / "model.pt")
    torch.save({"a": value} if isinstance(value, Harmful) else value, path)
    message = same_error(rank_outcomes(2, load_into_model, path, timeout=20), "UnreadableFileError")
    assert ("mkdir" in message) if isinstance(value, Harmful) else ("got list" in message)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_save_that_rank_0_cannot_do_is_the_same_error_on_all_ranks(non_blocking, tmp_path):
    path = str(tmp_path / "no folder" / "model.pt")
    options = {"non_blocking": True} if non_blocking else {}
    message = same_error(rank_outcomes(2, save_model, path, timeout=20, **options), "FileNotFoundError")
    assert path in message


@pytest.mark.parametrize("world", (1, 2))
def test_a_save_that_fails_half_way_leaves_the_old_file(world, tmp_path):
    run_ranks(world, check_failing_write, str(tmp_path / "model.pt"))
    assert os.listdir(tmp_path) == ["model.pt"]
    run_ranks(world, load_model, str(tmp_path / "model.pt"))


def check_failing_write(path: str) -> None:
    model = make_model(True)
    bmt.save(model, path)
    write = torch.save

    def failing(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    torch.save = failing
    try:
        with pytest.raises(OSError, match="No space left"):
            bmt.save(make_model(True, seed=3), path)
        for surfacing in (lambda: bmt.save(model, path), lambda: bmt.load(model, path)):
            torch.save = failing
            bmt.save(make_model(True, seed=3), path, non_blocking=True)  # its error comes later
            torch.save = write if bmt.rank() else failing
            with pytest.raises(OSError, match="No space left"):
                surfacing()
        bmt.load(model, path)  # the error was raised once
    finally:
        torch.save = write


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


def test_a_background_failure_at_the_end_makes_the_program_fail(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, bmtrain as bmt\n"
        "bmt.init_distributed()\n"
        "def failing(state, file): raise OSError(28, 'No space left on device')\n"
        "torch.save = failing\n"
        f"bmt.save(torch.nn.Linear(2, 2), {str(tmp_path / 'model.pt')!r}, non_blocking=True)\n"
    )
    result = run_process([sys.executable, script], environment=single_process(), check=False)
    assert result.returncode == 1
    assert "No space left on device" in result.stdout


def test_bad_arguments(tmp_path):
    run_ranks(1, check_bad_arguments)


def check_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got dict"):
        bmt.save({}, "x.pt")
    with pytest.raises(TypeError, match="file_name: expected a path, got NoneType"):
        bmt.load(torch.nn.Linear(1, 1), None)
    with pytest.raises(IsADirectoryError):
        bmt.save(torch.nn.Linear(1, 1), "/tmp")


# ---- killed in the middle


def single_process() -> dict[str, str]:
    root = str(Path(bmt.__file__).parents[1])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert not any(name in os.environ for name in names)
    return {"PYTHONPATH": root}


SAVER = """
import sys, torch, bmtrain as bmt
bmt.init_distributed()
model = torch.nn.Linear(700, 700)
for fill in range(1, 10_000):
    for p in model.parameters():
        p.data.fill_(fill)
    bmt.save(model, sys.argv[1])
    print(fill, flush=True)
"""


def test_bc63_a_kill_at_any_moment_leaves_the_old_or_the_new_file(tmp_path):
    script, path = tmp_path / "saver.py", tmp_path / "files" / "model.pt"
    path.parent.mkdir()
    script.write_text(SAVER)
    for delay in (0.0, 0.003, 0.011):
        process = subprocess.Popen(
            [sys.executable, script, path], stdout=subprocess.PIPE, env={**os.environ, **single_process()}
        )
        try:
            assert process.stdout is not None
            for _ in range(3):
                last = int(process.stdout.readline())
            time.sleep(delay)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        state = torch.load(path, weights_only=True)
        values = {float(value) for tensor in state.values() for value in (tensor.min(), tensor.max())}
        assert len(values) == 1
        assert values.pop() >= last
    leftovers = [name for name in os.listdir(path.parent) if name != "model.pt"]
    assert len(leftovers) <= 1  # the next save removes what the last one left


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
