"""Forwards with state that torch does not track: the second run of a recomputed Block begins as the first."""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from harness import run_ranks
from harness.twins import check_gradients, twins
from torch.overrides import TorchFunctionMode

import bmtrain as bmt

Forward = Callable[[Any, torch.Tensor], Any]


def memory(self: Any, h: torch.Tensor) -> Any:
    before, self.memory = self.memory, h.detach().mean() + 1.5
    return 1.0 if before is None else before


def pair(self: Any, h: torch.Tensor) -> Any:
    before, self.pair = self.pair, (h.detach().mean(), h.detach().amax() + 1)
    return sum(before) + 1.0


def in_place(self: Any, h: torch.Tensor) -> Any:
    self.seen += 1.0
    return self.seen.clone()


def in_place_later(self: Any, h: torch.Tensor) -> Any:
    if self.number > 1:
        self.seen += 1.0
    return self.seen.clone()


def made_and_written_to(self: Any, h: torch.Tensor) -> Any:
    if not hasattr(self, "scale"):
        self.scale = torch.ones(())
    self.scale *= 1.5
    return self.scale.clone()


def registered(self: Any, h: torch.Tensor) -> Any:
    if not hasattr(self, "scale"):
        self.register_buffer("scale", torch.ones(()))
    self.scale *= 1.5
    return self.scale.clone()


def registered_anew(self: Any, h: torch.Tensor) -> Any:
    factor = getattr(self, "scale", torch.ones(()))
    self.register_buffer("scale", factor * 1.5)
    return factor


def grown(self: Any, h: torch.Tensor) -> Any:
    """Makes a longer table when it needs one, as rotary embeddings do."""
    if self.number > self.length:
        self.length = self.number
        self.register_buffer("table", torch.linspace(1, 2, self.length + 1))
    return self.table[self.number]


def summed(self: Any, h: torch.Tensor) -> Any:
    self.length += len(h)
    return 1.0 + self.length / 50


def history(self: Any, h: torch.Tensor) -> Any:
    factor = sum(self.history)
    self.history.append(factor + 0.5)
    return factor


def made_in_the_first(self: Any, h: torch.Tensor) -> Any:
    factor = getattr(self, "scale", 1.0)
    self.scale = h.detach().amax() + 2.0
    return factor


def cached(self: Any, h: torch.Tensor) -> Any:
    factor = self.cache.get("factor", 1.0)
    self.cache["factor"] = h.detach().amax() + 2.0
    return factor


def in_a_buffer_of_none(self: Any, h: torch.Tensor) -> Any:
    self.late = h.detach().amax() + 2.0 if self.late is None else self.late * 1.5
    return self.late


def decaying(self: Any, h: torch.Tensor) -> Any:
    self.decay *= 0.7
    return self.decay


def given(self: Any, h: torch.Tensor) -> Any:
    """Reads what the script sets before each call, and takes away before the backward."""
    return self.given + self.number


def alternating(self: Any, h: torch.Tensor) -> Any:
    """Has after two calls what it had before them."""
    self.turn = not self.turn
    return 2.0 if self.turn else 0.5


def emptied(self: Any, h: torch.Tensor) -> Any:
    """Keeps a tensor that the script takes away before the backward."""
    if self.held is None:
        self.held = h.detach().mean() + 1.5
    return self.held


def late(self: Any, h: torch.Tensor) -> Any:
    """Keeps a tensor from the second call on."""
    before = self.memory
    if self.number > 1:
        self.memory = h.detach().mean() + 1.5
    return 1.0 if before is None else before


def with_history(self: Any, h: torch.Tensor) -> Any:
    """Keeps a tensor with its graph, and uses its value in the next forward."""
    factor = 1.0 if self.memory is None else self.memory.detach().mean()
    self.memory = h + 2.0
    return factor


def of_python(self: Any, h: torch.Tensor) -> Any:
    return random.random() if random.random() < 2 else 0.0


def of_numpy(self: Any, h: torch.Tensor) -> Any:
    return float(np.random.rand())


