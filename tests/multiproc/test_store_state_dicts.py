"""State dicts that programs edit, override or wrap on their way in and out."""

from __future__ import annotations

import threading
from collections import OrderedDict

import pytest
import torch
from harness import run_ranks
from harness.stored_models import assert_same_state, make_model

import bmtrain as bmt
from bmtrain import store

WORLDS = (1, 2, 4)


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


class Averaged(torch.nn.Module):
    """Its state dict is a dict of its own, which it goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.averages = {"weight": torch.arange(10.0)[2:5]}

    def state_dict(self, *args, **kwargs):
        return self.averages


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_save_leaves_the_dict_of_an_overriding_state_dict_alone(non_blocking, tmp_path):
    run_ranks(1, check_own_dict, str(tmp_path / "model.pt"), non_blocking)


def check_own_dict(path: str, non_blocking: bool) -> None:
    model = Averaged()
    weight = model.averages["weight"]
    bmt.save(model, path, non_blocking=non_blocking)
    store.finish_background_save()
    assert model.averages["weight"] is weight
    assert torch.load(path)["weight"].tolist() == [2, 3, 4]


@pytest.mark.parametrize("world", (1, 2))
def test_a_save_in_the_background_has_the_tensors_inside_other_values_too(world, tmp_path):
    run_ranks(world, check_values_of_the_call, str(tmp_path / "model.pt"))


def check_values_of_the_call(path: str) -> None:
    model, counts = Counting(), torch.zeros(3)
    model.extra = {"counts": counts, "more": [(counts, 1)]}
    write, is_changed = torch.save, threading.Event()

    def save_later(state, file):
        is_changed.wait()
        write(state, file)

    torch.save = save_later
    try:
        handle = bmt.save(model, path, non_blocking=True)
        counts += 5
        is_changed.set()
        handle.wait()
    finally:
        torch.save = write
    bmt.load(model, path)
    assert model.extra["counts"].tolist() == model.extra["more"][0][0].tolist() == [0, 0, 0]


class Counting(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(3))
        self.extra: object = None

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("world", WORLDS)
def test_bc62_an_overriding_state_dict_may_use_save_to_rank0(world, tmp_path):
    run_ranks(world, check_override, str(tmp_path / "model.pt"))


class Overriding(bmt.DistributedModule):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.full((3, 4), fill))
        self.inner = OverridingChild(fill)
        self.register_module("nothing", None)
        self.blocks = bmt.TransformerBlockList([bmt.Block(Counting()) for _ in range(2)])
        self.plain = torch.nn.Linear(2, 2)
        self.plain.register_state_dict_pre_hook(lambda module, *_: torch.nn.init.constant_(module.weight, 3))
        self.plain._register_state_dict_hook(with_bias_of_7)

    def state_dict(self, destination=None, prefix="", keep_vars=False):
        return store._save_to_rank0(self, destination, prefix)


def with_bias_of_7(module, state, prefix, metadata):
    """Returns another dict, as hooks may, for a whole model."""
    if prefix == "plain.":
        return OrderedDict(
            (key, torch.full((2,), 7.0) if key == "plain.bias" else state[key]) for key in state
        )
    return None


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
        assert torch.equal(state["plain.weight"], torch.full((2, 2), 3.0))
        assert torch.equal(state["plain.bias"], torch.full((2,), 7.0))
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


class Kernel(torch.nn.Linear):
    """Has another name for its weight in files."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kernel"] = destination.pop(f"{prefix}weight")

    def _load_from_state_dict(self, state_dict, prefix, *args):
        state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state_dict, prefix, *args)


def own_names(path):
    def make():
        return torch.nn.Sequential(Kernel(3, 3), torch.nn.ModuleList([Kernel(3, 3)]))

    torch.manual_seed(0)
    plain = make()
    model = bmt.BMTrainModelWrapper(make())
    model.load_state_dict(plain.state_dict())
    bmt.save(model, path)
    saved = torch.load(path)
    assert list(saved) == list(plain.state_dict()) == ["0.bias", "0.kernel", "1.0.bias", "1.0.kernel"]
    loaded = bmt.BMTrainModelWrapper(make())
    assert bmt.load(loaded, path) == ([], [])
    assert all(isinstance(param, bmt.DistributedParameter) for param in loaded.parameters())
    for name, value in plain.state_dict().items():
        entry = loaded.state_dict()[name]
        assert torch.equal(saved[name], value) and torch.equal(entry, value)
        assert entry.untyped_storage().nbytes() == value.nbytes  # of which torch.save would write all


class Unsaved(torch.nn.Linear):
    """Cannot be saved."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        raise NotImplementedError("not saved")


def after_a_save_that_failed():
    torch.manual_seed(0)
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(Unsaved(4, 4), torch.nn.ModuleList([Unsaved(4, 4)])))
    for module in (model[0], model[1][0]):
        before = list(module.parameters())
        with pytest.raises(NotImplementedError, match="not saved"):
            module.state_dict()
        assert all(p is known for p, known in zip(module.parameters(), before, strict=True))
    model[1][0](model[0](torch.ones(2, 4))).sum().backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("world", (1, 2))
def test_a_save_that_fails_leaves_the_shards_in_their_places(world):
    run_ranks(world, after_a_save_that_failed)


def test_names_of_ones_own_survive_the_wrapper(tmp_path):
    run_ranks(2, own_names, str(tmp_path / "own.pt"))
