"""Optimizers that need whole parameters, on shards, against the same class over whole parameters, bit for bit."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain import BlockPolicy
from bmtrain.distributed import checkpoint
from bmtrain.optim import OptimManager, whole_matrix


class Simple(torch.optim.Optimizer):
    """Optimizers of one function."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, self.state[p], group["lr"])

    def update(self, p: torch.nn.Parameter, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError


class Lamb(Simple):
    """Adam's direction with the norm of the parameter."""

    def update(self, p: torch.nn.Parameter, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["exp_avg"].lerp_(p.grad, 0.1)
        state["exp_avg_sq"].lerp_(p.grad.square(), 0.01)
        direction = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
        p.sub_(direction * (lr * p.norm() / direction.norm().clamp(min=1e-12)))


class Shampoo(Simple):
    """A preconditioner for each dimension, in a list."""

    def update(self, p: torch.nn.Parameter, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["sides"] = [0.1 * torch.eye(size) for size in p.shape]
            state["count"] = 0
        state["count"] += 1
        direction = p.grad
        for dim, side in enumerate(state["sides"]):
            flat = p.grad.movedim(dim, 0).reshape(p.shape[dim], -1)
            side.add_(flat @ flat.T)
            values, vectors = torch.linalg.eigh(side)
            root = (vectors * values.clamp(min=1e-6).pow(-0.5 / p.dim())) @ vectors.T
            direction = torch.tensordot(root, direction.movedim(dim, 0), 1).movedim(0, dim)
        p.sub_(direction, alpha=lr)


class Orthogonal(Simple):
    """The orthogonal factor of the momentum of a matrix; the sign of others."""

    def update(self, p: torch.nn.Parameter, state: dict[str, Any], lr: float) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
        if p.dim() != 2:
            p.sub_(momentum.sign(), alpha=lr)
            return
        u, _, v = torch.linalg.svd(momentum, full_matrices=False)
        p.sub_(u @ v, alpha=lr)


class Centred(Simple):
    """A short optimizer of a user: the gradient less its mean, over its largest element."""

    def update(self, p: torch.nn.Parameter, state: dict[str, Any], lr: float) -> None:
        centred = p.grad - p.grad.mean()
        largest = state.setdefault("largest", torch.zeros(()))
        largest.copy_(torch.maximum(0.9 * largest, centred.abs().max()))
        p.sub_(centred / (largest + 1e-8), alpha=lr)


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "muon": (torch.optim.Muon, {"lr": 0.02}),
    "lamb": (Lamb, {}),
    "shampoo": (Shampoo, {"lr": 0.1}),
    "orthogonal": (Orthogonal, {"lr": 0.1}),
    "centred": (Centred, {}),
}


class Inner(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide = bmt.DistributedParameter(torch.randn(6, 20).to(dtype))
        self.tall = bmt.DistributedParameter(torch.randn(20, 6).to(dtype))
        self.bias = bmt.DistributedParameter(torch.randn(3).to(dtype))  # fewer elements than some ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.wide).tanh() @ self.tall + self.bias.sum()


class Model(bmt.DistributedModule):
    def __init__(self, dtype: torch.dtype, policy: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = bmt.TransformerBlockList(
            [bmt.Block(Inner(dtype), policy=BlockPolicy(**policy)) for _ in range(2)]
        )
        self.outside = bmt.DistributedParameter(torch.randn(6, 6).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x @ self.outside).float().square().mean()


def make(name: str, model: Model) -> tuple[dict[str, bmt.DistributedParameter], Any]:
    cls, options = CLASSES[name]
    named = {n: p for n, p in model.named_parameters() if name != "muon" or len(p.full_shape) == 2}
    return named, whole_matrix(cls, named.items(), **options)


def losses(model: Model, manager: OptimManager, step: int, dtype: torch.dtype) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + bmt.rank())).to(dtype)
    manager.zero_grad()
    manager.backward(model(x))


def parity(name: str, dtype: torch.dtype, policy: dict[str, Any], loss_scale: float | None) -> None:
    model = Model(dtype, policy)
    named, optimizer = make(name, model)
    manager = OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Linear(optimizer, 0.05, 2, 8))
    whole = {n: torch.nn.Parameter(p.gather().detach().float().clone()) for n, p in named.items()}
    cls, options = CLASSES[name]
    reference = cls(whole.items(), **options)
    for step in range(4):
        losses(model, manager, step, dtype)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=0.5)
        for n, p in named.items():
            gradient = p.gather_grad()
            assert gradient is not None
            whole[n].grad = gradient.float() / manager.loss_scale
        reference.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        reference.step()
        manager.step()
        if step == 1:  # a write from outside reaches the owner
            value = torch.full((6, 6), 0.25)
            named["outside"].load(value)
            whole["outside"].data.copy_(value)
        for n, p in named.items():
            assert torch.equal(p.gather(), whole[n].detach().to(dtype)), n
    expected, state = reference.state_dict()["state"], optimizer.state_dict(gather=True)["state"]
    assert expected.keys() == state.keys()
    for number, entry in expected.items():
        for key, value in entry.items():
            same = torch.equal if isinstance(value, torch.Tensor) else _same
            assert same(value, state[number][key]), (number, key)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_and_state_are_those_of_the_class_over_whole_parameters(name: str, world: int) -> None:
    run_ranks(world, parity, name, torch.float32, {}, 1024.0 if name == "lamb" else None)


