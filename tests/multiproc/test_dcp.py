"""Checkpoints of torch.distributed.checkpoint: from FSDP2's standard recipe, on any number of ranks, and back to it."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from harness import run_ranks
from harness.checkpoint_run import Run, differences, state_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import bmtrain as bmt
from bmtrain._files.torch_folder import TorchFolder
from bmtrain._files.torch_table import read_table
from bmtrain.errors import UnreadableFileError

State = dict[str, Any]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Layers, a buffer, a tied head, a frozen parameter, and one of a single element."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.temperature = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.arange(5))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].norm.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.temperature


def groups(model: nn.Module) -> list[State]:
    """Two groups with options of their own, without the frozen parameter."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": trained[:3], "lr": 0.02},
        {"params": trained[3:], "weight_decay": 0.03, "betas": (0.8, 0.99)},
    ]


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model((torch.arange(8).view(2, 4) * (step + 3)) % 11).square().mean().backward()
        optimizer.step()


def start_torch(folder: str) -> None:
    """A process group of torch on the ranks of the test, once."""
    import torch.distributed as dist

    if not dist.is_initialized():
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)


def sharded_by_torch(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(groups(model), lr=0.01)


def whole(value: Any) -> Any:
    """Full tensors on the host in place of DTensors, in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def torch_saves(folder: str, flat: bool = False) -> tuple[State, State]:
    """The recipe of torch's tutorial on saving; the full state."""
    start_torch(folder)
    model, optimizer = sharded_by_torch(1)
    train(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state, optim = get_state_dict(model, optimizer, options=options)
    torch_dcp.save({"model": state, "optim": optim}, checkpoint_id=f"{folder}/theirs")
    return whole(state), whole(optim)


def torch_loads(folder: str) -> tuple[State, State]:
    """The recipe of torch's tutorial on loading; the full state."""
    start_torch(folder)
    model, optimizer = sharded_by_torch(2)
    state, optim = get_state_dict(model, optimizer)
    torch_dcp.load({"model": state, "optim": optim}, checkpoint_id=f"{folder}/ours")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)
    state, optim = get_state_dict(model, optimizer)
    return whole(state), whole(optim)


def make_ours(kind: str, seed: int = 7, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = bmt.BMTrainModelWrapper(Net().to(dtype))
    if kind == "torch":
        return model, torch.optim.AdamW(groups(model), lr=1.0)
    made = bmt.optim.AdamOffloadOptimizer if kind == "offload" else bmt.optim.AdamOptimizer
    return model, made(groups(model), lr=1.0, weight_decay=0.5, decoupled=True)


def full_state(model: nn.Module, optimizer: Any) -> tuple[State, State]:
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    return model.state_dict(), manager.state_dict(gather_opt=True)["optimizers"][0]


def load_and_save(folder: str, kind: str, **options: Any) -> tuple[State, State]:
    model, optimizer = make_ours(kind)
    assert bmt.dcp.load(f"{folder}/theirs", model, optimizer, **options) == ([], [])
    bmt.dcp.save(f"{folder}/ours", model, optimizer)
    return full_state(model, optimizer)


def same(left: Any, right: Any) -> bool:
    """Equal, tensors bit for bit."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[State, State]]:
    """A folder with a checkpoint of FSDP2 on 2 ranks, and its state."""
    folder = tmp_path_factory.mktemp("fsdp")
    state = run_ranks(2, torch_saves, str(folder), init=False, fresh=True)[0]
    return folder, state


def copy_of(theirs: tuple[Path, tuple[State, State]], tmp_path: Path) -> Path:
    shutil.copytree(theirs[0] / "theirs", tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.mark.parametrize("kind", ("torch", "bmtrain", "offload"))
@pytest.mark.parametrize("world", (1, 2, 4))
def test_from_fsdp2_to_us_and_back(world: int, kind: str, theirs: Any, tmp_path: Path) -> None:
    copy_of(theirs, tmp_path)
    state, optim = theirs[1]
    for own, own_optim in run_ranks(world, load_and_save, str(tmp_path), kind):
        assert same(dict(own), state)
        names = [name for group in optim["param_groups"] for name in group["params"]]
        assert len(own_optim["state"]) == len(names)
        for number, name in enumerate(names):
            for key, value in optim["state"][name].items():
                assert same(
                    torch.as_tensor(own_optim["state"][number][key]).flatten().float(), value.flatten()
                )
        for own_group, group in zip(own_optim["param_groups"], optim["param_groups"], strict=True):
            assert all(own_group[key] == group[key] for key in ("lr", "betas", "eps", "weight_decay"))
    for found in run_ranks(2, torch_loads, str(tmp_path), init=False, fresh=True):
        assert same(found, (state, optim))


def load_counting(folder: str) -> tuple[int, int]:
    made: list[TorchFolder] = []
    original = TorchFolder.check_sizes

    def noting(self: TorchFolder) -> None:
        made.append(self)
        original(self)

    TorchFolder.check_sizes = noting  # type: ignore[method-assign]
    try:
        model, optimizer = make_ours("bmtrain")
        bmt.dcp.load(folder, model, optimizer)
    finally:
        TorchFolder.check_sizes = original  # type: ignore[method-assign]
    held = sum(p.nbytes for p in model.parameters()) * 3
    return made[0].bytes_read - held, sum(len(place.boxes) for place in made[0].places.values())


@pytest.mark.parametrize("world", (1, 4))
def test_each_rank_reads_the_bytes_of_its_own_shards(world: int, theirs: Any) -> None:
    for beside, boxes in run_ranks(world, load_counting, str(theirs[0] / "theirs")):
        # Headers of archives, the buffer, and the tied weight under its second name.
        assert 0 < beside <= 2500 * boxes


def test_a_flattened_optimizer_state_and_nested_keys_load(tmp_path: Path) -> None:
    state, optim = run_ranks(2, torch_saves, str(tmp_path), flat=True, init=False, fresh=True)[0]
    for own, own_optim in run_ranks(2, load_and_save, str(tmp_path), "torch"):
        assert same(dict(own), state)
        assert [group["lr"] for group in own_optim["param_groups"]] == [0.02, 0.01]
        first = optim["state.temperature.exp_avg"]
        assert same(own_optim["state"][0]["exp_avg"], first.flatten())
    other = tmp_path / "nested"
    other.mkdir()
    run_ranks(2, save_nested, str(other))
    found = torch_dcp_to_plain(other / "app")
    assert set(found) == {"app"} and set(found["app"]) == {"model", "optim"}
    assert found["app"]["optim"]["param_groups"][1]["betas"] == (0.8, 0.99)


def save_nested(folder: str) -> None:
    model, optimizer = make_ours("bmtrain")
    train(model, optimizer)
    expected = full_state(model, optimizer)
    for name, keys in (
        ("app", {"model_key": "app.model", "optim_key": "app.optim"}),
        ("flat", {"model_key": ""}),
    ):
        bmt.dcp.save(f"{folder}/{name}", model, optimizer, **keys)
        other = make_ours("offload", seed=9)
        assert bmt.dcp.load(f"{folder}/{name}", *other, **keys) == ([], [])
        found = full_state(*other)
        assert same(expected[0], found[0])
        assert same(expected[1]["state"][0]["exp_avg"], found[1]["state"][0]["exp_avg"])


def torch_dcp_to_plain(folder: Path) -> State:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, folder.with_suffix(".pt"))
    return torch.load(folder.with_suffix(".pt"), weights_only=True)  # type: ignore[no-any-return]


# ---- masters, tensor parallelism, what a state dict may hold beside parameters


def save_masters(folder: str) -> tuple[State, State]:
    model, optimizer = make_ours("bmtrain", dtype=torch.bfloat16)
    train(model, optimizer)
    with torch.no_grad():
        model._parameters["temperature"].fill_(0.75)  # after the last step: the value counts, not the master
    bmt.dcp.save(folder, model, optimizer)
    other = make_ours("offload", seed=9, dtype=torch.bfloat16)
    bmt.dcp.load(folder, *other)
    before, after = full_state(model, optimizer), full_state(*other)
    assert same(dict(before[0]), dict(after[0]))
    return before[0], after[1]


def test_masters_are_the_weights_of_the_file(tmp_path: Path) -> None:
    for state, optim in run_ranks(2, save_masters, str(tmp_path / "bf16")):
        stored = torch_dcp_to_plain(tmp_path / "bf16")
        found = stored["model"]
        assert all(
            entry.keys() == {"step", "exp_avg", "exp_avg_sq"} for entry in stored["optim"]["state"].values()
        )
        names = [name for name, _ in Net().named_parameters() if name != "layers.0.norm.bias"]
        for name, value in found.items():
            if name in names:
                assert value.dtype == torch.float32 and same(value.to(torch.bfloat16), state[name])
                assert same(optim["state"][names.index(name)]["_param_fp32"], value.flatten())
        assert found["temperature"].item() == 0.75
        assert found["layers.0.norm.bias"].dtype == torch.bfloat16
        assert not same(found["embed.weight"], state["embed.weight"].float())


def save_unused(folder: str) -> None:
    model, optimizer = make_ours("bmtrain")
    model.layers[0](torch.arange(12.0).view(2, 6)).sum().backward()
    optimizer.step()
    bmt.dcp.save(folder, model, optimizer)


def test_parameters_without_a_gradient_have_a_state_of_zeros(tmp_path: Path) -> None:
    run_ranks(2, save_unused, str(tmp_path / "unused"))
    state = torch_dcp_to_plain(tmp_path / "unused")["optim"]["state"]
    assert state.keys() == {name for name, p in Net().named_parameters() if p.requires_grad}
    for name, entry in state.items():
        assert {value.any().item() for value in entry.values()} == {name.startswith("layers.0.")}, name


def save_decay(folder: str, is_decoupled: bool) -> None:
    model = make_ours("bmtrain")[0]
    optimizer = bmt.optim.AdamOptimizer(groups(model), weight_decay=0.5, decoupled=is_decoupled)
    train(model, optimizer, 1)
    bmt.dcp.save(folder, model, optimizer)


@pytest.mark.parametrize("is_decoupled", (True, False))
def test_torch_is_told_the_kind_of_weight_decay(is_decoupled: bool, tmp_path: Path) -> None:
    run_ranks(2, save_decay, str(tmp_path / "ours"), is_decoupled)
    for group in torch_dcp_to_plain(tmp_path / "ours")["optim"]["param_groups"]:
        assert group["decoupled_weight_decay"] is is_decoupled


class Mixed(nn.Module):
    """Layers in bf16 and in fp32, of which one parameter is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)
        self.high.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(x.bfloat16()).float())


