"""Parameters outside of a forward: printing them costs nothing, and what is written to them reaches the shards or is
told."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.global_var import context
from bmtrain.zero_context import ZeroContext


class Described(torch.nn.Module):
    """Prints what it reads from a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale[:, 0]

    def extra_repr(self) -> str:
        return f"{tuple(self.scale.shape)}, {self.scale.dtype}, {self.scale.device}, {self.scale.numel()}"


class Net(torch.nn.Module):
    """Parameters in Blocks and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(5, 3)
        self.layers = torch.nn.ModuleList(
            [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), Described()) for _ in range(2)]
        )
        self.attention = torch.nn.MultiheadAttention(4, 2)
        self.out = torch.nn.Linear(3, 700)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.float())


def wrapped() -> Any:
    torch.manual_seed(0)
    return bmt.BMTrainModelWrapper(Net())


def messages() -> dict[str, Any]:
    group = context().world
    return dict(group.comm.traffic())


# --- printing


def printed_by_one_rank() -> list[str]:
    model = wrapped()
    bmt.synchronize()
    context().world.comm.reset_traffic()
    texts: list[str] = []
    if bmt.rank() == 0:
        modules = (model, model.embed, model.layers[0], model.layers[1][2], model.attention)
        texts = [repr(module) for module in modules]
        bmt.print_rank(model)
    assert messages() == {}
    bmt.synchronize()
    return texts


def test_one_rank_prints_a_model() -> None:
    assert run_ranks(2, printed_by_one_rank)[0] == run_ranks(1, printed_by_one_rank)[0]


# --- writing


def expected_of(change: Callable[[torch.nn.Module], Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(7)
    with torch.no_grad():
        change(model)
    return model.state_dict()


def assert_state(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def change_all(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(2).view(-1)[-1] = 5.0
    model.out.weight[1:3] = 0
    model.layers[0][0].weight.data.fill_(3)
    torch.nn.init.xavier_normal_(model.layers[1][0].weight)


def written(policy: dict[str, Any]) -> None:
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        model = wrapped()
    x = torch.randn(4, 5)
    model(x).sum().backward()  # Blocks are gathered, or have been
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    with torch.no_grad():
        model(x)
    torch.manual_seed(7)
    with bmt.whole(model, write=True) as inside:
        assert inside is model and all(p.shape == p.full_shape for p in model.parameters())
        change_all(model)
        values = model(x)
        state = model.state_dict()
    assert all(p.shape == (p._spec.local_part[1],) for p in model.parameters())
    expected = expected_of(change_all)
    assert_state(model, expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    if "compute_dtype" not in policy:
        with torch.no_grad():
            assert torch.allclose(model(x), values, atol=1e-5)
    for gradient, p in zip(gradients, [p for p in model.parameters() if p.grad is not None], strict=True):
        assert torch.equal(gradient, p.grad)
    model(x).sum().backward()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_what_is_written_reaches_the_shards(world: int) -> None:
    run_ranks(world, written, {})


@pytest.mark.parametrize(
    "policy", [{"level": 0}, {"level": 1}, {"level": 2}, {"compute_dtype": torch.bfloat16}]
)
def test_under_every_policy(policy: dict[str, Any]) -> None:
    run_ranks(2, written, policy)


def zero_context() -> None:
    model = wrapped()
    with ZeroContext(model.layers[0]) as block:
        block[0].weight.copy_(torch.arange(9.0).view(3, 3))
        block[1].bias.data = torch.full((3,), 4.0)
        with pytest.raises(RuntimeError, match="full already"):
            ZeroContext(model.layers[0]).__enter__()
    state = model.state_dict()
    assert state["layers.0.0.weight"].flatten().tolist() == list(range(9))
    assert state["layers.0.1.bias"].tolist() == [4.0] * 3


def not_written() -> None:
    model = wrapped()
    before = copy.deepcopy(model.state_dict())
    with bmt.whole(model):
        change_all(model)
    assert_state(model, before)
    with pytest.raises(ZeroDivisionError), bmt.whole([model.embed, model.layers[0]], write=True):
        model.embed.weight.zero_()
        raise ZeroDivisionError
    assert_state(model, before)
    with pytest.raises(RuntimeError, match="another shape|with shape"), bmt.whole(model.embed, write=True):
        model.embed.weight.data = torch.zeros(2)
    assert_state(model, before)
    with bmt.whole(model.layers[0][0], write=True):  # a part of a Block
        model.layers[0][0].weight.zero_()
        clone = copy.deepcopy(model.layers[0][0])
    assert model.state_dict()["layers.0.0.weight"].abs().max() == 0
    assert clone.state_dict()["weight"].abs().max() == 0


def test_contexts() -> None:
    for program in (zero_context, not_written):
        run_ranks(2, program)


def masters_follow() -> None:
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(6, 5, dtype=torch.bfloat16))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.0)
    model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    with bmt.whole(model, write=True):
        model.weight.fill_(3.0)
    optimizer.step()
    assert model.state_dict()["weight"].float().unique().tolist() == [3.0]


def test_optimizers_go_on_from_what_was_written() -> None:
    run_ranks(2, masters_follow)


# --- initialising a built model


def by_init(module: torch.nn.Module) -> None:
    if isinstance(module, torch.nn.Linear):
        torch.nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            module.bias.data.normal_(0, 0.02)
    elif isinstance(module, torch.nn.MultiheadAttention):
        torch.nn.init.orthogonal_(module.in_proj_weight)


def apply_init(model: torch.nn.Module) -> None:
    model.apply(by_init)


def reset(model: torch.nn.Module) -> None:
    for module in model.modules():
        for name in ("reset_parameters", "_reset_parameters"):
            if hasattr(module, name):
                getattr(module, name)()


DRAWS: list[Callable[[Any], Any]] = [
    lambda p: torch.nn.init.normal_(p, std=0.02),
    lambda p: torch.nn.init.trunc_normal_(p, std=0.02),
    lambda p: torch.nn.init.uniform_(p, -0.1, 0.1),
    lambda p: p.exponential_(2.0),
    lambda p: p.bernoulli_(0.5),
    lambda p: p.data.normal_(1.0, 0.02),
    lambda p: torch.nn.init.trunc_normal_(p.data, std=0.02),
]


def fill(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            DRAWS[number % len(DRAWS)](param)


def initialised(change: Callable[[torch.nn.Module], Any], on_meta: bool) -> dict[str, torch.Tensor]:
    if on_meta:  # as with FSDP2
        with torch.device("meta"):
            model = Net()
        model = bmt.BMTrainModelWrapper(model).to_empty(device=bmt.config["device"])
    else:
        model = wrapped()
    torch.manual_seed(7)
    change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = model.state_dict()
    return {name: value for name, value in state.items() if "2.scale" not in name or not on_meta}


@pytest.mark.parametrize("change", [apply_init, reset, fill])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_initialised_as_by_one_process(change: Callable[[torch.nn.Module], Any], world: int) -> None:
    expected = expected_of(change)
    for state in run_ranks(world, initialised, change, False):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_the_flow_of_meta_device_to_empty_and_reset() -> None:
    expected = expected_of(reset)
    for state in run_ranks(2, initialised, reset, True):
        assert state.keys() < expected.keys()
        assert all(torch.equal(expected[name], value) for name, value in state.items())


class Holder(bmt.DistributedModule):
    """Has a plain module that holds a distributed parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.nn.Module()
        self.plain.weight = bmt.DistributedParameter(torch.zeros(4, 3))
        self.weight = bmt.DistributedParameter(torch.zeros(4, 3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)


def own_modules() -> None:
    model = Holder()
    assert model.state_dict()["weight"].eq(1).all()
    model.apply(lambda module: torch.nn.init.eye_(module.weight))
    assert all(torch.equal(value, torch.eye(4, 3)) for value in model.state_dict().values())


def test_modules_of_ones_own() -> None:
    run_ranks(2, own_modules)


def fill_own(module: torch.nn.Module) -> None:
    for param in module._parameters.values():
        if param is not None:
            param.copy_(torch.arange(param.numel()).view(param.shape))
    for param in module.parameters(recurse=False):
        param.mul_(torch.arange(1.0, 1 + param.shape[-1]))


def own_parameters_of_blocks(root: str) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    model[0], model[1] = bmt.Block(model[0]), bmt.Block(model[1])
    model = model if root == "distributed" else torch.nn.Sequential(*model)
    plain, model = (plain[0], model[0]) if root == "Block" else (plain, model)
    with torch.no_grad():
        plain.apply(fill_own)
        assert model.apply(fill_own) is model
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name


@pytest.mark.parametrize("root", ["distributed", "plain", "Block"])
def test_functions_get_the_own_parameters_of_blocks_whole(root: str) -> None:
    run_ranks(2, own_parameters_of_blocks, root)


# --- writes that are lost


class Clamped(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale = bmt.DistributedParameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=0.5)
        return x * self.scale


@torch.no_grad()
def in_place(model: Any) -> None:
    model.out.weight.mul_(0)


def through_data(model: Any) -> None:
    model.out.weight.data[0].fill_(3)


def by_data(model: Any) -> None:
    model.out.weight.data = torch.zeros(700, 3)


def in_forward(model: Any) -> None:
    Clamped()(torch.ones(3, requires_grad=True)).sum().backward()


class ClampedData(Clamped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scale.data.max() == 1
        self.scale.data.clamp_(max=0.5)
        return x * self.scale


class ReadsData(Clamped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.data.max() * self.scale


def data_in_forward(model: Any) -> None:
    ClampedData()(torch.ones(3, requires_grad=True)).sum().backward()


def in_block(model: Any) -> None:
    block = bmt.Block(ClampedData())
    block(torch.ones(3, requires_grad=True)).sum().backward()
    assert block.state_dict()["scale"].tolist() == [1, 1, 1] or bmt.world_size() == 1


class Replaced(Clamped):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.data = x.detach() / 2
        return x * self.scale


def data_replaced_in_block(model: Any) -> None:
    block = bmt.Block(Replaced())
    block(torch.ones(3, requires_grad=True)).sum().backward()
    assert block.state_dict()["scale"].tolist() == [1, 1, 1]


WRITES = [(in_place, "Linear.weight"), (through_data, "Linear.weight"), (by_data, "Linear.weight"),
          (in_forward, "Clamped.scale"), (data_in_forward, "ClampedData.scale"),
          (in_block, "a parameter in the forward of ClampedData#2"),
          (data_replaced_in_block, "a parameter in the forward of Replaced#2")]  # fmt: skip


def warnings_of(act: Callable[[Any], None]) -> list[str]:
    model = wrapped()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act(model)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("write", "name"), WRITES)
def test_a_lost_write_is_told(write: Callable[[Any], None], name: str) -> None:
    first, second = run_ranks(2, warnings_of, write, fresh=True)
    assert (
        len(first) == 1
        and first[0].startswith(f"a write to {name} is lost")
        and "around the call" in first[0]
    )
    assert second == []


class ActNorm(torch.nn.Module):
    """Sets its parameters from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.log_scale = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.shift.data.copy_(-x.mean(0))
                self.log_scale.data = -x.std(0).log()
            self.is_set.fill_(True)
        return (x + self.shift) * self.log_scale.exp()


class OpensInForward(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with bmt.whole(self, write=True):
            return super().forward(x)


def set_by_data() -> None:
    x = torch.randn(7, 4) * 3 + 1
    plain = torch.nn.Sequential(ActNorm(), torch.nn.Linear(4, 4), ActNorm())
    for wrap in (lambda: copy.deepcopy(plain), lambda: torch.nn.ModuleList(copy.deepcopy(plain))):
        model: Any = bmt.BMTrainModelWrapper(wrap())
        with bmt.whole(model, write=True), warnings.catch_warnings():
            warnings.simplefilter("error")
            y = x
            for layer in model:
                y = layer(y)
        expected = copy.deepcopy(plain)
        expected(x)
        state = model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in expected.state_dict().items())
        assert torch.allclose(y.std(0), torch.ones(4))
    block = bmt.Block(bmt.BMTrainModelWrapper(OpensInForward(4, 4)))
    with pytest.raises(RuntimeError, match="around the call of a Block rather than in its forward"):
        block(x)


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_may_be_set_from_the_first_batch(world: int) -> None:
    run_ranks(world, set_by_data)


def reads_only(model: Any) -> None:
    weight = model.out.weight
    assert torch.equal(weight, weight.data) and type(weight + 1) is torch.Tensor
    assert repr(weight).startswith("tensor(") and isinstance(weight, torch.Tensor)
    assert type(copy.deepcopy(model.out.bias.detach())) is torch.Tensor
    file = io.BytesIO()
    torch.save(weight.detach(), file)
    torch.save(weight, file)
    plain = torch.nn.Linear(3, 700)
    plain.weight = torch.nn.Parameter(weight)
    table = torch.nn.Embedding.from_pretrained(weight, freeze=False)
    for module in (plain, table, copy.deepcopy(table), pickle.loads(pickle.dumps(plain))):
        assert isinstance(module.weight, torch.nn.Parameter) and module.weight.requires_grad
        assert torch.equal(module.state_dict()["weight"], weight) and repr(module.weight).startswith("Param")
    assert isinstance(bmt.BMTrainModelWrapper(plain)._parameters["weight"], bmt.DistributedParameter)
    gathered = next(model.out.parameters()).gather()
    with torch.no_grad():
        gathered.zero_()  # somebody's own copy
    model(torch.randn(2, 5)).sum().backward()
    for module in (ReadsData(), bmt.Block(ReadsData())):
        module(torch.ones(3)).sum().backward()
    model.tied = torch.nn.Module()
    model.out.weight = weight
    assert model.out._parameters["weight"] is next(model.out.parameters())


def test_reads_are_no_writes() -> None:
    assert run_ranks(2, warnings_of, reads_only, fresh=True) == [[], []]


class Halved(Clamped):
    """Halves its gradient in each forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        scale.register_hook(lambda gradient: gradient / 2)
        return x * scale


def attributes(_: Any) -> None:
    """Attributes of a copy that belong to the parameter: they reach it."""
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(3, 2))
    weight = model._parameters["weight"]

    def gradient_of(model: torch.nn.Module, param: torch.nn.Parameter) -> list[float]:
        model.zero_grad()
        (model(torch.ones(1, 3)).sum() / bmt.world_size()).backward()
        return param.gather_grad().flatten().tolist()

    for freeze in (True, False):
        with torch.set_grad_enabled(not freeze):
            model.weight.requires_grad = not freeze
            assert weight.requires_grad is not freeze
            model.weight.requires_grad_(freeze)
            assert weight.requires_grad is freeze
    weight.requires_grad_(True)
    handle = model.weight.register_hook(lambda gradient: gradient / 4)
    assert [gradient_of(model, weight) for _ in range(2)] == [[0.25] * 6] * 2
    handle.remove()
    assert gradient_of(model, weight) == [1.0] * 6
    model.weight.grad = torch.arange(6.0).view(2, 3)
    assert weight.gather_grad().flatten().tolist() == list(range(6))
    model.weight.grad = None
    assert weight.grad is None
    halved = Halved()
    assert [gradient_of(halved, halved._parameters["scale"]) for _ in range(2)] == [[0.5] * 3] * 2


def test_attributes_of_a_copy_are_those_of_the_parameter() -> None:
    assert run_ranks(2, warnings_of, attributes, fresh=True) == [[], []]


def gradient_of_a_copy(model: Any) -> None:
    model(torch.randn(2, 5)).sum().backward()
    assert model.out.weight.grad is None and model.out.weight.grad is None
    weight = model.out.weight
    weight.retain_grad()
    weight.sum().backward()
    assert weight.grad.sum() == weight.numel()


def test_a_copy_without_gradient_names_the_parameters() -> None:
    for told in run_ranks(2, warnings_of, gradient_of_a_copy, fresh=True):
        assert len(told) == 1 and "gather_grad()" in told[0] and "retain_grad" not in told[0]


def entries(model: Any) -> None:
    """Entries of state dicts that are edited as people do in torch, where this changes the model."""
    state = model.state_dict()
    for value in state.values():
        value.mul_(2)
    model.load_state_dict(state)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    averaged = copy.deepcopy(torch.load(file, weights_only=True))
    for name, value in model.state_dict().items():
        assert torch.equal(averaged[name].mul_(0.5), value / 2)
    del value, state
    own = model.state_dict()
    own["out.weight"].copy_(averaged["out.weight"])
    assert not torch.equal(model.state_dict()["out.weight"], averaged["out.weight"])


def test_an_edited_entry_of_a_state_dict_that_is_not_loaded_is_told() -> None:
    first, second = run_ranks(2, warnings_of, entries, fresh=True)
    assert len(first) == 1 and "entry 'out.weight' of state_dict()" in first[0] and second == []