def of_a_generator(self: Any, h: torch.Tensor) -> Any:
    return torch.rand(6, generator=self.generator)


def of_a_helper(self: Any, h: torch.Tensor) -> Any:
    """Reads what the script changes between forward and backward, in objects of several kinds."""
    settings, parts = self.settings, (self.settings.inner, self.settings.table["scale"], self.scales[1])
    return (
        settings.scale
        + sum(part.scale if part is settings.inner else part for part in parts)
        + float(self.array[0])
    )


def of_a_helper_that_it_changes(self: Any, h: torch.Tensor) -> Any:
    own = self.own
    own.scale, own.calls = own.scale * 1.25, own.calls + 1
    own.mean.mul_(0.5).add_(h.detach().mean())
    own.seen.append(own.scale)
    return own.mean.clone() + sum(own.seen) / own.calls


def of_a_late_helper(self: Any, h: torch.Tensor) -> Any:
    if not hasattr(self, "made"):
        self.made = types.SimpleNamespace(scale=1.0)
    self.made.scale *= 1.25
    return self.made.scale


def of_helpers_given_later(self: Any, h: torch.Tensor) -> Any:
    """Computes with two that the script attaches after the first step: one in the place of None, one by a new name."""
    factor = 1.0
    for helper in (self.given_later, getattr(self, "new", None)):
        if helper is not None:
            helper.scale *= 1.25
            helper.mean.mul_(0.5).add_(h.detach().mean())
            factor = factor + helper.scale + helper.mean.clone()
    return factor


def of_numpy_in_training(self: Any, h: torch.Tensor) -> Any:
    """Draws and writes in training only, which the first call is not."""
    if self.training:
        self.array += np.random.rand()
    return float(self.array[0])


def of_own_generators(self: Any, h: torch.Tensor) -> Any:
    return self.draws.random() + float(self.numpy_draws.random()) + float(self.old_draws.rand())


FORWARDS = [
    of_own_generators,
    of_a_helper,
    of_a_helper_that_it_changes,
    of_a_late_helper,
    of_helpers_given_later,
    memory,
    pair,
    in_place,
    in_place_later,
    made_and_written_to,
    registered,
    registered_anew,
    grown,
    summed,
    history,
    made_in_the_first,
    cached,
    in_a_buffer_of_none,
    decaying,
    given,
    alternating,
    emptied,
    late,
    with_history,
    of_python,
    of_numpy,
    of_a_generator,
]


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0
        self.inner = types.SimpleNamespace(scale=0.5)
        self.table = {"scale": 0.25}

    def decay(self) -> None:
        self.scale *= 0.9
        self.inner.scale *= 0.8
        self.table["scale"] *= 0.7


class Stateful(torch.nn.Module):
    def __init__(self, factor: Forward) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.factor = factor
        self.memory = None
        self.pair = (torch.ones(()), torch.ones(()))
        self.seen = torch.zeros(6)
        self.history = collections.deque([torch.ones(6)], maxlen=2)
        self.generator = torch.Generator().manual_seed(5)
        self.runs = self.number = 0
        self.length = 1
        self.register_buffer("table", torch.ones(2))
        self.cache: dict[str, torch.Tensor] = {}
        self.decay, self.given, self.given_later = 1.0, None, None
        self.turn, self.held = False, None
        self.settings = Settings()
        self.scales = [0.5, 1.0]
        self.array = np.ones(3)
        self.draws, self.numpy_draws = random.Random(3), np.random.default_rng(4)
        self.old_draws = np.random.RandomState(5)
        self.own = types.SimpleNamespace(scale=1.0, calls=0, mean=torch.zeros(()), seen=[])
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        h = torch.tanh(self.up(x))
        return x + self.down(h * self.factor(self, h))


