"""Micro-batches that pass each block together: the bits of one after the other, and fewer bytes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.disk_tier import ALL, kernel_bytes, small_chunks
from harness.offloaded import Layer

import bmtrain as bmt
from bmtrain.global_var import context

LAYERS = 4


def layers_of(policy: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        return bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(LAYERS)])


def batches(step: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + bmt.rank())
    return [torch.randn(2 + number, 40, generator=generator) for number in range(count)]


def step_of(layers: Any, inputs: list[torch.Tensor], vertical: bool) -> list[torch.Tensor]:
    """Returns the losses of the micro-batches; their gradients are left in the parameters."""
    if vertical:
        losses = [out.square().mean() / len(inputs) for out in layers.vertical(inputs)]
        sum(losses).backward()
        return losses
    losses = []
    for x in inputs[:-1]:
        with bmt.no_sync():
            losses.append(layers(x).square().mean() / len(inputs))
            losses[-1].backward()
    losses.append(layers(inputs[-1]).square().mean() / len(inputs))
    losses[-1].backward()
    return losses


def train(policy: dict[str, Any], count: int, vertical: bool) -> list[torch.Tensor]:
    layers = layers_of(policy)
    first = torch.nn.Parameter(torch.ones(40))  # so that the first block has a gradient to pass on
    optimizer = bmt.optim.AdamOptimizer(layers.parameters(), lr=0.01)
    hooked: list[torch.Tensor] = []
    layers[1].weight.register_post_accumulate_grad_hook(lambda p: hooked.append(p.grad.clone()))
    seen: list[torch.Tensor] = []
    for step in range(4):
        optimizer.zero_grad()
        first.grad = None
        inputs = batches(step, count)
        inputs = [x * first for x in reversed(inputs)][
            ::-1
        ]  # torch adds their gradients in the opposite order
        seen += [loss.detach() for loss in step_of(layers, inputs, vertical)]
        if step == 2:  # to which those of another backward are added
            seen += [loss.detach() for loss in step_of(layers, batches(7, count), vertical)]
        seen += [p.grad.clone() for p in (first, *layers.parameters())]
        bmt.optim.clip_grad.clip_gradients(optimizer.param_groups, 0.1)
        optimizer.step()
        with torch.no_grad():  # an evaluation between
            seen += layers.vertical(batches(9, 2)) if vertical else [layers(x) for x in batches(9, 2)]
    assert len(hooked) == 5
    return [*seen, *hooked, *(p.detach().clone() for p in layers.parameters())]


def compare(policy: dict[str, Any], count: int) -> None:
    small_chunks()
    expected = train({key: value for key, value in policy.items() if key not in ALL}, count, vertical=False)
    for number, (a, b) in enumerate(zip(train(policy, count, vertical=True), expected, strict=True)):
        assert torch.equal(a, b), f"value {number} of {len(expected)} differs"


@pytest.mark.parametrize(
    ("world", "count", "policy"),
    [
        (1, 1, {}),
        (1, 3, ALL),
        (2, 3, {}),
        (2, 4, ALL),
        (2, 3, {"level": 2, "recompute": "off", **ALL}),
        (2, 3, {"level": 1}),
        (2, 3, {"keep_gathered": True}),
        (4, 2, {"zero_size": 2, **ALL}),
    ],
)
def test_same_bits(world: int, count: int, policy: dict[str, Any], tmp_path: Path) -> None:
    environment = {"BMTRAIN_POISON_BUFFERS": "1"}
    run_ranks(
        world, compare, policy, count, init={"tier_directories": [str(tmp_path)]}, environment=environment
    )


def messages() -> Counter[str]:
    found = Counter[str]()
    for comm in context().communicators():
        found.update({name: number for name, (number, _) in comm.traffic().items()})
    return found


def count_messages(count: int) -> Counter[str]:
    layers = layers_of({})
    before = Counter[str]()
    for step in range(4):
        before = messages()
        step_of(layers, batches(step, count), vertical=True)
    return messages() - before


def test_messages_do_not_depend_on_the_number_of_micro_batches() -> None:
    (one, _), (four, _) = (run_ranks(2, count_messages, count) for count in (1, 4))
    assert one == four
    assert one["all_gather"] == 2 * LAYERS - 1


COUNTS = (1, 4, 16)


def count_bytes() -> list[list[float]]:
    """Returns the bytes that a step reads and writes, in units of the parameters of a block."""
    results = []
    for count in COUNTS:
        with bmt.default_policy(bmt.BlockPolicy(**ALL)):
            layers = bmt.TransformerBlockList(
                [bmt.Block(bmt.nn.Linear(600, 600, bias=False)) for _ in range(LAYERS)]
            )
        optimizer = bmt.optim.AdamOptimizer(layers.parameters())
        before = (0, 0)
        for _ in range(3):
            before = kernel_bytes()
            optimizer.zero_grad(set_to_none=True)
            sum(out.sum() for out in layers.vertical([torch.ones(1, 600)] * count)).backward()
            optimizer.step()
            optimizer._place.finish()
        block = sum(p.numel() * 4 for p in layers[0].parameters())
        results.append([(now - old) / block for now, old in zip(kernel_bytes(), before, strict=True)])
        del layers, optimizer
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_parameters_are_read_twice_a_step(world: int, tmp_path: Path) -> None:
    for results in run_ranks(world, count_bytes, init={"tier_directories": [str(tmp_path)]}):
        for read, written in results:
            # Parameters for forward and backward (the last block stays), and in the step parameters, gradients and two
            # moments.
            assert read == pytest.approx(2 * LAYERS - 1 + 4 * LAYERS, rel=0.02)
            assert written == pytest.approx(LAYERS + 3 * LAYERS, rel=0.02)


def mistakes() -> None:
    layers = layers_of({})
    for given, words in (([], "got numbers of arguments []"), ([torch.ones(1, 40), ()], "[1, 0]")):
        with pytest.raises(
            ValueError, match="micro_batches: expected at least one, each with 1 or more"
        ) as raised:
            layers.vertical(given)
        assert words in str(raised.value)
    first, second = (out.sum() for out in layers.vertical(batches(0, 2)))
    first.backward()
    with pytest.raises(RuntimeError, match="a second time, .* once, on the sum of the losses of vert"):
        second.backward()


class Pair(bmt.DistributedModule):
    """A layer with two hidden states, and a further argument."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
        return (x @ self.weight).tanh() * scale, y + x * mask


