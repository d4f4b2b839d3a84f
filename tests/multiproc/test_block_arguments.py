"""What a block is given and gives back: structures of tensors, objects that come twice, caches."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.twins import Layer, batches, check_gradients, distribute, twins

import bmtrain as bmt


class Cache:
    """A key-value cache as generation libraries have it: an object that forwards fill."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.owner = self  # objects may refer to each other


class Caching(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        key = self.linear(x)
        if isinstance(cache, Cache):
            cache.keys.append(key)
            keys = cache.keys
        elif isinstance(cache, dict):
            cache[len(cache)] = key
            keys = list(cache.values())
        else:
            cache.append((key, None))
            keys = [item[0] for item in cache]
        return x + torch.stack(keys).sum(0)


def caches(use_checkpoint: bool) -> None:
    for make in (Cache, dict, list):
        plain, _ = twins(Caching)
        block = bmt.Block(distribute(copy.deepcopy(plain)), use_checkpoint=use_checkpoint)
        inputs = batches(2, 6)
        outcomes = []
        for module in (plain, block):
            ranks = range(bmt.world_size()) if module is plain else [bmt.rank()]
            for rank in ranks:
                cache = make()
                x = inputs[rank].clone().requires_grad_()
                hidden = module(module(x, cache), cache)  # the second call reads what the first put there
                items = cache.keys if make is Cache else list(cache.values()) if make is dict else cache
                assert len(items) == 2
                tensors = [item[0] if isinstance(item, tuple) else item for item in items]
                loss = hidden.square().sum() + tensors[0].sin().sum() + tensors[1].sum()
                loss.backward()
                assert len(items) == 2
                if rank == bmt.rank():
                    outcomes.append((loss.item(), x.grad))
        assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-6)
        torch.testing.assert_close(outcomes[0][1], outcomes[1][1])
        check_gradients(plain, block)


class Remembering(torch.nn.Module):
    """Puts parameters, and views of them, into a list that it is given, and keeps one in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = torch.nn.Parameter(torch.randn(3, 6))

    def forward(self, x: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
        memory += [self.slots, self.slots[1], self.slots.detach().t()]
        self.kept = self.slots.detach()
        return x * self.slots.sum(0)


def parameters_in_containers(use_checkpoint: bool) -> None:
    plain, inner = twins(Remembering)
    block = bmt.Block(inner, use_checkpoint=use_checkpoint)
    memories: list[list[torch.Tensor]] = [[], []]
    for module, memory, count in zip((plain, block), memories, (1, bmt.world_size()), strict=True):
        hidden = module(torch.ones(2, 6), memory)
        (sum(tensor.sin().sum() for tensor in (hidden, *memory)) / count).backward()
    assert all(map(torch.equal, *memories))
    check_gradients(plain, block)
    if (
        bmt.world_size() > 1 and bmt.utils.check_torch_version("2.12.0") >= 0
    ):  # else the memory is the shard's
        with torch.no_grad():
            block(torch.ones(2, 6), [])
        for read in (torch.sum, copy.deepcopy, repr):
            with pytest.raises(RuntimeError, match="Remembering.*keep a copy"):
                read(inner.kept)


class Listed(torch.nn.Module):
    """Gets a list of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.fixed = (torch.nn.Parameter(torch.randn(6)) for _ in range(2))
        self.fixed.requires_grad_(False)

    def forward(self, x: torch.Tensor, known: list[torch.Tensor]) -> torch.Tensor:
        return x * self.trained + sum(known, torch.zeros(())).detach().mean() * self.fixed


def parameters_given(use_checkpoint: bool) -> None:
    block = bmt.Block(twins(Listed)[1], use_checkpoint=use_checkpoint)
    known = [block.fixed, torch.ones(6)]
    before = list(known)
    block(torch.ones(2, 6), known).sum().backward()
    assert all(a is b for a, b in zip(known, before, strict=True))