def restored(recompute: str) -> None:
    for factor in FORWARDS:
        plain, model = twins(lambda factor=factor: Stateful(factor))
        block = bmt.Block(model, policy=bmt.BlockPolicy(recompute=recompute))
        for step in range(4 if factor is of_helpers_given_later else 3):
            drawn = []
            for module in (plain, block):
                random.seed(step)
                np.random.seed(step)
                module.zero_grad()
                module.train(step > 0)
                if factor is of_helpers_given_later and step > 0:
                    name = "given_later" if step == 1 else "new"
                    setattr(module, name, types.SimpleNamespace(scale=1.0, mean=torch.zeros(())))
                results = []
                for number in (1, 2):
                    module.given, module.number = torch.full((6,), number / 2), number
                    results.append(module(torch.full((2, 6), number - 0.5)))
                module.given, module.number, module.held = None, 3, None
                module.settings.decay()
                module.scales[1] *= 0.9
                module.array *= 0.9
                first, second = results
                (first * second / (1 if module is plain else bmt.world_size())).sum().backward()
                drawn.append((random.random(), np.random.rand()))
            check_gradients(plain, block, tolerance=1e-5)
            inner = block._module
            assert drawn[0] == drawn[1]
            for name in ("memory", "seen", "scale", "late", "decay", "number", "length", "turn", "held"):
                want, got = getattr(plain, name, None), getattr(inner, name, None)
                assert (want is None) == (got is None), (factor.__name__, name)
                if want is not None:
                    torch.testing.assert_close(torch.as_tensor(got).detach(), torch.as_tensor(want).detach())
            torch.testing.assert_close(list(inner.history), list(plain.history))
            assert torch.equal(inner.generator.get_state(), plain.generator.get_state())
        assert (plain.runs, inner.runs) == (2 * step + 2, 4 * step + 4)  # counters count each run


@pytest.mark.parametrize("recompute", ["whole", "selective"])
def test_the_second_run_begins_as_the_first(recompute: str) -> None:
    run_ranks(2, restored, recompute)


SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


class HalvedFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.tanh else result


@contextmanager
def halved_variable() -> Iterator[None]:
    token = SCALE.set(0.5)
    yield
    SCALE.reset(token)


@contextmanager
def bfloat16_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


#: Contexts that a forward is in and its backward is not, or the other way around.
CONTEXTS: list[Callable[[], AbstractContextManager[Any]]] = [
    halved_variable,
    bfloat16_by_default,
    HalvedFunction,
]


def of_contexts(self: Any, h: torch.Tensor) -> Any:
    return SCALE.get() * torch.full((6,), 1 / 3).float()


def in_contexts(recompute: str) -> None:
    for context in CONTEXTS:
        for forward, backward in ((context, nullcontext), (nullcontext, context), (context, context)):
            plain, model = twins(lambda: Stateful(of_contexts))
            block = bmt.Block(model, policy=bmt.BlockPolicy(recompute=recompute))
            x = torch.full((2, 6), 0.5)
            for module in (plain, block):
                with forward():
                    loss = module(x).sum() / (1 if module is plain else bmt.world_size())
                with backward():
                    loss.backward()
                    assert SCALE.get() == (0.5 if backward is halved_variable else 1.0)
            check_gradients(plain, block, tolerance=1e-5)


@pytest.mark.parametrize("recompute", ["whole", "selective"])
def test_the_second_run_is_in_the_contexts_of_the_first(recompute: str) -> None:
    run_ranks(2, in_contexts, recompute)


