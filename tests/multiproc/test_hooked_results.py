"""Tensors that forward hooks of modules inside Blocks keep, used outside: attentions, router logits, features."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.twins import check_gradients, twins
from torch.utils.hooks import RemovableHandle

import bmtrain as bmt


class Layer(torch.nn.Module):
    """A hook on ``score`` sees a tensor that is neither the layer's argument nor its result."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.up, self.drop = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.up(torch.tanh(x) * self.score(x)).tanh())


def collect(
    layers: list[torch.nn.Module], name: str, take: Callable[[Any], Any] = lambda output: output
) -> list:
    """What the hooks of all layers' modules of that name have been shown; cleared before each forward."""
    kept: list = []
    for layer in layers:
        module = dict(layer.named_modules())[name]
        module.register_forward_hook(lambda _module, _args, output: kept.append(take(output)))
    return kept


def step(layers: list[torch.nn.Module], kept: list, x: torch.Tensor, with_result: bool) -> torch.Tensor:
    torch.manual_seed(3)
    kept.clear()
    hidden = x
    for layer in layers:
        hidden = layer(hidden)
    loss = sum(tensor.square().mean() for tensor in kept) + (hidden.square().mean() if with_result else 0)
    kept.clear()
    loss.backward()
    return loss.detach()


def both_ways(name: str, with_result: bool, **options: Any) -> None:
    torch.manual_seed(1)
    plain = [Layer() for _ in range(2)]
    blocks = [bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(layer)), **options) for layer in plain]
    x = torch.randn(2, 4, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    kept, kept_of_blocks = collect(plain, name), collect([block._module for block in blocks], name)
    for _ in range(2):
        expected = step(plain, kept, x, with_result)
        assert torch.equal(step(blocks, kept_of_blocks, twin, with_result), expected)
    torch.testing.assert_close(twin.grad, x.grad, rtol=1e-5, atol=1e-7)
    for layer, block in zip(plain, blocks, strict=True):
        for param, shard in zip(layer.parameters(), block.parameters(), strict=True):
            full = param.grad if param.grad is not None else torch.zeros_like(param)
            part = (full * bmt.world_size()).flatten()[shard._start_partition : shard._end_partition]
            torch.testing.assert_close(shard.grad, part, rtol=1e-5, atol=1e-7)


RECOMPUTES = {"recomputes": {}, "keeps": {"use_checkpoint": False}, "level 2": {"zero_level": 2}}


@pytest.mark.parametrize("options", RECOMPUTES.values(), ids=RECOMPUTES)
@pytest.mark.parametrize("with_result", (True, False))
@pytest.mark.parametrize("name", ("score", "drop", ""))
def test_a_loss_over_what_hooks_keep_trains_as_in_plain_torch(
    name: str, with_result: bool, options: dict[str, Any]
) -> None:
    run_ranks(2, both_ways, name, with_result, **options)


def what_cannot_be_given() -> None:
    block = bmt.Block(bmt.BMTrainModelWrapper(Layer()), use_checkpoint=False)
    for take in (lambda output: output.square(), lambda output: output.view(-1)):
        kept = collect([block._module], "score", take)
        result = block(torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="return it as a further result"):
            (kept[0].mean() + result.mean()).backward()


def test_what_a_hook_computes_is_refused_with_a_way_out() -> None:
    run_ranks(1, what_cannot_be_given)


def nothing_stays(**options: Any) -> None:
    block = bmt.Block(bmt.BMTrainModelWrapper(Layer()), **options)
    kept = collect([block._module], "score")
    block(torch.ones(2, 4))
    [tensor] = kept
    gone = weakref.ref(tensor.untyped_storage())
    kept.clear()
    del tensor
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("use_checkpoint", (True, False))
def test_a_forward_without_backward_keeps_nothing(use_checkpoint: bool) -> None:
    run_ranks(1, nothing_stays, use_checkpoint=use_checkpoint)


def add_forward(module: torch.nn.Module) -> RemovableHandle:
    return module.register_forward_hook(lambda _module, _args, output: output * 1.5)


def add_forward_pre(module: torch.nn.Module) -> RemovableHandle:
    return module.register_forward_pre_hook(
        lambda _module, args, kwargs: ((args[0] * 1.5,), kwargs), with_kwargs=True
    )


def add_backward(module: torch.nn.Module) -> RemovableHandle:
    return module.register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 1.5,))


def add_backward_pre(module: torch.nn.Module) -> RemovableHandle:
    return module.register_full_backward_pre_hook(lambda _module, outputs: (outputs[0] * 1.5,))


