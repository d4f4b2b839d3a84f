"""Selective recomputation: the bits of a forward that ran once, the products of one, and memory in between."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from harness import run_ranks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import bmtrain as bmt
from bmtrain._base.tensors import refuse_other_results
from bmtrain._engine import selective

BATCH, LENGTH, DIM, HEADS = 2, 8, 16, 2
FUSED = "fused attention"


class Linear(bmt.DistributedModule):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(dim_out, dim_in) / dim_in**0.5)
        self.bias = bmt.DistributedParameter(torch.randn(dim_out))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Layer(bmt.DistributedModule):
    """A transformer layer: attention by products or fused, with what may go wrong between them."""

    def __init__(self, attention: str, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = Linear(DIM, 3 * DIM), Linear(DIM, DIM)
        self.up, self.down = Linear(DIM, 4 * DIM), Linear(4 * DIM, DIM)
        self.norm = torch.nn.LayerNorm(DIM, elementwise_affine=False)
        self.statistics = torch.nn.BatchNorm1d(LENGTH, affine=False)
        self.attention, self.dropout = attention, dropout

    def attend(self, q, k, v):
        if self.attention == FUSED:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout, is_causal=True
            )
        scores = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, dim=-1)
        return torch.nn.functional.dropout(scores, self.dropout) @ v

    def forward(self, x):
        heads = (BATCH, LENGTH, HEADS, DIM // HEADS)
        q, k, v = (part.reshape(heads).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = self.attend(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + torch.nn.functional.dropout(self.out(attended), self.dropout)
        hidden = torch.relu_(self.up(self.statistics(x)))  # writes to the result of a product
        return x + self.down(hidden.square())


class Products(TorchDispatchMode):
    """Counts the products and attentions that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "mm" in name or ("attention" in name and "backward" not in name):
            self.counts["attention" if "attention" in name else "product"] += 1
        return func(*args, **(kwargs or {}))


def trained(
    recompute: str, attention: str, dropout: float, level: int
) -> tuple[list[torch.Tensor], Counter[str]]:
    torch.manual_seed(0)
    with bmt.default_policy(bmt.BlockPolicy(level=level, recompute=recompute)):
        layers = bmt.TransformerBlockList([bmt.Block(Layer(attention, dropout)) for _ in range(2)])
    x = torch.randn(BATCH, LENGTH, DIM).add(bmt.rank()).requires_grad_()
    with Products() as products:
        loss = layers(x).square().sum()
        loss.backward(retain_graph=True)
    loss.backward()
    seen = [loss.detach(), x.grad, torch.rand(2), layers[0]._module.statistics.running_mean]
    return [*seen, *(param.grad for param in layers.parameters())], products.counts