class Decay:
    """An object that is called as a function is, and has state."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self) -> float:
        self.value *= 0.5
        return self.value

    random = __call__


class Drawing(Stateful):
    def forward(self, x: torch.Tensor, draws: Any) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)) * draws.random())


def changed_arguments() -> None:
    for make in (random.Random, np.random.default_rng, np.random.RandomState, Decay):
        plain, block = twins(lambda: Drawing(memory))
        block = bmt.Block(block)
        left = []
        for module in (plain, block):
            draws, x = make(3), torch.full((2, 6), 0.5)
            for _ in range(2):
                x = module(x, draws)
            (x.sum() / (1 if module is plain else bmt.world_size())).backward()
            left.append(draws.random())
        check_gradients(plain, block, tolerance=1e-5)
        assert left[0] == left[1]


def test_what_arguments_hold_is_as_it_was_in_the_first_run() -> None:
    run_ranks(2, changed_arguments)


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("last", "value")

    def __init__(self) -> None:
        self.value = 1.0

    def halve(self) -> float:
        self.value = self.last = self.value / 2
        return self.value


class MoreSlotted(Slotted):
    """One whose own class adds none."""

    __slots__ = ()


class PrivateSlotted:
    """One with an attribute whose name its class changes."""

    __slots__ = ("__value",)

    def __init__(self) -> None:
        self.__value = 1.0

    def halve(self) -> float:
        self.__value /= 2
        return self.__value


def closure() -> Callable[[], float]:
    value, seen = 1.0, []

    def halve() -> float:
        nonlocal value
        value /= 2
        seen.append(value)
        return sum(seen)

    return halve


def with_default() -> Callable[[], float]:
    def count(seen: list[float] = []) -> float:  # noqa: B006
        seen.append(0.5)
        return sum(seen)

    return count


def with_attribute() -> Callable[[], float]:
    def halve() -> float:
        halve.value /= 2  # type: ignore[attr-defined]
        return halve.value  # type: ignore[attr-defined]

    halve.value = 1.0  # type: ignore[attr-defined]
    return halve


#: Makers of functions that refer to state and change it.
FUNCTIONS: list[Callable[[], Callable[[], Any]]] = [
    lambda: Decay(3.0).random,
    lambda: Slotted().halve,
    lambda: MoreSlotted().halve,
    lambda: PrivateSlotted().halve,
    lambda: functools.partial(Decay.random, Decay(3.0)),
    lambda: functools.partial(Decay(3.0).random),
    lambda: [0.5, 0.25, 0.125, 4.0, 8.0, 16.0].pop,
    lambda: functools.partial(list.pop, [0.5, 0.25, 0.125, 4.0, 8.0, 16.0]),
    lambda: functools.partial(lambda seen: len(seen.add(len(seen)) or seen), seen=set()),
    lambda: functools.partial(lambda total: total.add_(1.0).clone(), total=torch.ones(6)),
    lambda: functools.partial(torch.rand, 6, generator=torch.Generator().manual_seed(3)),
    lambda: random.Random(3).random,
    lambda: np.random.default_rng(3).normal,
    closure,
    with_default,
    with_attribute,
]


class Calling(Stateful):
    def __init__(self) -> None:
        super().__init__(memory)
        self.function: Any = None

    def forward(self, x: torch.Tensor, functions: Any = None) -> torch.Tensor:
        function = self.function if functions is None else functions["it"][0]
        return x + self.down(torch.tanh(self.up(x)) * function())


def changed_by_functions() -> None:
    for make in FUNCTIONS:
        for is_argument in (True, False):
            plain, block = twins(Calling)
            block = bmt.Block(block)
            left = []
            for module in (plain, block):
                function, x = make(), torch.full((2, 6), 0.5)
                module.function = function
                for _ in range(2):
                    x = module(x, {"it": (function,)}) if is_argument else module(x)
                (x.sum() / (1 if module is plain else bmt.world_size())).backward()
                left.append(torch.as_tensor(function()))
            check_gradients(plain, block, tolerance=1e-5)
            assert torch.equal(*left)


def test_what_functions_refer_to_is_as_it_was_in_the_first_run() -> None:
    run_ranks(2, changed_by_functions)


def add_one(total: torch.Tensor) -> torch.Tensor:
    return total.add_(1.0)[:6].clone()


def add_one_for_autograd(total: torch.Tensor) -> torch.Tensor:
    return total.add_(1.0)[:6]  # saved itself, with its version


def count(total: torch.Tensor) -> float:
    total.add_(1.0)
    return 0.5


def draw(total: torch.Tensor) -> torch.Tensor:
    return total.bernoulli_(0.5)[:6].clone()


def add_trained(total: torch.Tensor) -> torch.Tensor:
    return total.add_(torch.ones(6, requires_grad=True)).clone()


def of_closure(write: Callable[[torch.Tensor], Any], total: torch.Tensor) -> Callable[[], Any]:
    return lambda: write(total)


def of_default(write: Callable[[torch.Tensor], Any], total: torch.Tensor) -> Callable[[], Any]:
    def add(total: torch.Tensor = total) -> Any:
        return write(total)

    return add


def of_tuple(write: Callable[[torch.Tensor], Any], total: torch.Tensor) -> Callable[[], Any]:
    return functools.partial(lambda totals: write(totals[0]), (total,))


def of_attribute(write: Callable[[torch.Tensor], Any], total: torch.Tensor) -> Callable[[], Any]:
    def add() -> Any:
        return write(add.total)  # type: ignore[attr-defined]

    add.total = total  # type: ignore[attr-defined]
    return add


#: What refers to a tensor in memory that both runs of a forward share.
OWNERS: list[Callable[..., Callable[[], Any]]] = [functools.partial, of_tuple, of_closure, of_default]


def written_again() -> None:
    for write in (add_one, add_one_for_autograd, count, draw):
        for make in (*OWNERS, of_attribute):
            for is_argument in (True, False):
                plain, model = twins(Calling)
                block, left, gradients = bmt.Block(model), [], []
                for module in (plain, block):
                    total = torch.zeros(3, 2, 6)[1]
                    function, x = make(write, total.view(-1)), torch.full((2, 6), 0.5, requires_grad=True)
                    module.function = function
                    torch.manual_seed(3)
                    for _ in range(2):  # several calls before a backward, and after one
                        losses = [module(x, {"it": (function,)} if is_argument else None).sum()]
                        if write is not add_one_for_autograd:  # torch refuses that
                            losses.append(module(x, {"it": (function,)} if is_argument else None).sum())
                        sum(losses).backward()
                    left.append(total)
                    gradients.append(x.grad)
                torch.testing.assert_close(*left)
                torch.testing.assert_close(*gradients)


def test_writes_to_small_tensors_of_functions_count_once() -> None:
    run_ranks(1, written_again)


def written_by_functions() -> None:
    for make, (write, size) in itertools.product(OWNERS, ((add_one, 1 << 15), (add_trained, 6))):
        for is_argument in (True, False):
            plain, model = twins(Calling)
            for block in (bmt.Block(model, use_checkpoint=False), bmt.Block(copy.deepcopy(model))):
                gradients = []
                for module in (plain, block):
                    function = make(write, torch.ones(size))
                    x = torch.full((2, 6), 0.5, requires_grad=True)
                    module.function = function
                    loss = module(x, {"it": (function,)} if is_argument else None).sum()
                    if module is block and block._policy.recompute.value != "off":
                        with pytest.raises(
                            RuntimeError, match=f"{block._label}: .*modified in place.*buffer"
                        ):
                            loss.backward()
                        break
                    loss.backward()
                    gradients.append(x.grad)
                else:
                    torch.testing.assert_close(*gradients)


def test_writes_that_cannot_be_undone_to_tensors_of_functions_are_refused() -> None:
    run_ranks(1, written_by_functions)


def exchanged() -> None:
    plain, model = twins(lambda: Stateful(memory))
    block = bmt.Block(model)
    loss = block(torch.ones(2, 6)).sum()
    before, block.down = block.down, torch.nn.Identity()
    with pytest.raises(
        RuntimeError,
        match="its modules or parameters were exchanged between forward and backward.*use_checkpoint",
    ):
        loss.backward(retain_graph=True)
    block.down = before
    loss.backward()
    plain(torch.ones(2, 6)).sum().mul(bmt.world_size()).backward()
    check_gradients(plain, block, tolerance=1e-5)
    bias, gradients = torch.linspace(-1, 1, 6), []
    for module in (plain, bmt.Block(copy.deepcopy(model), use_checkpoint=False), block):
        x = torch.ones(2, 6, requires_grad=True)
        loss = torch.func.functional_call(module, {"down.bias": bias}, (x,)).sum()
        if module is block:
            with pytest.raises(RuntimeError, match="functional_call.*use_checkpoint=False"):
                loss.backward()
        else:
            loss.backward()
            gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


def test_modules_stay_between_forward_and_backward() -> None:
    run_ranks(2, exchanged)