class Writing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        cache.keys[0] += 1  # in place, in a tensor that a copy of the cache shares
        out: torch.Tensor = self.linear(x) * cache.keys[0]
        return out


def in_place_cache() -> None:
    block = bmt.Block(distribute(Writing()))
    cache = Cache()
    cache.keys.append(torch.zeros(6))
    loss = block(torch.ones(2, 6), cache).sum()
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


def read_once() -> None:
    block = bmt.Block(distribute(Layer()))
    for iterator in ((t for t in ()), zip([1], strict=True), map(abs, [1]), enumerate([1])):
        name = type(iterator).__name__
        with pytest.raises(TypeError, match=f"type {name}: it can be read only once.*pass a list or tuple"):
            block(torch.ones(2, 6), [iterator])


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_caches_are_filled_once(world: int, use_checkpoint: bool) -> None:
    run_ranks(world, caches, use_checkpoint)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
@pytest.mark.parametrize("program", [parameters_in_containers, parameters_given])
def test_parameters_in_containers_are_copies_unless_they_were_there(
    world: int, use_checkpoint: bool, program: Callable[[bool], None]
) -> None:
    run_ranks(world, program, use_checkpoint)


def test_cache_written_in_place_raises() -> None:
    run_ranks(1, in_place_cache)


Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    hidden: Any
    extra: Any = None


@dataclass(slots=True)
class Slotted:
    hidden: Any


class Bag(OrderedDict):  # type: ignore[type-arg]
    """A mapping with attributes, as model libraries return."""


class Structured(torch.nn.Module):
    def forward(self, form: str, x: Any) -> Any:
        y = {"inner": x["x"] * 2, "list": [x["x"] + 1, "text"]} if isinstance(x, dict) else x * 2
        bag = Bag(hidden=y)
        return {
            "dict": {"y": y, "n": 3},
            "pair": Pair(y, None),
            "dataclass": Output(y, extra=[y]),
            "slots": Slotted(y),
            "bag": bag,
            "none": None,
            "number": 4.5,
        }[form]


def structures() -> None:
    for recompute in (True, False):
        block = bmt.Block(Structured(), use_checkpoint=recompute)
        for form, kind, get in (
            ("dict", dict, lambda r: r["y"]),
            ("pair", Pair, lambda r: r.first),
            ("dataclass", Output, lambda r: r.hidden),
            ("slots", Slotted, lambda r: r.hidden),
            ("bag", Bag, lambda r: r["hidden"]),
        ):
            x = torch.ones(2, requires_grad=True)
            result = block(form, x)
            assert type(result) is kind
            get(result).sum().backward()
            assert x.grad.tolist() == [2.0, 2.0]  # type: ignore[union-attr]
            if form == "dataclass":
                assert result.extra[0] is result.hidden
            x.grad = None
            given = {"x": x}
            inner = get(block(form, x=given))
            assert given == {"x": x} and given["x"] is x
            (inner["inner"].sum() + inner["list"][0].sum()).backward()
            assert x.grad.tolist() == [3.0, 3.0] and inner["list"][1] == "text"  # type: ignore[union-attr]
        assert block("none", x) is None and block("number", x) == 4.5


class SameObject(torch.nn.Module):
    def forward(self, a: Any, b: Any, c: Any = None) -> Any:
        assert a is b and (c is None or c["a"] is a)
        return a * b


def one_object_twice() -> None:
    x = torch.full((2,), 3.0, requires_grad=True)
    z = x * 1
    bmt.Block(SameObject())(z, z, c={"a": z}).sum().backward()
    assert x.grad.tolist() == [6.0, 6.0]  # type: ignore[union-attr]


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "flat": lambda y: y.view(-1),
    "row": lambda y: y[1],
    "column": lambda y: y.t()[1:2],
    "complex": torch.view_as_complex,
    "view of a view": lambda y: (y.detach(), y[:2], y[:2][1]),
}