@pytest.mark.parametrize(
    ("world", "name", "policy"),
    [(2, "adafactor", {"level": 0}), (4, "orthogonal", {"zero_size": 2}), (2, "lamb", {"level": 2})],
    ids=str,
)
def test_of_16_bit_parameters_an_fp32_master_is_updated(
    world: int, name: str, policy: dict[str, Any]
) -> None:
    run_ranks(world, parity, name, torch.bfloat16, policy, None)


def resume(name: str, dtype: torch.dtype, folder: str, writes: bool) -> list[torch.Tensor]:
    model = Model(dtype, {})
    named, optimizer = make(name, model)
    manager = OptimManager()
    manager.add_optimizer(optimizer)

    def step(number: int) -> None:
        for index, p in enumerate(named.values()):
            generator = torch.Generator().manual_seed(100 * number + index)
            p.load_grad(torch.randn(p.full_shape, generator=generator).to(dtype))
        manager.step()

    if writes:
        step(0)
        checkpoint.save(folder, 1, model, manager)
        state = manager.state_dict(gather_opt=True)
        if bmt.rank() == 0:
            torch.save(state, f"{folder}/state.pt")
    elif bmt.world_size() == 3:
        checkpoint.load(folder, model, manager)
    else:
        checkpoint.load(folder, model)
        manager.load_state_dict(torch.load(f"{folder}/state.pt"))
    step(1)
    return [p.gather().detach().clone() for p in named.values()]


@pytest.mark.parametrize("name", ["adafactor", "shampoo", "lamb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_continues_at_another_number_of_ranks(name: str, dtype: torch.dtype, tmp_path: Any) -> None:
    expected = run_ranks(2, resume, name, dtype, str(tmp_path), True)[0]
    for world in (3, 1):
        found = run_ranks(world, resume, name, dtype, str(tmp_path), False)[0]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def local() -> None:
    """The state of one rank; options; a class's own state dict; groups."""
    model = Model(torch.float32, {})
    named, optimizer = make("lamb", model)
    assert sum(optimizer.owns(p) for p in named.values()) < len(named)
    for p in named.values():
        p.load_grad(torch.ones(p.full_shape))
    optimizer.step()
    own = optimizer.state_dict()
    _, again = make("lamb", model)
    del own["layout"]["slice_bytes"]  # as in files from before slices were aligned
    again.load_state_dict(own)
    assert all(
        torch.equal(again.state[p]["exp_avg"], entry["exp_avg"]) for p, entry in optimizer.state.items()
    )
    before = copy.deepcopy(own["state"])
    again.step()
    torch.testing.assert_close(own["state"], before, rtol=0, atol=0)  # a loaded state stays as it is
    own["layout"]["world_size"] += 1
    with pytest.raises(ValueError, match="loads only at the layout it was saved at"):
        again.load_state_dict(own)
    plain = Lamb([torch.nn.Parameter(p.gather().clone()) for p in named.values()])
    plain.load_state_dict(optimizer.state_dict(gather=True))
    again.load_state_dict(plain.state_dict())
    assert again.state.keys() == optimizer.state.keys()
    more = bmt.DistributedParameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [("more", more)], "lr": 0.5})
    more.load_grad(torch.eye(4))
    optimizer.step()
    assert not torch.equal(more.gather(), torch.ones(4, 4)) and len(optimizer.param_groups) == 2
    held = [value for entry in optimizer.state.values() for value in entry.values()]
    assert len(held) == 3 * len(optimizer.state)  # two moments and the value
    report = bmt.memory_report(model, optimizer)
    assert report.optimizer == sum(x.untyped_storage().nbytes() for x in held)
    assert report.owned == 4 * sum(p.full_numel for p in [*named.values(), more] if optimizer.owns(p))
    with pytest.raises(ValueError, match="optim: an optimizer of whole_matrix"):
        bmt.dcp.save("none", model, optimizer)
    assert not os.path.exists("none")
    with pytest.raises(TypeError, match=r"Lamb.*state_dict\(gather=True\)"):
        pickle.dumps(optimizer)


