"""MuonOptimizer over shards against torch.optim.Muon and torch.optim.AdamW over whole tensors, bit for bit."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain import BlockPolicy
from bmtrain.optim import AdamOptimizer, MuonOffloadOptimizer, MuonOptimizer, OptimManager, gather_state
from bmtrain.optim._owners import Team, is_here, owners_of
from bmtrain.optim.formulas.muon import _work

LR, DECAY = 0.02, 0.1
SHAPES = ((24, 40), (40, 24), (16, 16), (3, 70))


class Inner(torch.nn.Module):
    """Matrices that are wide, tall, square, and thinner than there are elements to a rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(
            bmt.DistributedParameter(torch.randn(shape).to(dtype)) for shape in SHAPES
        )
        self.bias = bmt.DistributedParameter(torch.randn(40).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, tall, square, thin = self.weights
        rest = (x[:, :16] @ square).tanh().sum() + (x[:, :3] @ thin).tanh().sum()
        return (x @ wide + self.bias).tanh() @ tall + rest


class Model(bmt.DistributedModule):
    def __init__(self, dtype: torch.dtype, policy: BlockPolicy) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = bmt.TransformerBlockList([bmt.Block(Inner(dtype), policy=policy) for _ in range(2)])
        self.outside = bmt.DistributedParameter(torch.randn(24, 24).to(dtype))
        self.chosen = bmt.DistributedParameter(torch.randn(24, 7).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(x @ self.outside).float()
        return hidden.square().mean() + (x @ self.chosen).float().square().mean()


class Reference:
    """torch's optimizers over whole fp32 copies, with the gradients that the ranks have."""

    def __init__(self, parameters: dict[str, bmt.DistributedParameter]) -> None:
        self.whole = {name: torch.nn.Parameter(p.gather().float().clone()) for name, p in parameters.items()}
        self.parameters = parameters
        self.by_muon = [name for name in parameters if "weights" in name or name == "chosen"]
        muon = [self.whole[name] for name in self.by_muon]
        others = [p for name, p in self.whole.items() if name not in self.by_muon]
        adam = torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
        self.optimizers = [torch.optim.Muon(muon, lr=LR, weight_decay=DECAY), adam]

    def step(self, scale: float) -> None:
        for name, p in self.parameters.items():
            gradient = p.gather_grad()
            assert gradient is not None
            self.whole[name].grad = gradient.float() / scale
        for optimizer in self.optimizers:
            optimizer.step()

    def check(self) -> None:
        for name, p in self.parameters.items():
            expected, value = self.whole[name].detach().to(p.dtype), p.gather()
            if name in self.by_muon or p.dtype == torch.float32:
                assert torch.equal(value, expected), name
            else:
                torch.testing.assert_close(value, expected)


def make(model: Model, cls: type[MuonOptimizer] = MuonOptimizer) -> MuonOptimizer:
    parameters = dict(model.named_parameters())
    chosen = parameters.pop("chosen")
    groups = [{"params": list(parameters.values())}, {"params": [chosen], "rule": "muon"}]
    return cls(groups, lr=LR, weight_decay=DECAY)


def train(
    dtype: torch.dtype, policy: dict[str, Any], loss_scale: float | None, *classes: type[MuonOptimizer]
) -> None:
    """Steps by the first class, then goes on with the second."""
    model = Model(dtype, BlockPolicy(**policy))
    reference = Reference(dict(model.named_parameters()))
    optimizer, manager = make(model, classes[0]), OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(optimizer)
    assert [(g["rule"], len(g["params"])) for g in optimizer.param_groups] == [
        ("muon", 8), ("adam", 3), ("muon", 1),
    ]  # fmt: skip
    for step in range(4):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * step + bmt.rank())).to(dtype)
        manager.zero_grad()
        manager.backward(model(x))
        manager.clip_grad_norm(optimizer.param_groups, max_norm=0.5)
        reference.step(manager.loss_scale)
        manager.step()
        reference.check()
        if step == 1:  # goes on with a new optimizer
            saved = manager.state_dict(gather_opt=True)
            optimizer, manager = make(model, classes[1]), OptimManager(loss_scale=loss_scale)
            manager.add_optimizer(optimizer)
            manager.load_state_dict(saved)
    name = reference.by_muon[0]
    momentum = gather_state(optimizer, reference.parameters[name], "momentum_buffer")
    assert torch.equal(momentum, reference.optimizers[0].state[reference.whole[name]]["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("world", "policy"),
    [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"level": 2}),
        (2, {"level": 1}),
        (2, {"level": 0}),
        (4, {"zero_size": 2}),
    ],
    ids=str,
)
def test_weights_are_those_of_torch_over_whole_tensors(
    world: int, policy: dict[str, Any], dtype: torch.dtype
) -> None:
    loss_scale = 1024.0 if dtype == torch.float32 else None
    run_ranks(world, train, dtype, policy, loss_scale, MuonOptimizer, MuonOptimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "world, policy", [(1, {}), (3, {}), (2, {"level": 0}), (4, {"zero_size": 2})], ids=str
)
@pytest.mark.parametrize("others", [MuonOffloadOptimizer, MuonOptimizer])
def test_state_on_the_host_has_the_same_weights(
    world: int, policy: dict[str, Any], dtype: torch.dtype, others: type[MuonOptimizer]
) -> None:
    loss_scale = 1024.0 if dtype == torch.float32 else None
    run_ranks(world, train, dtype, policy, loss_scale, MuonOffloadOptimizer, others)


