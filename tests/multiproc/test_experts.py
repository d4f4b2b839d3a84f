"""Mixtures of experts, divided over ranks or not, against plain PyTorch in one process with all ranks' tokens."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from harness.hit_experts import HitExperts

import bmtrain
from bmtrain._engine.experts import run_experts
from bmtrain._shards.full_values import full_value
from bmtrain.distributed import checkpoint
from bmtrain.loss import load_balancing_loss, router_z_loss

DIM, HIDDEN, EXPERTS, TOP_K, LAYERS = 16, 24, 4, 2, 3
#: Added to the experts' logits.
ROUTED = {"free": [0.0, 0, 0, 0], "all to two": [8.0, 0, 0, 8], "none to one": [0.0, -8, 0, 0]}
#: Ranks, and those that hold the experts together; last, those of a tensor-parallel group.
LAYOUTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 2, 2), (4, 4, 1), (4, 4, 2)]


class Layer(bmtrain.DistributedModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.moe = bmtrain.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, **options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, logits = self.moe(torch.tanh(x))
        return x + y, logits


class Model(bmtrain.DistributedModule):
    def __init__(self, recompute: str, **options: Any) -> None:
        super().__init__()
        policy = bmtrain.BlockPolicy(recompute=recompute)
        self.layers = torch.nn.ModuleList(
            bmtrain.Block(Layer(**options), policy=policy) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = []
        for layer in self.layers:
            x, found = layer(x)
            logits.append(found)
        return x, torch.cat(logits)


def plain_moe(x: torch.Tensor, weights: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
    """The layer as its docstring describes it, one expert after the other."""
    logits = x @ weights["router.weight"].T
    scores = logits.softmax(-1) if options.get("scoring", "softmax") == "softmax" else logits.sigmoid()
    factors, index = scores.topk(TOP_K, dim=-1)
    if options.get("normalize", True):
        factors = factors / factors.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        gate, up = (x @ weights["experts.gate_up"][expert].T).chunk(2, dim=-1)
        of_all = (F.silu(gate) * up) @ weights["experts.down"][expert].T
        y = y + of_all * (factors * (index == expert)).sum(-1, keepdim=True)
    if options.get("shared_hidden_dim"):
        gate, up = (x @ weights["shared_gate_up.weight"].T).chunk(2, dim=-1)
        y = y + (F.silu(gate) * up) @ weights["shared_down.weight"].T
    return y, logits


def plain_loss(x: torch.Tensor, target: torch.Tensor, weights: dict[str, torch.Tensor], options: Any) -> Any:
    all_logits = []
    for layer in range(LAYERS):
        prefix = f"layers.{layer}.moe."
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        y, logits = plain_moe(torch.tanh(x), own, options)
        x = x + y
        all_logits.append(logits)
    logits = torch.cat(all_logits)
    frequencies = torch.zeros_like(logits).scatter_(-1, logits.topk(TOP_K).indices, 1).mean(0)
    balance = EXPERTS * (frequencies * logits.softmax(-1).mean(0)).sum()
    z = torch.logsumexp(logits, -1).square().mean()
    return (x * target).sum() / len(x) + 0.1 * balance + 0.01 * z


def tokens_of(rank: int, world: int, numbers: str) -> tuple[torch.Tensor, torch.Tensor]:
    count = 10 if numbers == "even" else (7 * rank) % 12  # the first rank has none, unless it is alone
    count = max(count, 5) if world == 1 else count
    generator = torch.Generator().manual_seed(rank)
    x, target = (torch.randn(count, DIM, generator=generator) for _ in range(2))
    x[:, 0] = 3  # about 1 after tanh, for `ROUTED`
    return x, target


def close(found: torch.Tensor, expected: torch.Tensor, what: str, single: torch.Tensor | None = None) -> None:
    """``single``: one process's in fp32, whose rounding counts where that is more than 1e-6 (large terms cancel)."""
    limit = 1e-6 * expected.abs().max().clamp_min(1e-3)
    if single is not None:
        limit = torch.maximum(limit, 2 * (single - expected).abs().max())
    assert (found - expected).abs().max() < limit, what


def merged_gradient(param: Any) -> torch.Tensor:
    gradient = param.gather_grad()
    if not param._ep_mode:
        return gradient
    parts = bmtrain.distributed.all_gather(gradient, comm=bmtrain.config["ep_comm"])
    return parts.flatten(0, 1)