def add_to_all(_module: torch.nn.Module) -> RemovableHandle:
    def hook(module: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor | None:
        return output * 1.5 if type(module).__name__.endswith("Dropout") else None

    return torch.nn.modules.module.register_module_forward_hook(hook)


def hooked_in_part(add: Callable[[torch.nn.Module], RemovableHandle], **options: Any) -> None:
    plain, layer = twins(lambda: torch.nn.Sequential(Layer(), Layer()))
    model = torch.nn.Sequential(bmt.Block(layer, **options))
    x = torch.randn(2, 4)
    for passes in ("forward", "backward"):
        given = []
        for layers in (plain, model):
            layers.zero_grad()
            given.append(x.clone().requires_grad_())
            torch.manual_seed(3)
            dropout = next(module for module in layers.modules() if isinstance(module, torch.nn.Dropout))
            handle = add(dropout) if passes == "forward" else None
            result = layers(given[-1])
            if handle is not None:
                handle.remove()
            else:
                handle = add(dropout)
            result.square().sum().backward()
            handle.remove()
        torch.testing.assert_close(given[1].grad, given[0].grad)
        check_gradients(plain, model, none_is_zero=True)
        assert not dropout._forward_hooks and not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("options", RECOMPUTES.values(), ids=RECOMPUTES)
@pytest.mark.parametrize("add", (add_forward, add_forward_pre, add_backward, add_backward_pre, add_to_all))
def test_a_second_run_has_the_hooks_of_the_first(add: Callable, options: dict[str, Any]) -> None:
    run_ranks(1, hooked_in_part, add, **options)


class Several(torch.nn.Module):
    """Returns a tensor and what it computes with it, or with another one."""

    def __init__(self, uses_it: bool, is_hooked: bool = False, gives_argument: bool = False) -> None:
        super().__init__()
        self.linear, self.uses_it, self.gives_argument = torch.nn.Linear(2, 2), uses_it, gives_argument
        if is_hooked:
            self.linear.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        if self.gives_argument:
            return x, y if self.uses_it else self.linear(torch.ones(2, 2)), x[:1]
        return y, (y if self.uses_it else self.linear(x)).tanh(), y[:1]


WATCHES = {
    "hook": lambda y: y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1)),
    "retained": lambda y: y.retain_grad(),
    "removed": lambda y: y.register_hook(torch.neg).remove(),
}


def hooks_of_results(use_checkpoint: bool) -> None:
    flags = (True, False)
    for watch, uses_it, is_hooked, gives_argument in itertools.product(WATCHES, flags, flags, flags):
        plain, inner = twins(lambda kinds=(uses_it, is_hooked, gives_argument): Several(*kinds))  # type: ignore[misc]
        block = bmt.Block(inner, use_checkpoint=use_checkpoint)
        kept = []
        for module, count in ((plain, 1), (block, bmt.world_size())):
            results = module(torch.ones(2, 2, requires_grad=gives_argument) * 1)
            WATCHES[watch](results[0])  # type: ignore[no-untyped-call]
            kept.append(results[0])
            loss = sum(tensor.square().sum() for tensor in results) / count
            if watch != "retained":
                del results, kept[:]
            is_inside = watch == "hook" and is_hooked and not gives_argument  # a hook of the tensor inside
            if module is block and uses_it and watch != "removed" and not is_inside:
                with pytest.raises(RuntimeError, match="computes another result.*record_tensor"):
                    loss.backward()
                break
            loss.backward()
        else:
            if watch == "retained":
                torch.testing.assert_close(kept[0].grad, kept[1].grad * bmt.world_size())
            if watch != "hook" or bmt.world_size() == 1:  # clamps the share of a rank
                check_gradients(plain, block, tolerance=1e-5)


def gradient_of_a_new_value(use_checkpoint: bool) -> None:
    plain, inner = twins(lambda: Several(True))
    block = bmt.Block(inner, use_checkpoint=use_checkpoint)
    kept = []
    for module, count in ((plain, 1), (block, bmt.world_size())):
        y, *others = module(torch.ones(2, 2))
        y *= 2
        y.retain_grad()
        (sum(tensor.square().sum() for tensor in (y, *others)) / count).backward()
        kept.append(y.grad * count)
    torch.testing.assert_close(*kept)
    check_gradients(plain, block, tolerance=1e-5)


@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_a_result_that_is_written_to_retains_the_gradient_of_its_new_value(use_checkpoint: bool) -> None:
    run_ranks(1, gradient_of_a_new_value, use_checkpoint)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_hooks_of_a_result_get_its_whole_gradient_or_are_refused(world: int, use_checkpoint: bool) -> None:
    run_ranks(world, hooks_of_results, use_checkpoint)


class Bayesian(torch.nn.Linear):
    """Leaves a penalty on its weight in an attribute."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.penalty = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = (self.weight.square() - self.weight.exp()).sum()
        return super().forward(x)


def penalty_in_an_attribute(recompute: str) -> None:
    block = bmt.Block(bmt.BMTrainModelWrapper(Bayesian()), policy=bmt.BlockPolicy(recompute=recompute))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(block.parameters(), lr=0.1))
    with pytest.raises(RuntimeError) as caught:
        manager.backward(block(torch.ones(2, 4)).sum() + block._module.penalty)
    said = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert sum("return it as a further result" in text for text in said) == 1
    manager.zero_grad()
    manager.backward(block(torch.ones(2, 4)).sum())
    with pytest.raises(RuntimeError) as caught:
        manager.backward(Failing.apply(block(torch.ones(2, 4)).sum()))
    assert not hasattr(caught.value, "__notes__")


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of the script")


@pytest.mark.parametrize("recompute", ["whole", "off"])
def test_a_penalty_that_is_left_in_an_attribute_is_named(recompute: str) -> None:
    for world in (1, 2):
        run_ranks(world, penalty_in_an_attribute, recompute)