def history(cls: type[MuonOptimizer], kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """The weights after six steps in which something happens that changes what is updated, or from what."""
    model = Model(dtype, BlockPolicy())
    parameters = list(model.parameters())
    if kind == "frozen from the start":
        parameters[1].requires_grad_(False)
    optimizer = make(model, cls)
    manager = OptimManager(
        loss_scale=2.0**24 if kind == "overflow" else None,
        accumulate=2 if kind == "accumulation" else 1,
    )
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Linear(optimizer, LR, 1, 9))
    for step in range(6):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(10 * step + bmt.rank())).to(dtype)
        manager.zero_grad(set_to_none=kind == "no gradient")
        manager.backward((model(x) if step != 3 or kind != "no gradient" else (x @ model.chosen)).sum())
        if kind == "clipped":
            manager.clip_grad_norm(optimizer.param_groups, max_norm=0.1)
        manager.step()
        if step == 2 and kind == "frozen later":
            parameters[0].requires_grad_(False)
        if step == 4 and kind == "frozen later":
            parameters[0].requires_grad_(True)
        if step == 2 and kind == "changed by hand":
            with torch.no_grad():
                for p in parameters:
                    p.mul_(1.5)
        if step == 2 and kind == "own state":
            optimizer.load_state_dict(optimizer.state_dict())
    return [p.gather().clone() for p in model.parameters()]


def same_histories(kind: str, dtype: torch.dtype) -> None:
    resident, on_host = (history(cls, kind, dtype) for cls in (MuonOptimizer, MuonOffloadOptimizer))
    plain = history(MuonOptimizer, "", dtype)
    assert all(map(torch.equal, resident, on_host))
    assert kind in ("own state", "overflow" if dtype != torch.float16 else "") or not all(
        map(torch.equal, resident, plain)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "accumulation", "changed by hand", "clipped", "frozen from the start", "frozen later", "no gradient",
        "overflow", "own state",
    ],
)  # fmt: skip
def test_state_on_the_host_has_the_same_history(kind: str, dtype: torch.dtype) -> None:
    run_ranks(2, same_histories, kind, dtype)