class Viewing(torch.nn.Module):
    def __init__(self, view: str, is_hooked: bool) -> None:
        super().__init__()
        self.linear, self.view = torch.nn.Linear(2, 2), view
        if is_hooked:
            self.linear.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x) * 2
        return y, VIEWS[self.view](y)


def views_of_results(use_checkpoint: bool) -> None:
    for view, is_hooked in itertools.product(VIEWS, (False, True)):
        plain, inner = twins(lambda kind=(view, is_hooked): Viewing(*kind))  # type: ignore[misc]
        block = bmt.Block(inner, use_checkpoint=use_checkpoint)
        for write in (True, False):
            gradients = []
            for module, count in ((plain, 1), (block, bmt.world_size())):
                x = torch.linspace(-1, 1, 6).view(3, 2).requires_grad_()
                y, views = module(x)
                if write:
                    y.mul_(x.detach())
                results = (y, *views) if isinstance(views, tuple) else (y, views)
                (sum(tensor.abs().square().sum() for tensor in results) / count).backward()
                gradients.append(x.grad * count)
            torch.testing.assert_close(*gradients, msg=view)
            check_gradients(plain, block, tolerance=1e-5)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_writes_to_a_result_reach_its_views(world: int, use_checkpoint: bool) -> None:
    run_ranks(world, views_of_results, use_checkpoint)


ALIASES: dict[str, Callable[[torch.Tensor, torch.Tensor, list[Any]], Any]] = {
    "overlapping": lambda x, y, kept: (y[:2], y[1:]),
    "same": lambda x, y, kept: (y.view(-1), y.t()),
    "beside a container": lambda x, y, kept: kept.append(y[:2]) or (y[1:], y * 3),  # type: ignore[func-returns-value]
    "apart": lambda x, y, kept: (y[:, 0], y[:, 1]),
    "argument": lambda x, y, kept: (x, y),
    "argument alone": lambda x, y, kept: (x,),
    "of the argument": lambda x, y, kept: (x[1:], y, x.t()),
}


class Aliasing(torch.nn.Module):
    def __init__(self, alias: str) -> None:
        super().__init__()
        self.linear, self.alias = torch.nn.Linear(2, 2), alias

    def forward(self, x: torch.Tensor, kept: list[Any]) -> Any:
        return ALIASES[self.alias](x, self.linear(torch.ones(3, 2)) * 2 + self.linear.weight[0], kept)


def aliases_of_one_tensor(use_checkpoint: bool) -> None:
    for alias, written in itertools.product(ALIASES, range(4)):
        plain, inner = twins(lambda alias=alias: Aliasing(alias))  # type: ignore[misc]
        block = bmt.Block(inner, use_checkpoint=use_checkpoint)
        gradients = []
        for module, count in ((plain, 1), (block, bmt.world_size())):
            x, kept = torch.linspace(-1, 1, 6).view(3, 2).requires_grad_(), []  # type: ignore[var-annotated]
            hidden = x * 1
            results = [*module(hidden, kept), *kept, hidden]
            if written < len(results):
                results[written].mul_(results[written].detach().sin() + 2)
            loss = sum(tensor.square().sum() for tensor in results) / count
            if module is block and use_checkpoint and hidden._version and alias != "argument alone":
                with pytest.raises(RuntimeError, match="argument 0.*modified in place"):
                    loss.backward()
                break  # the second run would get another argument
            loss.backward()
            gradients.append(x.grad * count)
        else:
            torch.testing.assert_close(*gradients, msg=f"{alias}, {written}")
            if alias != "argument alone":  # of which parameters get no gradient
                check_gradients(plain, block, tolerance=1e-5)


def written_without_backward() -> None:
    for use_checkpoint in (True, False):
        block = bmt.Block(twins(lambda: Aliasing("argument"))[1], use_checkpoint=use_checkpoint)
        hidden = torch.ones(3, 2, requires_grad=True) * 1
        same, other = block(hidden, [])
        same.mul_(2)
        hidden.add_(other)
        gone = weakref.ref(hidden)
        del hidden, same, other
        gc.collect()
        assert gone() is None