def save_mixed(folder: str) -> None:
    """Without ``decoupled=`` our Adam decays the ones as AdamW, the others as Adam."""

    def make(**options: Any) -> tuple[nn.Module, Any]:
        model = bmt.BMTrainModelWrapper(Mixed())
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.01, **options)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    saved, loaded = make(), make()
    bmt.dcp.save(f"{folder}/plain", *saved)
    bmt.dcp.load(f"{folder}/plain", *loaded)
    assert same(full_state(*saved)[1], full_state(*loaded)[1])
    with pytest.raises(ValueError, match="decays its 16-bit parameters as AdamW and its fp32 ones as Adam"):
        bmt.dcp.save(f"{folder}/both", *make(weight_decay=0.1))
    bmt.dcp.save(f"{folder}/decoupled", *make(weight_decay=0.1, decoupled=True))
    with pytest.raises(ValueError, match="the optimizer's is not: make it with decoupled=True"):
        bmt.dcp.load(f"{folder}/decoupled", *make(weight_decay=0.1))


def test_parameters_of_two_dtypes_have_one_kind_of_weight_decay(tmp_path: Path) -> None:
    run_ranks(2, save_mixed, str(tmp_path))
    stored = torch_dcp_to_plain(tmp_path / "plain")["optim"]["state"]
    assert stored.keys() == {"low.weight", "low.bias", "high.weight"}