def test_state_of_one_rank_and_further_groups() -> None:
    run_ranks(2, local)


def regrouped(change: str) -> None:
    """Groups that a script changes in place, as it may those of a torch optimizer."""
    torch.manual_seed(2)
    values = [torch.randn(shape) for shape in ((4, 3), (5,), (2, 6), (3, 3))]
    ours = [bmt.DistributedParameter(value) for value in values]
    theirs = [torch.nn.Parameter(value.clone()) for value in values]
    optimizers = [
        whole_matrix(Lamb, [{"params": ours[:2]}, {"params": ours[2:3], "lr": 0.3}]),
        Lamb([{"params": theirs[:2]}, {"params": theirs[2:3], "lr": 0.3}]),
    ]
    for step in range(3):
        for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
            groups = optimizer.param_groups
            if step == 1 and change == "move":
                groups[1]["params"].append(groups[0]["params"].pop(0))
            elif step == 1 and change == "remove":
                del groups[0]
            elif step == 1:
                groups[0]["params"].insert(0, params[3])
            for p in params:
                gradient = torch.full((p.full_shape if params is ours else p.shape), 0.1 + step)
                p.load_grad(gradient) if params is ours else setattr(p, "grad", gradient)
            optimizer.step()
        assert all(torch.equal(p.gather(), q) for p, q in zip(ours, theirs, strict=True))
    again = whole_matrix(Lamb, [{"params": list(group["params"])} for group in optimizers[0].param_groups])
    again.load_state_dict(optimizers[0].state_dict(gather=True))
    optimizers[1].step()
    again.step()
    assert all(torch.equal(p.gather(), q) for p, q in zip(ours, theirs, strict=True))


