"""Users that put other data in the place of a Block's shards, and shards so small that they are the whole."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt


def models() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    mixed = [torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3), torch.nn.PReLU()]
    return [torch.nn.Sequential(*mixed), torch.nn.LayerNorm(8)]


def converted() -> None:
    for plain in models():
        block = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)))
        block(torch.ones(2, 8)).sum().backward()
        for dtype in (torch.float16, torch.float64, torch.float32, torch.bfloat16):
            block.to(dtype), plain.to(dtype)
            expected, actual = plain.state_dict(), block.state_dict()
            assert all(torch.equal(actual[key], expected[key]) for key in expected)
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
            assert torch.equal(block(x), plain(x))


def test_a_block_is_converted_wherever_its_parameters_lie() -> None:
    for world in (1, 2, 3, 4):
        run_ranks(world, converted)


def swapped() -> None:
    plain = models()[0]
    block = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)))
    averages = [param.detach() * 2 for param in block.parameters()]
    own = [param.data for param in block.parameters()]  # as many keep them while they evaluate the averages
    for factor, values in ((2, averages), (1, own)):
        for param, value in zip(block.parameters(), values, strict=True):
            param.data = value
        for param, whole in zip(block.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.gather(), whole * factor)
        assert torch.equal(block.state_dict()["1.weight"], plain[1].weight * factor)
        block(torch.ones(2, 8)).sum().backward()


def test_averages_of_shards_in_their_place_are_shards() -> None:
    for world in (1, 2, 3, 4):
        run_ranks(world, swapped)


def replaced_alone() -> None:
    plain = models()[0]
    block = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)))
    kept = [param.data for param in block.parameters()]
    before = [values.clone() for values in kept]
    for param, whole in zip(block.parameters(), plain.parameters(), strict=True):
        param.data = torch.ones_like(param)
        torch.nn.init.ones_(whole)
        assert torch.equal(block(torch.ones(2, 8)), plain(torch.ones(2, 8)))
    assert all(map(torch.equal, kept, before))


def exchanged() -> None:
    """The new data of each lie where another parameter's were."""
    plain = torch.nn.Sequential(models()[1], *models()[0][1:2])
    for number, param in enumerate(plain.parameters()):
        param.data = torch.arange(8.0) + 8 * number
    block = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)))
    for model in (plain, block):
        first, *_, last = model.parameters()
        first.data, last.data = last.data, first.data  # and nothing else refers to them
    for param, whole in zip(block.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.gather(), whole)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(block(x), plain(x))
    for param, whole in zip(block.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.gather(), whole)


@pytest.mark.parametrize(("world", "body"), [(1, replaced_alone), (2, replaced_alone), (1, exchanged)])
def test_the_other_parameters_of_a_block_keep_their_values(world: int, body: Callable[[], None]) -> None:
    run_ranks(world, body)


def moved_gradients(kind: str) -> None:
    """A gradient lies where another one would be."""
    plain = models()[1]
    block = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)))
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    kept = []
    for model in (plain, block):
        first, second = model.parameters()
        model(x).square().sum().backward()
        if kind == "exchanged":
            first.grad, second.grad = second.grad, first.grad
        elif kind == "kept":
            kept += [(first.grad, first.grad.clone())]
            first.grad = None
        else:
            second.grad, first.grad = first.grad, None
        for factor in (2, 3):
            model(factor * x).square().sum().backward()
    for param, whole in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, whole.grad)
    assert all(torch.equal(*pair) for pair in kept)


@pytest.mark.parametrize("kind", ["exchanged", "given away", "kept"])
def test_a_gradient_may_become_another_parameters_or_a_users(kind: str) -> None:
    run_ranks(1, moved_gradients, kind)


def trained_between(kind: type[torch.optim.Optimizer], zero_level: int) -> None:
    """The twin never swaps anything."""
    blocks = [bmt.Block(bmt.BMTrainModelWrapper(models()[0]), zero_level=zero_level) for _ in range(2)]
    optimizers = [kind(block.parameters(), lr=0.1) for block in blocks]
    x = torch.ones(2, 8)
    for _ in range(3):
        for block, optimizer in zip(blocks, optimizers, strict=True):
            optimizer.zero_grad()
            block(x).square().sum().backward()
            optimizer.step()
        swapping = list(blocks[0].parameters())
        own = [param.data for param in swapping]
        kept = [values.clone() for values in own]
        for param in swapping:
            param.data = torch.zeros_like(param)
        assert not blocks[0](x).any()
        for param, values in zip(swapping, own, strict=True):
            param.data = values
        assert all(map(torch.equal, own, kept))
        assert torch.equal(*(block(x) for block in blocks))


@pytest.mark.parametrize("kind", [torch.optim.SGD, bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer])
@pytest.mark.parametrize("zero_level", (2, 3))
def test_what_users_keep_of_the_shards_stays_as_it_is(
    kind: type[torch.optim.Optimizer], zero_level: int
) -> None:
    for world in (1, 2):
        run_ranks(world, trained_between, kind, zero_level)


def filled(param: torch.nn.Parameter) -> None:
    param.data.fill_(0.5)


def replaced(param: torch.nn.Parameter) -> None:
    param.data = torch.full_like(param, 0.5)


def clamped(param: torch.nn.Parameter) -> None:
    param.data.clamp_(-0.125, 0.125)


WRITES = (filled, replaced, clamped)
SIXTEEN_BITS = (
    bmt.optim.AdamOptimizer,
    bmt.optim.SGDOptimizer,
    bmt.optim.LionOptimizer,
    partial(bmt.optim.AdamOffloadOptimizer, overlap=False),
    bmt.optim.AdamOffloadOptimizer,
)