#: Sizes of runs, one after the other: ranks, further sizes, whether the layers are a pipeline.
SIZES: list[tuple[int, dict[str, int], bool]] = [
    (2, {}, False),
    (4, {"pipe_size": 2, "tp_size": 2}, True),
    (1, {}, False),
    (2, {"pipe_size": 2}, True),
    (3, {}, False),
]


def carry(folder: str, number: int, optimizer: str, dtype: str, pipeline: bool) -> State:
    """Loads what the run before has saved, except that the first trains; saves it again."""
    run = Run(optimizer, dtype, pipeline, seed=number)
    if number:
        bmt.dcp.load(f"{folder}/{number - 1}", run.model, run.manager)
    else:
        run.train(2)
    bmt.dcp.save(f"{folder}/{number}", run.model, run.manager)
    state = state_of(run)
    # The optimizer's second parameter, of no elements, gets no gradient: zeros are written for it.
    carried = {key: value for key, value in state.items() if key.startswith(("model/", "optimizer/"))}
    return {key: value for key, value in carried.items() if not key.startswith("optimizer/1/")}


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ("adam", "float16"),
        ("offload", "bfloat16"),
        ("torch", "float32"),
        ("torch", "bfloat16"),
        ("sgd", "float32"),
    ],
)
def test_any_size_carries_on_from_any_other(optimizer: str, dtype: str, tmp_path: Path) -> None:
    expected: State = {}
    for number, (world, init, pipeline) in enumerate(SIZES):
        for state in run_ranks(world, carry, str(tmp_path), number, optimizer, dtype, pipeline, init=init):
            expected = expected or state
            assert differences(expected, state) == [], number