def train(routing: str, numbers: str, recompute: str, options: dict[str, Any]) -> None:
    rank, world, tp = bmtrain.rank(), bmtrain.world_size(), bmtrain.config["tp_size"]
    model = Model(recompute, **options)
    bmtrain.init_parameters(model)
    for name, param in model.named_parameters():
        if name.endswith("router.weight"):
            router = full_value(param)
            router[:, 0] += torch.tensor(ROUTED[routing])
            param.load(router)
    weights = {name: full_value(param).double().requires_grad_() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = bmtrain.optim.OptimManager()
    manager.add_optimizer(optimizer)
    plain = torch.optim.SGD(weights.values(), lr=0.1)
    x, target = tokens_of(rank, world, numbers)
    everybody = [tokens_of(r, world, numbers) for r in range(world)]
    all_x, all_target = (torch.cat(parts).double() for parts in zip(*everybody, strict=True))
    for _ in range(3):
        manager.zero_grad()
        y, logits = model(x)
        own = (y * target).sum() * world / len(all_x)
        loss = own + 0.1 * load_balancing_loss(logits, TOP_K) + 0.01 * router_z_loss(logits)
        manager.backward(loss / tp)
        plain.zero_grad()
        expected = plain_loss(all_x, all_target, weights, options)
        expected.backward()
        singles = {name: value.detach().float().requires_grad_() for name, value in weights.items()}
        plain_loss(all_x.float(), all_target.float(), singles, options).backward()
        mean = bmtrain.distributed.all_reduce(loss.detach(), "avg")
        close(mean + 10, expected.detach() + 10, "loss")  # a sum of large terms of both signs
        for name, param in model.named_parameters():
            close(merged_gradient(param), weights[name].grad, name, singles[name].grad)
        norm = manager.clip_grad_norm(optimizer.param_groups, 0.1)
        close(norm.float(), torch.nn.utils.clip_grad_norm_(list(weights.values()), 0.1), "norm")
        manager.step()
        plain.step()
    for name, param in model.named_parameters():
        close(full_value(param), weights[name].detach(), name)


def weights_of_small_scores(scoring: str, dtype: torch.dtype) -> None:
    """Scores below the smallest float still have a quotient."""
    layer = bmtrain.nn.MoE(DIM, HIDDEN, EXPERTS, TOP_K, scoring=scoring, dtype=dtype)
    bmtrain.init_parameters(layer)
    router = torch.zeros(EXPERTS, DIM)
    router[:, 0] = torch.tensor([-110.0, -111, -112, -150])
    layer.router._parameters["weight"].load(router)
    found = []

    def note(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found.append((index, weights))
        return x * weights.sum(-1, keepdim=True).to(x.dtype)

    layer.experts.forward = note
    x = torch.ones(3, DIM, dtype=dtype, requires_grad=True)
    y, logits = layer(x)
    (index, weights), exact = found[0], logits.detach().double()
    scores = exact.softmax(-1) if scoring == "softmax" else exact.sigmoid()
    expected, places = scores.topk(TOP_K)
    assert torch.equal(index, places)
    torch.testing.assert_close(weights.double(), expected / expected.sum(-1, keepdim=True), rtol=2e-5, atol=0)
    (weights[:, 0].sum() + y.sum()).backward()
    assert x.grad.isfinite().all()
    assert layer.router._parameters["weight"].grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_weights_of_small_scores_are_finite(scoring: str, dtype: torch.dtype) -> None:
    run_ranks(1, weights_of_small_scores, scoring, dtype)


def overflow_of_one_expert() -> None:
    model = Model("whole")
    bmtrain.init_parameters(model)
    manager = bmtrain.optim.OptimManager(loss_scale=4.0)
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = {name: full_value(param) for name, param in model.named_parameters()}
    manager.backward(model(torch.ones(4, DIM))[0].sum())
    if bmtrain.rank() == 1:
        next(p for p in model.parameters() if p._ep_mode).grad.view(-1)[0] = float("inf")
    manager.step()
    assert manager.loss_scale == 2
    assert all(torch.equal(full_value(param), before[name]) for name, param in model.named_parameters())


def route_bf16() -> None:
    layer = bmtrain.nn.MoE(dim=16, hidden_dim=8, num_experts=4, dtype=torch.bfloat16)
    bmtrain.init_parameters(layer)
    x = torch.randn(6, 16).bfloat16()
    weight = layer.state_dict()["router.weight"]
    assert torch.equal(layer(x)[1], torch.nn.functional.linear(x.float(), weight.float()))


def test_a_router_of_bf16_computes_in_fp32() -> None:
    run_ranks(2, route_bf16)


def test_an_overflow_of_one_expert_skips_the_step_on_all_ranks() -> None:
    run_ranks(2, overflow_of_one_expert, init={"ep_size": 2})


def save(folder: str) -> None:
    model = Model("whole")
    bmtrain.init_parameters(model)
    optimizer = bmtrain.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmtrain.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for _ in range(2):
        manager.zero_grad()
        manager.backward(model(torch.ones(4, DIM))[0].square().mean())
        manager.step()
    checkpoint.save(folder, 2, model, manager)
    bmtrain.save(model, f"{folder}/whole.pt")


def load(folder: str) -> tuple[dict[str, torch.Tensor], dict[Any, Any]]:
    model = Model("whole")
    bmtrain.init_parameters(model)
    manager = bmtrain.optim.OptimManager()
    optimizer = bmtrain.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager.add_optimizer(optimizer)
    checkpoint.load(folder, model, manager)
    weights = {name: full_value(param) for name, param in model.named_parameters()}
    bmtrain.load(model, f"{folder}/whole.pt")
    for name, param in model.named_parameters():
        assert torch.equal(full_value(param), weights[name])
    return weights, optimizer.state_dict(gather=True)["state"]


def test_checkpoints_fit_any_division(tmp_path: Path) -> None:
    run_ranks(4, save, str(tmp_path), init={"ep_size": 2, "tp_size": 2})
    found = [
        run_ranks(world, load, str(tmp_path), init={"ep_size": ep, "tp_size": tp})[0]
        for world, ep, tp in LAYOUTS
    ]
    for weights, state in found[1:]:
        torch.testing.assert_close(weights, found[0][0], rtol=0, atol=0)
        torch.testing.assert_close(state, found[0][1], rtol=0, atol=0)


def initial() -> dict[str, torch.Tensor]:
    model = Model("whole")
    bmtrain.init_parameters(model)
    return {name: full_value(param) for name, param in model.named_parameters()}


def test_initial_values_are_the_same() -> None:
    found = [run_ranks(world, initial, init={"ep_size": ep, "tp_size": tp})[0] for world, ep, tp in LAYOUTS]
    for values in found[1:]:
        torch.testing.assert_close(values, found[0], rtol=0, atol=0)


def count_bytes() -> tuple[dict[str, Any], int]:
    experts = bmtrain.nn.Experts(DIM, HIDDEN, EXPERTS)
    bmtrain.init_parameters(experts)
    comm, tokens = bmtrain.config["ep_comm"], 6
    index = torch.arange(tokens * TOP_K).view(tokens, TOP_K) % EXPERTS
    x = torch.randn(tokens, DIM, requires_grad=True)
    comm.reset_traffic()
    experts(x, index, torch.ones(tokens, TOP_K)).sum().backward()
    return comm.traffic(), tokens * TOP_K // 2 * DIM * 4


def test_sends_the_rows_of_other_ranks_and_nothing_else() -> None:
    for traffic, bytes_of_others in run_ranks(2, count_bytes, init={"ep_size": 2}):
        assert traffic["all_to_all"] == (4, 4 * bytes_of_others)  # there and back, and their gradients
        assert traffic["all_gather"] == (1, EXPERTS * 8)


def refused() -> None:
    with pytest.raises(ValueError, match="num_experts: expected a multiple of ep_size 2, got 3"):
        bmtrain.nn.MoE(4, 4, 3)
    with pytest.raises(ValueError, match="top_k: expected at most num_experts 4, got 5"):
        bmtrain.nn.MoE(4, 4, 4, 5)
    with pytest.raises(ValueError, match="scoring: expected 'softmax' or 'sigmoid'"):
        bmtrain.nn.MoE(4, 4, 4, scoring="tanh")
    layer = bmtrain.nn.MoE(4, 4, 4)
    bmtrain.init_parameters(layer)
    with pytest.raises(ValueError, match="expected a last dim of 4"):
        layer.experts(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"expected \(tokens, 4\) and \(tokens, k\)"):
        layer.experts(torch.ones(2, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"top_k_weights: expected shape \(2, 1\), got \(2, 2\)"):
        layer.experts(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 2))
    for index in (-1, 4):
        with pytest.raises(ValueError, match=f"top_k_index: expected 0 to 3, got .*{index}"):
            layer.experts(torch.ones(2, 4), torch.tensor([[0], [index]]), torch.ones(2, 1))


def test_wrong_arguments_are_named() -> None:
    run_ranks(2, refused, init={"ep_size": 2})


def router_losses(dtype: torch.dtype, mask_dtype: torch.dtype | None) -> None:
    """More tokens than bf16 counts, and other numbers of them on each rank."""
    torch.manual_seed(0)
    all_logits = [torch.randn(n, EXPERTS).mul(3).to(dtype) for n in (301, 78)]
    all_masks = [torch.rand(len(logits)).gt(0.03 if mask_dtype else -1) for logits in all_logits]
    own = all_logits[bmtrain.rank()].clone()
    own[~all_masks[bmtrain.rank()]] = torch.nan  # as attention without any key gives tokens of padding
    own.requires_grad_()
    mask = None if mask_dtype is None else all_masks[bmtrain.rank()].to(mask_dtype)
    found = load_balancing_loss(own, TOP_K, mask) + router_z_loss(own, mask)
    assert found.dtype == torch.float32
    (found / bmtrain.world_size()).backward()

    single = torch.cat(all_logits).double().requires_grad_()
    counted = single[torch.cat(all_masks)]
    frequencies = F.one_hot(counted.topk(TOP_K).indices, EXPERTS).sum(1).double().mean(0)
    balance = EXPERTS * frequencies @ counted.softmax(-1).mean(0)
    expected = balance + counted.logsumexp(-1).square().mean()
    expected.backward()
    mean = bmtrain.distributed.all_reduce(found.detach(), "avg")
    torch.testing.assert_close(mean.double(), expected.detach(), rtol=1e-6, atol=0)
    grads = single.grad.split([301, 78])[bmtrain.rank()]
    rounding = 2.0**-7 if dtype == torch.bfloat16 else 1e-5  # of the gradient of either loss
    atol = rounding * float(grads.abs().max()) / 8
    torch.testing.assert_close(own.grad, grads.to(dtype), rtol=rounding, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask_dtype", [None, torch.bool])
def test_losses_of_routers_equal_one_process(dtype: torch.dtype, mask_dtype: torch.dtype | None) -> None:
    run_ranks(2, router_losses, dtype, mask_dtype)


def under_autocast(dim: int) -> None:
    """Products in bf16, as of linear layers, also where rows of matrices are no multiples of 16 bytes."""
    layer, dtypes = bmtrain.nn.MoE(dim, dim + 2, EXPERTS, TOP_K), set()
    layer.experts.act = lambda gate: (dtypes.add(gate.dtype), F.silu(gate))[1]
    bmtrain.init_parameters(layer)
    x = torch.randn(9, dim, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, logits = layer(x)
    assert (dtypes, y.dtype, logits.dtype) == ({torch.bfloat16}, torch.float32, torch.float32)
    y.square().sum().backward()
    weights = {name: full_value(param).requires_grad_() for name, param in layer.named_parameters()}
    same = x.detach().clone().requires_grad_()
    expected, _ = plain_moe(same, weights, {})
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad, rtol=0.05, atol=0.02 * float(same.grad.abs().max()))
    for param, weight in zip(layer.parameters(), weights.values(), strict=True):
        assert param.grad.dtype == torch.float32
        atol = 0.02 * float(weight.grad.abs().max())
        torch.testing.assert_close(param.gather_grad(), weight.grad, rtol=0.05, atol=atol)


@pytest.mark.parametrize("dim", [6, 16])
def test_experts_compute_in_the_dtype_of_autocast(dim: int) -> None:
    run_ranks(1, under_autocast, dim)


@pytest.mark.parametrize("routing", ["all to two", "none to one"])
@pytest.mark.parametrize(("world", "ep_size"), [(2, 2), (4, 2)])
def test_experts_without_tokens(world: int, ep_size: int, routing: str) -> None:
    run_ranks(world, train, routing, "uneven", "whole", {}, init={"ep_size": ep_size})


def zeros_of_nothing(trained: str) -> None:
    """As experts of transformers, a rank's without rows return zeros that depend on nothing."""

    def run(rows: torch.Tensor, _: torch.Tensor, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        return rows @ parameters[0] if len(rows) else torch.zeros(rows.shape)

    x, weight = torch.ones(3, DIM) * (1 + bmtrain.rank()), 2 * torch.eye(DIM)
    of_first = torch.zeros(3, 1, dtype=torch.int64)
    leaf = (x if trained == "tokens" else weight).requires_grad_()
    y = run_experts(x, of_first, torch.ones(3, 1), 2, run, [weight])
    assert torch.equal(y, 2 * x)
    y.sum().backward()
    if trained == "tokens":
        assert torch.equal(leaf.grad, torch.full((3, DIM), 2.0))
    else:  # zeros of the rank whose expert no token reaches
        sums = 3.0 + 6.0 if bmtrain.rank() == 0 else 0.0
        assert torch.equal(leaf.grad, torch.full((DIM, DIM), sums))


@pytest.mark.parametrize("trained", ["tokens", "experts"])
def test_zeros_of_nothing_take_part_in_backward(trained: str) -> None:
    run_ranks(2, zeros_of_nothing, trained, init={"ep_size": 2})


def with_an_unused_parameter() -> HitExperts:
    experts = HitExperts(torch.arange(float(EXPERTS)).view(-1, 1, 1).repeat(1, DIM, DIM))
    experts.unused = torch.nn.Parameter(torch.ones(EXPERTS, DIM))  # plain PyTorch lets it be
    return experts


def experts_that_no_token_reaches(in_block: bool) -> None:
    """Weight decay and momentum take the zeros that plain PyTorch has, in Blocks and outside."""
    plain = with_an_unused_parameter()
    model: Any = bmtrain.BMTrainModelWrapper(with_an_unused_parameter())
    model = bmtrain.Block(model) if in_block else model
    options = {"lr": 0.5, "weight_decay": 0.25, "momentum": 0.5}
    optimizers = [torch.optim.SGD(m.parameters(), **options) for m in (plain, model)]
    manager = bmtrain.optim.OptimManager()
    manager.add_optimizer(optimizers[1])
    of_ranks = torch.arange(1.0, 1 + bmtrain.world_size()).view(-1, 1).repeat(1, DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of different numbers of gradients
        for step in range(5):
            index = torch.full((len(of_ranks), 1), EXPERTS - 1 if step == 0 else 0)
            if step == 1:  # with 4 ranks, one of the two that hold the same experts has tokens
                index[2:] = EXPERTS - 1
            own = slice(bmtrain.rank(), bmtrain.rank() + 1)
            manager.zero_grad()
            manager.backward(model(of_ranks[own], index[own], torch.ones(1, 1)).sum())
            manager.step()
            optimizers[0].zero_grad()
            (plain(of_ranks, index, torch.ones(index.shape)).sum() / len(of_ranks)).backward()
            optimizers[0].step()
    weight, unused = model.parameters()
    torch.testing.assert_close(full_value(weight), plain.weight.detach(), rtol=1e-6, atol=0)
    if not in_block:  # whose parameters have gradients together
        assert unused.grad is None and torch.equal(full_value(unused), plain.unused.detach())


@pytest.mark.parametrize("in_block", [False, True])
@pytest.mark.parametrize(("world", "ep_size"), [(2, 2), (4, 2)])
def test_experts_that_no_token_reaches_decay(world: int, ep_size: int, in_block: bool) -> None:
    run_ranks(world, experts_that_no_token_reaches, in_block, init={"ep_size": ep_size})


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"scoring": "sigmoid"}, id="sigmoid"),
        pytest.param({"normalize": False}, id="not normalized"),
        pytest.param({"shared_hidden_dim": 8}, id="shared"),
    ],
)
def test_options(options: dict[str, Any]) -> None:
    run_ranks(2, train, "free", "even", "whole", options, init={"ep_size": 2})


@pytest.mark.parametrize("recompute", ["off", "whole"])
@pytest.mark.parametrize("numbers", ["even", "uneven"])
@pytest.mark.parametrize(("world", "ep_size", "tp_size"), LAYOUTS)
def test_trains_like_one_process(
    world: int, ep_size: int, tp_size: int, numbers: str, recompute: str
) -> None:
    init = {"ep_size": ep_size, "tp_size": tp_size}
    run_ranks(world, train, "free", numbers, recompute, {}, init=init)