@pytest.mark.parametrize("attention", [FUSED, "products"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("level", [0, 3])
def test_selective_recomputation_gives_the_bits_of_none(attention, dropout, level):
    outcomes = {
        recompute: run_ranks(2, trained, recompute, attention, dropout, level)
        for recompute in ("off", "whole", "selective")
    }
    for rank in range(2):
        (off, once), (whole, twice), (some, kept) = (outcomes[name][rank] for name in outcomes)
        for one, other, third in zip(off, whole, some, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, third)
        # Each layer has qkv, out, up and down. Only `up` runs again, because its result was written to; `down` ends it.
        rerun = 2 * 1
        assert kept["attention"] == once["attention"]
        assert kept["product"] == once["product"] + rerun
        assert twice["product"] > kept["product"]


def kept_bytes(recompute: str) -> tuple[int, int]:
    """Bytes that a forward leaves behind for backward, and that backward leaves behind."""
    block = bmt.Block(Layer(FUSED, 0.0), policy=bmt.BlockPolicy(level=0, recompute=recompute))
    x = torch.randn(BATCH, LENGTH, DIM, requires_grad=True)
    block(x).sum().backward()  # gradients exist from here on
    after = []
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = block(x)
        forward = sum(event.self_cpu_memory_usage for event in seen.events())
        after.append(forward - result.nbytes)
        result.sum().backward()
        del result
    return after[0], after[1]


def test_selective_recomputation_keeps_products_and_attention_alone():
    (off, _), (whole, _), (some, again) = (
        run_ranks(1, kept_bytes, recompute)[0] for recompute in ("off", "whole", "selective")
    )
    hidden = 4 * BATCH * LENGTH * DIM
    log_sum_exp = 4 * BATCH * LENGTH * HEADS
    # qkv, attention with its sums, out; `up` was written to, and `down` is what the second run stops before.
    assert some - whole == 3 * hidden + hidden + log_sum_exp + hidden
    assert whole < some < off
    assert again == some


class Scripted(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(DIM, DIM), Linear(DIM, DIM)
        self.path = 0

    def forward(self, x):
        self.path += 1
        first, second = (self.up, self.down) if self.path % 2 else (self.down, self.up)
        return second(torch.tanh(first(x)))


def other_path() -> None:
    """A second run that takes another path computes that path, with nothing of the first's in it."""
    torch.manual_seed(0)
    gradients = []
    for recompute in ("whole", "selective"):
        torch.manual_seed(0)
        inner = Scripted()
        block = bmt.Block(inner, policy=bmt.BlockPolicy(recompute=recompute))
        x = torch.randn(4, DIM, requires_grad=True)
        block(x).square().sum().backward()
        gradients.append([x.grad, *(param.grad.clone() for param in block.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_another_path_in_the_second_run_uses_nothing_of_the_first():
    run_ranks(2, other_path)


class Patchable(torch.nn.Module):
    activation = staticmethod(torch.tanh)

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.linear(torch.nn.functional.gelu(self.activation(self.linear(x))))


def square_root(x, approximate="none"):
    return (x * x + 1).sqrt()


def exchanged(recompute: str, what: str) -> None:
    """A function that is exchanged for the first run alone would give the gradient of another function."""
    torch.manual_seed(0)
    plain = Patchable()
    block = bmt.Block(
        bmt.BMTrainModelWrapper(copy.deepcopy(plain)), policy=bmt.BlockPolicy(recompute=recompute)
    )
    x = torch.linspace(-1, 1, 4 * DIM).view(4, DIM)
    owner = Patchable if what == "activation" else torch.nn.functional

    def patched():
        return mock.patch.object(
            owner, what, staticmethod(square_root) if owner is Patchable else square_root
        )

    with patched():
        out = block(x)
    with pytest.raises(RuntimeError, match="another path .* exchanged in between.* use_checkpoint=False"):
        out.sum().backward()
    with patched():
        (block(x).sum() / bmt.world_size()).backward()
        plain(x).sum().backward()
    for param, expected in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.gather_grad(), expected.grad)


@pytest.mark.parametrize("recompute", ["whole", "selective"])
@pytest.mark.parametrize("what", ["activation", "gelu"])
def test_a_function_that_is_exchanged_for_the_first_run_is_an_error(recompute, what):
    run_ranks(2, exchanged, recompute, what)


class Cancelling(torch.nn.Module):
    """Its result is a difference of equals: 0, or what rounding leaves of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(DIM, DIM)

    def forward(self, x):
        hidden = self.linear(x)
        return self.sine(hidden) - torch.sin(hidden)

    sine = staticmethod(torch.sin)


def by_cosine(x):
    return torch.cos(torch.pi / 2 - x)


def cancelled() -> None:
    block = bmt.Block(bmt.BMTrainModelWrapper(Cancelling()))
    out = block(torch.linspace(-1, 1, 4 * DIM).view(4, DIM))
    assert not out.any()
    with mock.patch.object(Cancelling, "sine", staticmethod(by_cosine)):
        out.sum().backward()
    for param in block.parameters():
        assert param.gather_grad().abs().max() < 1e-5


def test_rounding_is_no_other_path_where_the_result_is_a_difference_of_equals() -> None:
    run_ranks(2, cancelled)


def jagged(scale: float) -> torch.Tensor:
    return torch.nested.nested_tensor([scale * torch.ones(1), scale * torch.ones(2)], layout=torch.jagged)


def written_in_another_way() -> None:
    """The same function, by other operators, has other saved tensors; with a hook, edges are kept of the results."""
    torch.manual_seed(0)
    plain = Patchable()
    block = bmt.Block(bmt.BMTrainModelWrapper(copy.deepcopy(plain)))
    block.linear.register_forward_hook(lambda *_: None)
    x = torch.linspace(-1, 1, 4 * DIM).view(4, DIM)
    with mock.patch.object(Patchable, "activation", staticmethod(torch.sin)):
        out = block(x)
        plain(x).sum().backward()
    with mock.patch.object(Patchable, "activation", staticmethod(by_cosine)):
        (out.sum() / bmt.world_size()).backward()
    for param, expected in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.gather_grad(), expected.grad)


def test_a_module_with_a_hook_saves_other_tensors_in_the_second_run() -> None:
    run_ranks(2, written_in_another_way)


RESULTS = {  # results of the two runs, the inputs, and whether the runs took other paths
    "another value": ([1.0, 0.0], [0.0, 1.0], [], True),
    "another small value": ([1e-3, 0.0], [0.0, 1e-3], [], True),
    "rounding of 1": ([0.0], [1e-7], [], False),
    "rounding of the inputs": ([0.0], [1e-4], [500.0], False),
    "more than that": ([0.0], [1e-2], [500.0], True),
    "bf16": ([0.02, 0.01], [-0.01, 0.02], [1.0], True),
    "NaN": ([torch.nan, 1.0], [torch.nan, 1.0], [], False),
    "nothing": ([], [], [], False),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_two_runs_are_compared_coarsely(name: str) -> None:
    first, again, inputs, is_other = RESULTS[name]
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    results = [torch.tensor(values, dtype=dtype) for values in (first, again)]
    others = [torch.tensor(inputs), torch.eye(3).to_sparse(), torch.ones(3).to(torch.float8_e4m3fn)]
    with pytest.raises(RuntimeError, match="another result") if is_other else nullcontext():
        refuse_other_results("block", results[:1], results[1:], others)


def test_nested_results_of_two_runs_are_not_compared() -> None:
    refuse_other_results("block", [jagged(1.0)], [jagged(2.0)], [jagged(3.0)])


def chunks_written_to(x):
    first, second = x.unsafe_chunk(2, -1)
    return first.sigmoid_() * second.tanh()


def data_written_to(x):
    x.data.mul_(3)
    return torch.tanh(x)


WRITES = {
    "GRU": lambda: torch.nn.GRU(DIM, DIM),
    "unsafe_chunk": lambda: chunks_written_to,
    "data": lambda: data_written_to,
}


class Writes(torch.nn.Module):
    """Writes to a product through tensors that have a version of their own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(DIM, DIM)
        self.function = WRITES[name]()

    def forward(self, x):
        return self.function(self.linear(x))


def writes_past_versions(name: str) -> None:
    gradients = []
    for recompute in ("off", "selective"):
        torch.manual_seed(0)
        model = bmt.BMTrainModelWrapper(Writes(name))
        block = bmt.Block(model, policy=bmt.BlockPolicy(recompute=recompute))
        x = torch.linspace(-1, 1, 4 * DIM).reshape(4, DIM).requires_grad_()
        result = block(x)
        (result[0] if isinstance(result, tuple) else result).square().sum().backward()
        gradients.append([x.grad, *(param.grad.clone() for param in block.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", WRITES)
def test_what_was_written_to_unseen_is_computed_again(name):
    run_ranks(2, writes_past_versions, name)


def test_attention_that_draws_random_numbers_runs_again():
    # On the CPU attention with dropout is made of products; on GPUs it is one operator.
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert selective.is_expensive(operator, (None, None, None), {})
    assert selective.is_expensive(operator, (None, None, None, 0.0, True), {})
    assert not selective.is_expensive(operator, (None, None, None, 0.1), {})
    assert not selective.is_expensive(operator, (None, None, None), {"dropout_p": 0.1})


def test_recompute_argument():
    assert bmt.BlockPolicy(recompute="selective").recompute is bmt.Recompute.SELECTIVE
    assert bmt.BlockPolicy(recompute="off") == bmt.BlockPolicy(recompute=bmt.Recompute.OFF)
    with pytest.raises(
        ValueError, match="recompute: expected one of 'off', 'whole', 'selective', got 'some'"
    ):
        bmt.BlockPolicy(recompute="some")  # type: ignore[arg-type]
    assert bmt.BlockPolicy(recompute="selective").recomputes