def carry_by(folder: str, number: int, kind: str) -> State:
    """The same with a Net and optimizers that hold something else than two fp32 moments."""
    torch.manual_seed(number)
    model = bmt.BMTrainModelWrapper(Net())
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "muon":
        optimizer: Any = bmt.optim.MuonOptimizer(parameters, lr=0.01)
    else:
        optimizer = bmt.optim.AdamOptimizer(parameters, lr=0.01, state_dtype=kind)
    if number:
        bmt.dcp.load(f"{folder}/made/{number - 1}", model, optimizer)
    else:
        train(model, optimizer)
    bmt.dcp.save(f"{folder}/made/{number}", model, optimizer)
    return full_state(model, optimizer)[1]["state"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ("muon", "bfloat16", "int8"))
def test_other_states_carry_on(kind: str, tmp_path: Path) -> None:
    expected: State = {}
    for number, world in enumerate((2, 2, 1)):
        for state in run_ranks(world, carry_by, str(tmp_path), number, kind):
            expected = expected or state
            # Blocks of 32 elements with one exponent are cut anew where the shards are.
            assert same(state, expected) or (kind == "int8" and world == 1), number


class Parallel(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.columns = bmt.nn.ColumnParallelLinear(6, 8)
        self.rows = bmt.nn.RowParallelLinear(8, 6)
        self.empty = bmt.DistributedParameter(torch.zeros(0, 3))
        self.kept: Any = "a"

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def load_parallel(folder: str, saves: bool = False) -> State:
    model = Parallel()
    assert bmt.dcp.load(f"{folder}/{'plain' if saves else 'ours'}", model) == ([], [])
    assert model.kept == [2, 3.0]
    if saves:
        bmt.dcp.save(f"{folder}/ours", model)
    return dict(model.state_dict())


def test_tensor_parallel_slices_are_boxes_of_the_whole(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = {
        "columns.weight": torch.randn(8, 6), "columns.bias": torch.randn(8), "rows.weight": torch.randn(8, 6).T,
        "rows.bias": torch.randn(6), "empty": torch.zeros(0, 3), "_extra_state": [2, 3.0],
    }  # fmt: skip
    torch_dcp.save({"model": state}, checkpoint_id=tmp_path / "plain", no_dist=True)
    for own in run_ranks(4, load_parallel, str(tmp_path), True, init={"tp_size": 2}):
        assert same({key: own[key] for key in state}, state)
    assert same(torch_dcp_to_plain(tmp_path / "ours")["model"], state)
    for world, init in ((3, {}), (4, {"tp_size": 4})):  # boxes of columns, which other ranks' parts cut
        for own in run_ranks(world, load_parallel, str(tmp_path), init=init):
            assert same({key: own[key] for key in state}, state)


# ---- refusals: the same on all ranks, and nothing changes


def refuse(folder: str, kind: str = "bmtrain", change: Callable[[nn.Module], None] | None = None) -> str:
    model, optimizer = make_ours(kind)
    if change is not None:
        change(model)
    before = full_state(model, optimizer)
    with pytest.raises((UnreadableFileError, OSError, RuntimeError, ValueError)) as caught:
        bmt.dcp.load(folder, model, optimizer)
    after = full_state(model, optimizer)
    assert same(dict(before[0]), dict(after[0])) and same(before[1], after[1])
    return f"{type(caught.value).__name__}: {caught.value}"


def refused(folder: Path, *args: Any) -> str:
    [text] = set(run_ranks(2, refuse, str(folder), *args))
    return str(text)


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-700])