def test_writes_to_an_argument_leave_nothing_behind() -> None:
    run_ranks(1, written_without_backward)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_writes_to_a_result_reach_others_in_its_memory(world: int, use_checkpoint: bool) -> None:
    run_ranks(world, aliases_of_one_tensor, use_checkpoint)


class Noting(torch.nn.Module):
    """Reads what the script has noted on a tensor, and notes something on it and on the result."""

    def __init__(self, is_hooked: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)
        if is_hooked:
            self.linear.register_forward_hook(lambda *_: None)

    def forward(self, x: Any) -> torch.Tensor:
        if not hasattr(x, "normed"):
            x.normed = self.norm(x).tanh()
        y: Any = (self.linear(x.normed) * x.scale).tanh() + x.normed
        y.scale = 2 * x.scale
        return y


def attributes_of_tensors() -> None:
    for use_checkpoint, is_hooked in itertools.product((True, False), (True, False)):
        plain, inner = twins(lambda is_hooked=is_hooked: Noting(is_hooked))  # type: ignore[misc]
        gradients = []
        block = bmt.Block(inner, use_checkpoint=use_checkpoint)
        for module in (plain, block):
            x: Any = torch.linspace(-1, 1, 6).square().view(3, 2).requires_grad_()
            x.scale = 0.5
            y = module(x)
            assert y.scale == 1.0
            (y.square().sum() / (bmt.world_size() if module is block else 1)).backward()
            gradients.append(x.grad * (bmt.world_size() if module is block else 1))
        torch.testing.assert_close(*gradients)
        check_gradients(plain, block, tolerance=1e-5)


@pytest.mark.parametrize("body", [structures, one_object_twice, attributes_of_tensors])
def test_structures_of_arguments_and_results(body: Any) -> None:
    run_ranks(1, body)


def test_iterators_that_can_be_read_only_once_are_refused() -> None:
    run_ranks(1, read_once)


class Attending(torch.nn.Module):
    """Fused attention, which saves nested tensors of strided layout where its arguments are jagged ones."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (project(x).unflatten(-1, (2, 4)).transpose(1, 2) for project in self.qkv)
        y = torch.nn.functional.scaled_dot_product_attention(*heads)
        return x + y.transpose(1, 2).flatten(-2)


def jagged_attention(recompute: str) -> None:
    plain = Attending()
    block = bmt.Block(
        bmt.BMTrainModelWrapper(copy.deepcopy(plain)), policy=bmt.BlockPolicy(recompute=recompute)
    )
    for module in (plain, block):
        rows = torch.nested.as_nested_tensor([torch.ones(n, 8) for n in (1, 3)], layout=torch.jagged)
        module(rows).values().square().sum().backward()
    for p, q in zip(plain.parameters(), block.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad.view_as(p))


@pytest.mark.parametrize("recompute", ["off", "selective", "whole"])
def test_attention_of_nested_tensors(recompute: str) -> None:
    run_ranks(1, jagged_attention, recompute)


def nested_rows(layout: torch.layout) -> list[str]:
    """Notes of the error that a Block raises for rows of unequal length, if it raises one."""
    block = bmt.Block(bmt.nn.Linear(4, 4))
    bmt.init_parameters(block)
    rows = torch.nested.as_nested_tensor([torch.ones(n, 4) for n in (1, 3)], layout=layout)
    try:
        block(rows).values().sum().backward()
    except RuntimeError as error:
        return list(getattr(error, "__notes__", []))
    assert block.weight.grad is not None
    return []


@pytest.mark.parametrize(("layout", "notes"), [(torch.jagged, 0), (torch.strided, 2)], ids=str)
@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_nested_tensors_are_jagged_ones(layout: torch.layout, notes: int) -> None:
    (found,) = run_ranks(1, nested_rows, layout)
    assert len(found) == notes
    assert not notes or ("layout=torch.jagged" in found[0] and "arguments torch.float32 nested" in found[1])