def traffic() -> None:
    """Every element of a matrix that is not the owner's travels twice, in 2 bytes, and nothing else does."""
    model = Model(torch.float32, BlockPolicy())
    optimizer = make(model)
    model(torch.ones(2, 24)).backward()
    comm = bmt.config["comm"]
    comm.reset_traffic()
    optimizer.step()
    assert {kind for kind, (calls, _) in comm.traffic().items() if calls} == {"send", "recv"}
    sent = bmt.distributed.all_reduce(torch.tensor(float(comm.traffic()["send"][1]))).item()
    matrices = [p for g in optimizer.param_groups if g["rule"] == "muon" for p in g["params"]]
    work = [optimizer._formula.work(p.full_shape, {"split": None}) for p in matrices]
    owners = owners_of(work, [Team(p) for p in matrices])
    messages = bmt.distributed.all_reduce(torch.tensor(float(comm.traffic()["send"][0]))).item()
    parts = [
        p._spec.part(r)[1]
        for p, owner in zip(matrices, owners, strict=True)
        for r in range(bmt.world_size())
        if r != owner
    ]
    assert sent == 2 * 2 * sum(parts)
    assert messages == 2 * sum(part > 0 for part in parts)
    rank = bmt.rank()
    held = [
        p.full_numel if owner == rank else p._spec.part(rank)[1]
        for p, owner in zip(matrices, owners, strict=True)
    ]
    assert bmt.memory_report(model, optimizer).owned == 2 * sum(held)


def test_a_matrix_travels_to_its_owner_and_back() -> None:
    run_ranks(3, traffic)


class _Team:
    size, key = 4, None


def test_work_is_balanced() -> None:
    work = [7, 1, 5, 3, 3, 3, 2, 2, 1, 1, 6, 6] * 4
    owners = owners_of(work, [_Team] * len(work))  # type: ignore[list-item]
    loads = [sum(w for w, owner in zip(work, owners, strict=True) if owner == r) for r in range(4)]
    assert max(loads) <= 1.1 * sum(work) / 4
    assert owners == owners_of(work, [_Team] * len(work))  # type: ignore[list-item]


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("layers", "matrices"),  # rows, columns and parts
    [
        (12, [(2304, 768, 1), (768, 768, 1), (3072, 768, 1), (768, 3072, 1)]),
        (4, [(384, 128, 3), (128, 128, 1), (512, 128, 1), (128, 512, 1)]),  # defaults of example/options.py
        (32, [(4096, 4096, 1)] * 2 + [(1024, 4096, 1)] * 2 + [(14336, 4096, 1)] * 2 + [(4096, 14336, 1)]),
    ],
    ids=["gpt2", "example", "llama3-8b"],
)
def test_no_rank_has_a_tenth_more_than_its_share(
    layers: int, matrices: list[tuple[int, int, int]], ranks: int
) -> None:
    work = [parts * _work(rows // parts, columns) for rows, columns, parts in matrices] * layers
    team = SimpleNamespace(size=ranks, key=None)
    owners = owners_of(work, [team] * len(work))  # type: ignore[list-item]
    loads = [sum(w for w, owner in zip(work, owners, strict=True) if owner == r) for r in range(ranks)]
    # No division has less than the largest matrix, or than two of the ranks + 1 largest on one rank.
    largest = [*sorted(work, reverse=True), 0]
    allowed = max(largest[0], largest[ranks - 1] + largest[ranks])
    assert max(loads) <= max(1.1 * sum(work) / ranks, allowed)


def resume(path: str) -> None:
    """A file of another number of ranks, through bmtrain.distributed.checkpoint; and a pickle of one rank."""
    from bmtrain.distributed import checkpoint

    model = Model(torch.bfloat16, BlockPolicy())
    optimizer = make(model)
    manager = OptimManager()
    manager.add_optimizer(optimizer)

    def step() -> list[torch.Tensor]:
        for p in model.parameters():
            p.load_grad(torch.linspace(-1, 1, p.full_numel).view(p.full_shape).to(p.dtype))
        manager.step()
        return [p.gather() for p in model.parameters()]

    if path.endswith("write"):
        step()
        checkpoint.save(path[:-6], 1, model, manager)
        expected = step()
        if bmt.rank() == 0:
            torch.save(expected, path[:-6] + ".expected")
        copy = pickle.loads(pickle.dumps(optimizer))
        assert [g["rule"] for g in copy.param_groups] == ["muon", "adam", "muon"]
        return
    checkpoint.load(path, model, manager)
    expected = torch.load(path + ".expected")
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))


def test_a_checkpoint_goes_on_at_another_number_of_ranks(tmp_path: Any) -> None:
    run_ranks(2, resume, f"{tmp_path}/file write")
    run_ranks(3, resume, f"{tmp_path}/file")