def overwrite_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-22:] = bytes(22)  # the end of the last archive
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "__1_0.distcp").unlink(), r"FileNotFoundError: .*__1_0\.distcp"),
        (lambda folder: truncate(folder / "__1_0.distcp"), r"UnreadableFileError: .*__1_0\.distcp: damaged from "),
        (lambda folder: overwrite_header(folder / "__0_0.distcp"), r"UnreadableFileError: .*__0_0\.distcp: \w+\."),
        (lambda folder: truncate(folder / ".metadata"), r"UnreadableFileError: .*\.metadata: damaged: not a readable"),
        (lambda folder: (folder / ".metadata").unlink(), r"FileNotFoundError: .*no complete checkpoint of torch"),
        (
            lambda folder: (folder / ".metadata").write_bytes(pickle.dumps(Hostile())),
            r"UnreadableFileError: .*\.metadata: contains posix\.system, which could only be restored by running",
        ),
    ],
    ids=("missing", "truncated", "archive", "table", "no-table", "hostile"),
)  # fmt: skip
def test_damaged_files_are_named_on_all_ranks(
    damage: Callable[[Path], None], expected: str, theirs: Any, tmp_path: Path
) -> None:
    import re

    folder = copy_of(theirs, tmp_path)
    damage(folder)
    assert re.match(expected, refused(folder))
    assert not Path("hacked").exists()


def save_wider(folder: str) -> None:
    model = bmt.BMTrainModelWrapper(Net(8))
    bmt.dcp.save(folder, model)


def test_other_shapes_and_a_lacking_optimizer_are_named(tmp_path: Path) -> None:
    run_ranks(2, save_wider, str(tmp_path / "wide"))
    text = refused(tmp_path / "wide")
    assert "size mismatch for layers.1.norm.weight" in text and "(8,)" in text and "and 12 more" in text
    run_ranks(1, save_alone, str(tmp_path / "alone"))
    assert "the checkpoint holds no state of an optimizer of temperature" in refused(tmp_path / "alone")