def taken_out(whole_group: bool) -> None:
    """Parameters that a script takes out of the groups and puts back: a state dict between is of the others."""
    torch.manual_seed(2)
    values = [torch.randn(shape) for shape in ((4, 3), (5,), (2, 6), (3, 3))]
    ours = [bmt.DistributedParameter(value) for value in values]
    theirs = [torch.nn.Parameter(value.clone()) for value in values]
    optimizers = [whole_matrix(Lamb, [{"params": ours[:2]}, {"params": ours[2:]}])]
    optimizers.append(Lamb([{"params": theirs[:2]}, {"params": theirs[2:]}]))
    taken: list[list] = [[], []]
    for step in range(4):
        for optimizer, params, out in zip(optimizers, (ours, theirs), taken, strict=True):
            groups = optimizer.param_groups
            if step == 1:
                out += [groups.pop(1)] if whole_group else [groups[1]["params"].pop(0)]
            elif step == 3:
                groups.append(out.pop()) if whole_group else groups[1]["params"].insert(0, out.pop())
            for p in params:
                gradient = torch.full((p.full_shape if params is ours else p.shape), 0.1 + step)
                p.load_grad(gradient) if params is ours else setattr(p, "grad", gradient)
            optimizer.step()
        if step == 2:
            with mock.patch.object(Lamb, "state_dict", side_effect=OSError), pytest.raises(OSError):
                optimizers[0].state_dict()
            state = optimizers[0].state_dict(gather=True)
            assert sorted(state["state"]) == list(range(2 if whole_group else 3))
        assert all(torch.equal(p.gather(), q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("whole_group", [False, True])
def test_state_without_parameters_that_are_out_of_the_groups(whole_group: bool) -> None:
    run_ranks(2, taken_out, whole_group)


@pytest.mark.parametrize("change", ["move", "remove", "insert"])
def test_groups_changed_in_place_are_followed(change: str) -> None:
    run_ranks(2, regrouped, change)


def traffic() -> None:
    """A gradient travels to its owner and a value back; a step has two more messages, of flags and of errors."""
    model = Model(torch.float32, {})
    named, optimizer = make("centred", model)
    model(torch.ones(5, 6)).backward()
    comm, world = bmt.config["comm"], bmt.world_size()
    comm.reset_traffic()
    optimizer.step()
    found = {kind: tuple(counts) for kind, counts in comm.traffic().items() if counts[0]}
    parts = [
        p._spec.part(r)[1] for p in named.values() for r in range(world) if r != optimizer._members.owners[p]
    ]
    sent = bmt.distributed.all_reduce(torch.tensor(found.pop("send"), dtype=torch.float64))
    assert sent.tolist() == [2 * sum(part > 0 for part in parts), 2 * 4 * sum(parts)]
    del found["recv"]
    assert found == {"all_reduce": (1, len(named) * (world - 1)), "all_gather": (1, world - 1)}


def test_a_gradient_travels_to_its_owner_and_a_value_back() -> None:
    run_ranks(3, traffic)


class Failing(Simple):
    def update(self, p: torch.nn.Parameter, state: dict[str, Any], lr: float) -> None:
        if bmt.rank() == 1:
            raise ArithmeticError("no root")


def wrong() -> None:
    p = bmt.DistributedParameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match="cls: expected an optimizer that steps by gradients, got LBFGS"):
        whole_matrix(torch.optim.LBFGS, [p])
    with pytest.raises(TypeError, match="cls: expected a subclass of torch.optim.Optimizer"):
        whole_matrix(torch.nn.Linear, [p])  # type: ignore[arg-type]
    for params in (p, [1]):
        with pytest.raises(TypeError, match="params: expected parameters"):
            whole_matrix(Lamb, params)
    with pytest.raises(TypeError, match="param_group: expected a dict with 'params', got {'lr': 1}"):
        whole_matrix(Lamb, [{"lr": 1}])
    parameters = [bmt.DistributedParameter(torch.ones(4, 4)) for _ in range(2)]
    optimizer = whole_matrix(Failing, parameters)
    with pytest.raises(
        ValueError, match="state_dict: expected what .* got a dict without state, param_groups"
    ):
        optimizer.load_state_dict({})
    for q in parameters:
        q.load_grad(torch.ones(4, 4))
    with pytest.raises(Exception, match="no root"):
        optimizer.step()


def test_wrong_classes_and_errors_of_an_owner_are_raised_on_all_ranks() -> None:
    run_ranks(2, wrong)


class ShardedLamb(torch.optim.Optimizer):
    """`Lamb` on shards, by the norms of whole tensors."""

    for_shards = True

    def __init__(self, params: Iterable[Any], lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params, directions = group["params"], []
            for p in params:
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.01)
                directions.append(state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6))
            norms = bmt.optim.whole_norms([*params, *params], [*params, *directions])
            rates = group["lr"] * norms[: len(params)] / norms[len(params) :].clamp(min=1e-12)
            for p, direction, rate in zip(params, directions, rates, strict=True):
                p.sub_(direction * rate)


def norms_of_doubles() -> None:
    whole = torch.linspace(-1, 3, 1001, dtype=torch.float64)
    p = bmt.DistributedParameter(whole)
    norms = bmt.optim.whole_norms([p, p], [p, p.detach() * 1e200])
    assert norms[0].item() == pytest.approx(whole.norm().item(), rel=1e-7)
    assert norms[1].isinf()  # in fp32


def test_norms_of_doubles() -> None:
    run_ranks(2, norms_of_doubles)


def lamb_on_shards(policy: dict[str, Any]) -> None:
    model = Model(torch.float32, policy)
    named = dict(model.named_parameters())
    optimizer, manager = ShardedLamb(named.values()), OptimManager()
    manager.add_optimizer(optimizer)
    whole = {name: torch.nn.Parameter(p.gather().clone()) for name, p in named.items()}
    reference = Lamb(whole.values())
    comm = bmt.config["comm"]
    for step in range(4):
        losses(model, manager, step, torch.float32)
        for name, p in named.items():
            whole[name].grad = p.gather_grad()
        reference.step()
        comm.reset_traffic()
        optimizer.step()
        traffic = {kind: counts for kind, counts in comm.traffic().items() if counts[0]}
        if bmt.world_size() > 1:  # two numbers of 8 bytes for each parameter to each rank
            assert traffic.keys() == {"all_reduce"}
            assert tuple(traffic["all_reduce"]) == (1, 16 * len(named) * (bmt.world_size() - 1))
        for name, p in named.items():
            torch.testing.assert_close(p.gather(), whole[name].detach(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("world", "policy"), [(1, {}), (2, {}), (3, {"level": 2}), (4, {"zero_size": 2})], ids=str
)
def test_an_optimizer_that_needs_norms_moves_norms_only(world: int, policy: dict[str, Any]) -> None:
    run_ranks(world, lamb_on_shards, policy)