def wrong() -> None:
    vector, matrix = (bmt.DistributedParameter(torch.zeros(shape)) for shape in (3, (3, 4)))
    with pytest.raises(ValueError, match=r"two dimensions for 'muon', got shape \(3,\)"):
        MuonOptimizer([{"params": [vector], "rule": "muon"}])
    with pytest.raises(ValueError, match="rule: expected 'muon', 'adam' or None, got 'sgd'"):
        MuonOptimizer([{"params": [matrix], "rule": "sgd"}])
    for options, message in (
        ({"lr": -1.0}, "lr: expected 0 or more"),
        ({"ns_steps": 100}, "ns_steps: expected less than 100"),
        ({"adjust_lr_fn": "x"}, "adjust_lr_fn: expected one of"),
        ({"adam_betas": (0.9, 1.0)}, "adam_betas: expected two numbers"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients: expected three numbers"),
        ({"ns_coefficients": 3}, "ns_coefficients: expected three numbers, got 3"),
        ({"lr": 0.0, "adam_lr": 0.1}, "adam_lr: expected None where lr is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            MuonOptimizer([matrix], **options)  # type: ignore[arg-type]
    optimizer = MuonOptimizer([matrix, vector])
    assert [g["rule"] for g in optimizer.param_groups] == ["adam"]
    with pytest.raises(ValueError, match="maximize: expected False where matrices take Muon"):
        MuonOptimizer([{"params": [matrix], "rule": "muon", "maximize": True}])
    for wrong_group in ({"lr": 0.1}, [matrix]):
        for add in (optimizer.add_param_group, AdamOptimizer([vector]).add_param_group):
            with pytest.raises(TypeError, match="param_group: expected a dict with 'params', got"):
                add(wrong_group)  # type: ignore[arg-type]


def test_wrong_options_are_named() -> None:
    run_ranks(1, wrong)


def ratio() -> None:
    """A schedule changes both learning rates alike."""
    p, q = (bmt.DistributedParameter(torch.ones(3)) for _ in range(2))
    muon, adam = (
        MuonOptimizer([p], lr=0.5, adam_lr=0.25),
        AdamOptimizer([q], lr=0.125, betas=(0.9, 0.95), decoupled=True, weight_decay=0.1),
    )
    muon.param_groups[0]["lr"] = 0.25
    for x in (p, q):
        x.grad = torch.ones_like(x)
    muon.step()
    adam.step()
    assert torch.equal(p.data, q.data)


def test_a_schedule_keeps_the_ratio_of_the_learning_rates() -> None:
    run_ranks(1, ratio)


def exchange_with_torch(dtype: torch.dtype) -> None:
    """States of torch's optimizers over whole fp32 parameters load, and gathered states load into them."""
    model = Model(dtype, BlockPolicy())
    parameters = dict(model.named_parameters())
    matrices = [p for name, p in parameters.items() if "weights" in name]
    others = [p for name, p in parameters.items() if "weights" not in name]
    optimizer = MuonOptimizer(
        [*matrices, *others], lr=LR, weight_decay=DECAY, adam_lr=LR / 4, adam_weight_decay=5 * DECAY
    )
    torch.manual_seed(5)
    gradients = {p: torch.randn(p.full_shape).to(dtype) for p in parameters.values()}

    def torch_pair() -> tuple[list[list[torch.nn.Parameter]], list[torch.optim.Optimizer]]:
        whole = [
            [torch.nn.Parameter(p.gather().float().clone()) for p in kind] for kind in (matrices, others)
        ]
        muon = torch.optim.Muon(whole[0], lr=LR, weight_decay=DECAY)
        return whole, [
            muon,
            torch.optim.AdamW(whole[1], lr=LR / 4, betas=(0.9, 0.95), weight_decay=5 * DECAY),
        ]

    def step(whole: list[list[torch.nn.Parameter]], pair: list[torch.optim.Optimizer]) -> None:
        for kind, copies in zip((matrices, others), whole, strict=True):
            for p, copy in zip(kind, copies, strict=True):
                p.load_grad(gradients[p])
                copy.grad = gradients[p].float()
        for known in (*pair, optimizer):
            known.step()
        for p, copy in zip((*matrices, *others), (*whole[0], *whole[1]), strict=True):
            tolerance = (
                {"rtol": 0.02, "atol": 1e-3} if dtype == torch.bfloat16 else {}
            )  # torch keeps no master
            torch.testing.assert_close(p.gather().float(), copy.detach().to(dtype).float(), **tolerance)

    whole, pair = torch_pair()
    step(whole, pair)
    pair[0].param_groups[0]["momentum"] = 0.9
    before = optimizer.state_dict(gather=True)["state"]
    for known in pair:
        optimizer.load_state_dict(known.state_dict())
    assert [g["lr"] for g in optimizer.param_groups] == [LR, LR] and optimizer.param_groups[0][
        "momentum"
    ] == 0.9
    after = optimizer.state_dict(gather=True)["state"]
    for index, entry in after.items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and name != "_param_fp32":
                torch.testing.assert_close(value, before[index][name])
    step(whole, pair)
    state = optimizer.state_dict(gather=True)
    assert state["state"][0]["momentum_buffer"].shape == matrices[0].full_shape
    whole, (muon, _) = torch_pair()
    muon.load_state_dict({**state, "param_groups": [g for g in state["param_groups"] if g["rule"] == "muon"]})
    for number, copy in enumerate(whole[0]):
        assert torch.equal(muon.state[copy]["momentum_buffer"], state["state"][number]["momentum_buffer"])
    optimizer.load_state_dict(muon.state_dict())  # with the keys of this library's groups
    again = optimizer.state_dict(gather=True)["state"]
    assert all(
        torch.equal(again[k][n], v) for k, e in state["state"].items() for n, v in e.items() if n != "step"
    )
    with pytest.raises(ValueError, match=r"expected groups of \[8\] parameters by 'muon', got \[7\]"):
        optimizer.load_state_dict(torch.optim.Muon(whole[0][1:], lr=LR).state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world", [1, 3])
def test_states_of_torch_load_and_gathered_states_load_into_torch(world: int, dtype: torch.dtype) -> None:
    run_ranks(world, exchange_with_torch, dtype)


class Staged(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        shapes = ((12, 6), (12, 12), (6, 12))  # the second is on both ranks of a stage
        self.up, self.middle, self.down = (bmt.DistributedParameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + ((x @ self.up.t()).tanh() @ self.middle.t()).tanh() @ self.down.t()


def in_stages(kind: str) -> None:
    """Each stage steps its own matrices, with a message to the owner and one back for each part that is not there."""
    torch.manual_seed(1)
    model = bmt.PipelineTransformerBlockList([bmt.Block(Staged(), mode="PIPE") for _ in range(3)])
    named = dict(model.named_parameters())
    if kind == "whole_matrix":
        optimizer: Any = bmt.optim.whole_matrix(torch.optim.Muon, named.items(), lr=LR, weight_decay=DECAY)
    else:
        optimizer = getattr(bmt.optim, kind)(named.items(), lr=LR, weight_decay=DECAY)
    whole = {name: torch.nn.Parameter(p.gather().detach().clone()) for name, p in named.items()}
    reference = torch.optim.Muon(whole.values(), lr=LR, weight_decay=DECAY)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + bmt.rank()))
        model(x).square().sum().backward()
        for name, p in named.items():
            gradient = p.gather_grad()
            assert gradient is not None
            whole[name].grad = gradient
        reference.step()
        here = [p for p in named.values() if is_here(p)]
        comm = Team(here[0]).comm
        comm.reset_traffic()
        bmt.optim_step(optimizer)
        if step < 2 and kind == "whole_matrix":
            found = sum(comm.traffic()[kind][0] for kind in ("send", "recv") if kind in comm.traffic())
            ranks = [{optimizer._members.owners[p]} | {r for r in (0, 1) if p._spec.part(r)[1]} for p in here]
            assert found == 2 * sum(len(of_one) - 1 for of_one in ranks) > 0
        assert all(torch.equal(p.gather(), whole[name]) for name, p in named.items())
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict(gather=True))


@pytest.mark.parametrize("kind", ["MuonOptimizer", "MuonOffloadOptimizer", "whole_matrix"])
def test_stages_of_a_pipeline_step_their_own_matrices(kind: str) -> None:
    run_ranks(4, in_stages, kind, init={"pipe_size": 2})
