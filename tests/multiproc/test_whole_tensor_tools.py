"""Tools that compute over parameters as if they were whole: right on shards, or refused with what to use instead."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint.state_dict as dcp
from harness import run_ranks

import bmtrain as bmt


def with_gradients() -> list[torch.nn.Parameter]:
    """Parameters outside and inside a Block, with gradients."""
    torch.manual_seed(0)
    outer = bmt.BMTrainModelWrapper(torch.nn.Linear(6, 5))
    block = bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(5, 3)))
    (block(outer(torch.randn(4, 6))).square().sum() / bmt.world_size()).backward()
    return [*outer.parameters(), *block.parameters()]


def clip(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def scale(parameters: list[torch.nn.Parameter]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))


def scale_and_step(parameters: list[torch.nn.Parameter]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(bmt.optim.AdamOptimizer(parameters))


def adafactor(parameters: list[torch.nn.Parameter]) -> None:
    torch.optim.Adafactor(parameters).step()


def lbfgs(parameters: list[torch.nn.Parameter]) -> None:
    torch.optim.LBFGS(parameters).step(lambda: torch.zeros(()))


#: As the function of peft that this library knows by its name.
ADALORA = {"__name__": "peft.tuners.adalora.layer"}
exec(
    "def update_ipt(parameters):\n"
    "    for p in parameters:\n"
    "        (p * p.grad).abs().detach().mean(dim=1, keepdim=True)",
    ADALORA,
)


def adalora(parameters: list[torch.nn.Parameter]) -> None:
    ADALORA["update_ipt"](parameters)


def refused(tool: Callable[[list[torch.nn.Parameter]], None], remedy: str) -> None:
    parameters = with_gradients()
    before = [(p.detach().clone(), p.grad.clone()) for p in parameters]
    with pytest.raises(RuntimeError, match=remedy):
        tool(parameters)
    for p, (value, gradient) in zip(parameters, before, strict=True):
        assert torch.equal(p.detach(), value) and torch.equal(p.grad, gradient)


REFUSED = [
    (clip, "OptimManager.clip_grad_norm"),
    (adalora, "AdaLoRA of peft.*peft.LoraConfig"),
    (scale, "OptimManager"),
    (scale_and_step, "OptimManager"),
    (adafactor, "bmtrain.optim.whole_matrix"),
    (lbfgs, "bmtrain.optim.AdamOptimizer"),
]


def all_refused() -> None:
    for tool, remedy in REFUSED:
        refused(tool, remedy)


def test_refused_on_shards_naming_what_to_use() -> None:
    run_ranks(2, all_refused)


def right_alone() -> None:
    for tool in (clip, scale, lbfgs):
        tool(with_gradients())
    refused(adafactor, "bmtrain.optim.whole_matrix")  # flat, even if whole: what it factors are matrices


def test_one_rank_may_use_what_needs_all_elements() -> None:
    run_ranks(1, right_alone)


def element_by_element() -> list[float]:
    parameters = with_gradients()
    torch.nn.utils.clip_grad_value_(parameters, 0.5)
    assert all(p.grad.abs().max() <= 0.5 for p in parameters if p.numel())
    for kind in (
        torch.optim.SGD,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    ):
        kind(parameters, lr=0.01).step()
    return [bmt.parameter.full_value(p).sum().item() for p in parameters]


def test_tools_that_work_element_by_element() -> None:
    assert run_ranks(2, element_by_element)[0] == pytest.approx(run_ranks(1, element_by_element)[0], rel=1e-5)


def gradients_come_and_go() -> None:
    p = with_gradients()[0]
    assert p.grad is p.grad
    given = torch.ones(p.shape)
    p.grad = given
    assert p.grad is given
    del p.grad
    assert p.grad is None
    with pytest.raises(RuntimeError):
        p.grad = torch.ones(p.numel() + 1)


def test_the_attribute_is_torchs_own() -> None:
    run_ranks(2, gradients_come_and_go)


def states_by_torchs_functions(in_a_plain_module: bool) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ModuleList([torch.nn.Linear(5, 3)]))
    model = bmt.BMTrainModelWrapper(net)
    root = torch.nn.Sequential(model) if in_a_plain_module else model
    before = copy.deepcopy(root.state_dict())
    whole = dcp.StateDictOptions(full_state_dict=True)
    for kind in (torch.optim.AdamW, bmt.optim.AdamOptimizer, torch.optim.SGD):
        optimizer = kind(root.parameters(), lr=0.1)
        empty = {"state": {}, "param_groups": []}
        for function, *arguments in (
            (dcp.get_optimizer_state_dict,),
            (dcp.set_optimizer_state_dict, empty),
            (dcp.get_state_dict,),
        ):
            for options in (None, whole):
                with pytest.raises(RuntimeError, match=rf"{function.__name__}.*gather_opt=True"):
                    function(root, optimizer, *arguments, options=options)
        assert not optimizer.state
    weights = dcp.get_model_state_dict(root, options=whole)
    assert weights.keys() == before.keys() and all(torch.equal(weights[key], before[key]) for key in before)
    dcp.set_model_state_dict(root, {key: value * 2 for key, value in before.items()}, options=whole)
    assert all(torch.equal(value, before[key] * 2) for key, value in root.state_dict().items())


@pytest.mark.parametrize("in_a_plain_module", [False, True])
def test_optimizer_states_by_torchs_functions_are_refused(in_a_plain_module: bool) -> None:
    run_ranks(2, states_by_torchs_functions, in_a_plain_module)


#: Names of optimizers that compute norms, factors, projections or means of whole tensors.
KNOWN = ["Lamb", "SOAP", "CAME", "GaLoreAdamW", "Adam_mini", "NovoGrad", "StableAdamW"]


def manager_refuses() -> None:
    parameters = with_gradients()
    manager = bmt.optim.OptimManager()
    for name in KNOWN:
        kind: type[torch.optim.SGD] = type(name, (torch.optim.SGD,), {})
        with pytest.raises(ValueError, match=rf"{name}.*whole_matrix\({name}"):
            manager.add_optimizer(kind(parameters))
        manager.add_optimizer(kind([torch.nn.Parameter(torch.ones(2))]))
    assert len(manager.optimizers) == len(KNOWN)


@pytest.mark.parametrize("world", [1, 2])
def test_the_manager_refuses_optimizers_known_for_norms_of_tensors(world: int) -> None:
    run_ranks(world, manager_refuses)