def pairs_of(vertical: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = bmt.TransformerBlockList([bmt.Block(Pair()) for _ in range(LAYERS)], num_hidden=2)
    layers[0].requires_grad_(False)  # no node behind it
    optimizer = bmt.optim.SGDOptimizer(layers.parameters(), lr=0.1)
    optim = bmt.optim.OptimManager(accumulate=1 if vertical else 2)
    optim.add_optimizer(optimizer)
    for _ in range(3):
        given = [(torch.randn(3, 4), torch.randn(3, 4), torch.ones(4)) for _ in range(2)]
        if vertical:
            results = layers.vertical(given, scale=0.5)
        else:
            results = (layers(*args, scale=0.5) for args in given)
        losses = ((x * y).mean() for x, y in results)
        optim.zero_grad()
        if vertical:
            optim.backward(sum(loss / 2 for loss in losses))
            optim.step()
        else:
            for loss in losses:
                optim.backward(loss)
                optim.step()
    return [p.detach().clone() for p in layers.parameters()]


def compare_pairs() -> None:
    for a, b in zip(pairs_of(True), pairs_of(False), strict=True):
        assert torch.equal(a, b)


def test_further_arguments_frozen_blocks_and_a_manager() -> None:
    run_ranks(2, compare_pairs)


def inputs_between(policy: dict[str, Any]) -> None:
    """Gradients of inputs, between the backwards of one accumulation."""
    layers, others = layers_of(policy), layers_of(policy)
    inputs = [x.requires_grad_() for x in batches(0, 3)]
    for number, model in enumerate((layers, others)):
        with bmt.no_sync():
            model(inputs[0]).square().sum().backward()
        if number == 0:
            for x in inputs:
                x.grad = None
            found = layers.vertical(inputs)
            hidden = torch.autograd.grad(sum(out.square().sum() for out in found), found, retain_graph=True)
            assert all(map(torch.equal, hidden, (2 * out for out in found)))
            got = torch.autograd.grad(sum(out.square().sum() for out in found), inputs)
            expected = [torch.autograd.grad(layers(x).square().sum(), x)[0] for x in inputs]
            assert all(map(torch.equal, got, expected))
            assert all(p.grad is None for p in layers.parameters())
        model(inputs[1]).square().sum().backward()
    gradients = zip(layers.parameters(), others.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in gradients)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("policy", [{}, {"recompute": "off"}, {"recompute": "whole"}])
def test_gradients_of_inputs_leave_an_accumulation_open(world: int, policy: dict[str, Any]) -> None:
    run_ranks(world, inputs_between, policy)


def fail_and_go_on(policy: dict[str, Any]) -> None:
    """Exceptions in a forward, in a backward between two micro-batches of a block, and in a block's own."""
    small_chunks()
    layers, inputs = layers_of(policy), batches(0, 3)
    expected = [loss.detach() for loss in step_of(layers, inputs, vertical=True)]
    gradients = [p.grad.clone() for p in layers.parameters()]

    def fail(*_: Any) -> None:
        raise KeyError("stop")

    for where in ("forward", "weight", "input"):
        for p in layers.parameters():
            p.grad = None
        given = [x.clone().requires_grad_() for x in inputs]
        if where == "forward":
            handle = layers[2].register_forward_pre_hook(fail)
        elif where == "weight":
            handle = layers[2].weight.register_hook(fail)
        else:  # of the first block: the others have been sent
            handle = given[1].register_hook(fail)
        with pytest.raises(KeyError):
            sum(out.square().mean() for out in layers.vertical(given)).backward()
        handle.remove()
        for p in layers.parameters():
            p.grad = None
        losses = step_of(layers, inputs, vertical=True)
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True)), where
        found = [torch.equal(p.grad, g) for p, g in zip(layers.parameters(), gradients, strict=True)]
        assert all(found), (where, found)


def test_mistakes() -> None:
    run_ranks(1, mistakes)


@pytest.mark.parametrize("policy", [{}, ALL])
def test_another_try_after_an_error(policy: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(2, fail_and_go_on, policy, init={"tier_directories": [str(tmp_path)]})