def save_alone(folder: str) -> None:
    bmt.dcp.save(folder, make_ours("torch")[0])
    with pytest.raises(FileExistsError, match="A checkpoint is there"):
        bmt.dcp.save(folder, make_ours("torch")[0])


def save_by(folder: str, options: dict[str, Any]) -> None:
    model = make_ours("torch")[0]
    optimizer = torch.optim.Adam(groups(model), lr=0.1, **options)
    train(model, optimizer, 1)
    bmt.dcp.save(folder, model, optimizer)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"amsgrad": True}, "the checkpoint is of amsgrad=True"),
        (
            {"decoupled_weight_decay": False},
            "added to the gradient, as Adam's, the optimizer's is not",
        ),
    ],
)
def test_a_state_that_would_continue_with_another_formula_is_refused(
    options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    run_ranks(2, save_by, str(tmp_path / "run"), options)
    assert expected in refused(tmp_path / "run")


def in_a_group_of_its_own(optim: State) -> None:
    [first, _] = optim["param_groups"]
    optim["param_groups"].append({**first, "lr": 0.5, "params": [first["params"].pop()]})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda optim: optim["state"]["embed.weight"].update(exp_avg=torch.zeros(11, 1)),
            "optim.state.embed.weight.exp_avg: expected shape (11, 6), as its parameter has, or (), got (11, 1)",
        ),
        (in_a_group_of_its_own, "has another lr in the checkpoint than the parameters before it"),
    ],
    ids=("shape", "groups"),
)  # fmt: skip
def test_a_state_that_fits_no_group_or_parameter_is_refused(
    change: Callable[[State], None], expected: str, tmp_path: Path
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    train(model, optimizer, 1)
    state, optim = get_state_dict(model, optimizer)
    change(optim)
    torch_dcp.save({"model": state, "optim": optim}, checkpoint_id=tmp_path / "run", no_dist=True)
    assert expected in refused(tmp_path / "run")


def save_where_one_cannot_write(folder: str) -> str:
    with pytest.raises(OSError) as caught:
        bmt.dcp.save(folder, *make_ours("bmtrain"))
    return str(caught.value)


def test_a_save_that_fails_on_one_rank_leaves_no_files(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "__1_0.distcp" / "in the way").mkdir(parents=True)
    for text in run_ranks(2, save_where_one_cannot_write, str(folder)):
        assert "__1_0.distcp" in text
    assert [path.name for path in folder.iterdir()] == ["__1_0.distcp"]


def save_to_a_full_disk(folder: str) -> str:
    if bmt.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    model = bmt.nn.Linear(600, 600)
    bmt.init_parameters(model)
    with pytest.raises(OSError) as caught:
        bmt.dcp.save(folder, model)
    return str(caught.value)


def test_a_full_disk_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    for text in run_ranks(2, save_to_a_full_disk, str(tmp_path / "run"), fresh=True):
        assert "File too large" in text
    assert not list((tmp_path / "run").iterdir())


def save_factored(folder: str) -> str:
    model = make_ours("torch")[0]
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    for p in model.parameters():
        if p.numel():
            optimizer.state[p]["row_var"] = torch.zeros(2, 1)
    with pytest.raises(ValueError, match="expected a number or a tensor of the parameter's shape") as caught:
        bmt.dcp.save(folder, model, optimizer)
    assert not Path(folder, ".metadata").exists()
    return str(caught.value)


def test_a_state_without_a_place_in_the_format_is_refused(tmp_path: Path) -> None:
    assert len(set(run_ranks(2, save_factored, str(tmp_path / "run")))) == 1


def test_the_table_of_our_files_is_torchs(tmp_path: Path) -> None:
    run_ranks(2, save_nested, str(tmp_path))
    metadata = torch_dcp.FileSystemReader(tmp_path / "app").read_metadata()
    table = read_table(tmp_path / "app")
    assert (
        metadata.version
        and metadata.state_dict_metadata.keys() == table["tensors"].keys() | table["values"].keys()
    )