def written_between_steps(dtype: torch.dtype) -> None:
    """Masters have more digits than what is written, which they keep where nothing was."""
    for make, write, in_block in itertools.product(SIXTEEN_BITS, WRITES, (False, True)):
        model: torch.nn.Module = bmt.BMTrainModelWrapper(models()[0].to(dtype))
        model = bmt.Block(model) if in_block else model
        optimizer = make(model.parameters(), lr=0.01)
        x = torch.ones(2, 8, dtype=dtype)
        for _ in range(2):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model(x).sum().backward()  # and its updates have ended
        before = [
            optimizer.state[p]["_param_fp32"].clone() for p in model.parameters() if p in optimizer.state
        ]
        for param in model.parameters():
            write(param)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        wanted = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        model(x)
        assert all(map(torch.equal, model.parameters(), wanted)), (make, write, in_block)
        if write is clamped:
            after = [optimizer.state[p]["_param_fp32"] for p in model.parameters() if p in optimizer.state]
            kept = [a[b.abs() < 0.12] for a, b in zip(after, before, strict=True)]
            expected = [b[b.abs() < 0.12] for b in before]
            assert all(map(torch.equal, kept, expected))
            assert any((values.to(dtype).float() != values).any() for values in kept) or bmt.world_size() > 1


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_what_is_written_to_data_counts_where_there_are_masters(dtype: torch.dtype) -> None:
    for world in (1, 2):
        run_ranks(world, written_between_steps, dtype)


def resident() -> None:
    plain = models()[0]
    block = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)))
    for param, whole in zip(block.parameters(), plain.parameters(), strict=True):
        param.data = whole.detach().clone()
    inner = block._module
    del block
    if bmt.rank() == 0:  # nothing is gathered
        assert torch.equal(inner(torch.ones(2, 8)), plain(torch.ones(2, 8)))


def test_full_tensors_in_the_place_of_all_shards_are_full() -> None:
    for world in (1, 2, 3):
        run_ranks(world, resident)


def swapped_often() -> None:
    block = bmt.Block(bmt.BMTrainModelWrapper(torch.nn.LayerNorm(8)))
    params = list(block.parameters())
    sizes = [param.numel() for param in params]
    x = torch.ones(2, 8)
    for _ in range(50):  # each leaves memory behind that nothing refers to any more
        own = [param.data for param in params]
        for values in ([torch.zeros_like(value) for value in own], own):
            for param, value in zip(params, values, strict=True):
                param.data = value
            block(x)
        del own, values, value
    others: list[torch.Tensor] = []
    for _ in range(100):
        whole = [torch.arange(8.0), torch.arange(8.0)]
        for param, value in zip(params, whole, strict=True):
            param.data = value
        # A copy is a shard, of whatever it was made.
        assert [copy.deepcopy(param).numel() for param in params] == sizes
        others.extend(whole)  # so that the next ones have another place


def test_whole_tensors_where_shards_of_before_have_been_are_whole() -> None:
    for world in (2, 3):
        run_ranks(world, swapped_often)


Write = Callable[[torch.nn.Parameter, int], None]


def written_between_blocks(write: Write, level: int, in_backward: bool) -> list[float]:
    """Each step multiplies weights by its number: those of the second block when the first one has run, or those of
    the first when the backward begins."""
    policy = bmt.BlockPolicy(level=level)
    blocks = [
        bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(8, 8, bias=False)), policy=policy) for _ in range(3)
    ]
    for block in blocks:
        for param in block.parameters():
            param.data.fill_(0.125)
    results = []
    for step in range(1, 5):
        x = torch.ones(2, 8, requires_grad=True)
        first = blocks[0](x)
        if not in_backward:
            write(next(blocks[1].parameters()), step)
            if bmt.rank() == 0:  # who only looks may do so alone
                assert blocks[2]._module.weight.data.numel()
        out = blocks[2](blocks[1](first))
        if in_backward:
            out.register_hook(lambda gradient, step=step: write(next(blocks[0].parameters()), step))
        out.sum().backward()
        results += [float(out.detach().sum()), float(x.grad.sum())]
    return results


def times(param: torch.nn.Parameter, factor: int) -> None:
    param.data.mul_(factor)


def times_by_replacing(param: torch.nn.Parameter, factor: int) -> None:
    param.data = param.data * factor


def times_by_what_was_kept(param: torch.nn.Parameter, factor: int) -> None:
    if factor == 1:
        param.__dict__["kept"] = param.data
    param.__dict__["kept"].mul_(factor)


@pytest.mark.parametrize("level", (3, 2, 1))
@pytest.mark.parametrize(
    ("write", "in_backward"),
    [
        (times, False),
        (times, True),
        (times_by_what_was_kept, False),
        (times_by_what_was_kept, True),
        (times_by_replacing, False),
    ],
)
def test_what_is_written_to_data_between_two_blocks_counts_at_once(
    write: Write, in_backward: bool, level: int
) -> None:
    values = [16.0, 16.0, 32.0, 32.0, 96.0, 96.0, 384.0, 384.0]
    if in_backward:
        values = [16.0, 16.0, 16.0, 32.0, 32.0, 96.0, 96.0, 384.0]
    for world in (1, 2):
        assert run_ranks(world, written_between_blocks, write, level, in_backward) == [values] * world


class ReadsTwice(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.ones(8))
        self.other = bmt.DistributedParameter(torch.ones(8))

    def forward(self) -> tuple[float, float]:
        before = self.weight.sum().item()
        self._parameters["weight"].data.mul_(2)
        return before, self.weight.sum().item()


def read_twice() -> tuple[float, float]:
    return ReadsTwice()()


def test_what_is_written_to_data_between_two_reads_counts() -> None:
    for world in (1, 2):
        assert run_ranks(world, read_twice) == [(8.0, 16.0)] * world
