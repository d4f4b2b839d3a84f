"""Tensor-parallel layers against the unsplit layers of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.global_var import context
from bmtrain.nn import OpParallelLinear, ReduceType
from bmtrain.parameter import full_value, gather_flat

IN, OUT, ROWS = 8, 12, 6


def close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))


def reference(layer) -> torch.nn.Linear:
    """The plain twin: loaded from the (full) state dict."""
    has_bias = layer._parameters["bias"] is not None
    twin = torch.nn.Linear(layer.in_features, layer.out_features, bias=has_bias)
    twin.load_state_dict(layer.state_dict())
    return twin


def check_parameter_gradients(layer, twin) -> None:
    for name, param in layer.named_parameters():
        full = gather_flat(param, param.grad).view(param._tp_original_shape)
        close(full, getattr(twin, name).grad)


def wrapped(layer, in_block: bool):
    return bmt.Block(layer) if in_block else layer


def row_slice(x, tp):
    return x.chunk(tp.size, dim=0)[tp.rank]


def column(gather_input, gather_output, bias, chunks, in_block) -> None:
    tp = context().groups["tp"]
    layer = bmt.nn.ColumnParallelLinear(
        IN, OUT, bias=bias, gather_input=gather_input, gather_output=gather_output, async_gather_chunks=chunks
    )
    bmt.init_parameters(layer)
    twin = reference(layer)
    whole = torch.randn(ROWS, 5, IN, requires_grad=True)
    weights = torch.randn(ROWS, 5, OUT)
    expected = twin(whole)
    (expected * weights).sum().backward()

    x = (row_slice(whole, tp) if gather_input else whole).detach().clone().requires_grad_()
    out = wrapped(layer, in_block)(x)
    mine = slice(None) if gather_output else slice(tp.rank * OUT // tp.size, (tp.rank + 1) * OUT // tp.size)
    assert out.is_contiguous()
    close(out, expected[..., mine])
    # A gathered output is one value that every rank holds: the group's one loss is computed from it once each.
    (out * weights[..., mine]).sum().backward()
    close(x.grad, row_slice(whole.grad, tp) if gather_input else whole.grad)
    data_ranks = context().groups["tp_zero"].size
    for param in twin.parameters():
        param.grad *= data_ranks  # every data-parallel replica computes the same loss, and they add
    check_parameter_gradients(layer, twin)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("in_block", [False, True], ids=["bare", "block"])
def test_bc_74_column_parallel_linear(world, in_block):
    for gather_input in (True, False):
        for gather_output in (True, False):
            for bias, chunks in ((True, 2), (False, 1), (True, 4)):
                run_ranks(
                    world,
                    column,
                    gather_input,
                    gather_output,
                    bias,
                    chunks,
                    in_block,
                    init={"tp_size": min(world, 2)},
                )


def row(split_input, all_reduce_output, bias, chunks, in_block) -> None:
    tp = context().groups["tp"]
    layer = bmt.nn.RowParallelLinear(
        IN, OUT, bias=bias, split_input=split_input, all_reduce_output=all_reduce_output, async_chunks=chunks
    )
    bmt.init_parameters(layer)
    with torch.no_grad():
        if bias:
            layer._parameters["bias"].fill_(0.5)
    twin = reference(layer)
    whole = torch.randn(ROWS, 5, IN, requires_grad=True)
    weights = torch.randn(ROWS, 5, OUT)
    expected = twin(whole)
    (expected * weights).sum().backward()

    def mine(t):
        return row_slice(t, tp) if split_input else t.chunk(tp.size, dim=-1)[tp.rank]

    x = mine(whole).detach().clone().requires_grad_()
    out = wrapped(layer, in_block)(x)
    assert out.is_contiguous()
    close(out, expected if all_reduce_output else row_slice(expected, tp))
    (out * (weights if all_reduce_output else row_slice(weights, tp))).sum().backward()
    close(x.grad, mine(whole.grad))
    data_ranks = context().groups["tp_zero"].size
    for param in twin.parameters():
        param.grad *= data_ranks
    check_parameter_gradients(layer, twin)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("in_block", [False, True], ids=["bare", "block"])
def test_bc_74_row_parallel_linear(world, in_block):
    for split_input in (True, False):
        for all_reduce_output in (True, False):
            for bias, chunks in ((True, 2), (False, 1), (True, 4)):
                run_ranks(
                    world,
                    row,
                    split_input,
                    all_reduce_output,
                    bias,
                    chunks,
                    in_block,
                    init={"tp_size": min(world, 2)},
                )


def options_of_the_function() -> None:
    """Every combination of its options against the products of all ranks."""
    tp, flags = context().groups["tp"], (False, True)
    for gathers, joins, splits, reduction in itertools.product(flags, flags, flags, (None, *ReduceType)):
        torch.manual_seed(1)
        inputs = [torch.randn(ROWS, IN * (tp.size if splits else 1)) for _ in range(tp.size)]
        if not gathers and not splits and reduction is None:
            inputs = inputs[:1] * tp.size  # the same on all ranks
        weights = [torch.randn(OUT, IN) for _ in range(tp.size)]
        bias = torch.randn(OUT)
        x, weight, own_bias = (t.clone().requires_grad_() for t in (inputs[tp.rank], weights[tp.rank], bias))
        arguments = x, weight, own_bias, gathers, joins, splits, reduction
        if joins and reduction is not None and tp.size > 1:
            with pytest.raises(ValueError, match=f"gather_output: expected False with {reduction.name}"):
                OpParallelLinear.apply(*arguments)
            continue
        out = OpParallelLinear.apply(*arguments)

        is_replicated = not (gathers or splits) and reduction is None
        leaves = [t.clone().requires_grad_() for t in (inputs[:1] if is_replicated else inputs)]
        whole, all_weights = torch.cat(leaves), [t.clone().requires_grad_() for t in weights]
        of_ranks = [leaves[0]] * tp.size if is_replicated else leaves
        if splits:
            of_ranks = whole.chunk(tp.size, dim=1)
        elif gathers:
            of_ranks = [whole] * tp.size
        outs = [
            a @ w.t() + (bias if reduction is None else 0) for a, w in zip(of_ranks, all_weights, strict=True)
        ]
        expected = [torch.cat(outs, dim=1)] * tp.size if joins else outs
        if reduction is not None:
            total = torch.stack(outs).sum(0) + bias
            is_whole = reduction is ReduceType.ALL_REDUCE
            expected = [total] * tp.size if is_whole else list(total.chunk(tp.size))
        close(out, expected[tp.rank].detach())
        factors = torch.linspace(1, 2, out.numel()).view_as(out)
        (out * factors).sum().backward()
        is_one_value = joins or reduction is ReduceType.ALL_REDUCE  # of which all ranks have the one loss
        sum((value * factors).sum() for value in expected[: 1 if is_one_value else None]).backward()
        close(x.grad, leaves[0 if is_replicated else tp.rank].grad)
        close(weight.grad, all_weights[tp.rank].grad)


@pytest.mark.parametrize("world", [1, 2])
def test_every_combination_of_options_is_that_of_the_products(world: int) -> None:
    run_ranks(world, options_of_the_function, init={"tp_size": world})


def one_token() -> None:
    """An input without a dimension of rows, where ranks need none."""
    tp = context().groups["tp"]
    column = bmt.nn.ColumnParallelLinear(IN, OUT, gather_input=False)
    row = bmt.nn.RowParallelLinear(OUT, IN, all_reduce_output=True)
    bmt.init_parameters(torch.nn.ModuleList([column, row]))
    twins = reference(column), reference(row)
    whole, factors = torch.randn(IN, requires_grad=True), torch.randn(IN)
    expected = twins[1](torch.tanh(twins[0](whole)))
    (expected * factors).sum().backward()
    x = whole.detach().clone().requires_grad_()
    out = row(torch.tanh(column(x)))
    close(out, expected.detach())
    (out * factors).sum().backward()
    close(x.grad, whole.grad)
    check_parameter_gradients(column, twins[0])
    check_parameter_gradients(row, twins[1])
    for layer, size in (
        (bmt.nn.ColumnParallelLinear(IN, OUT), IN),
        (bmt.nn.RowParallelLinear(IN, OUT), IN // tp.size),
        (bmt.nn.RowParallelLinear(IN, OUT, split_input=True, all_reduce_output=True), IN),
    ):
        bmt.init_parameters(layer)
        if tp.size == 1:
            assert layer(torch.ones(size)).shape == (OUT,)
            continue
        with pytest.raises(ValueError, match="input: expected the ranks' rows along dim 0, got shape"):
            layer(torch.ones(size))


@pytest.mark.parametrize("world", [1, 2])
def test_one_token_without_a_dimension_of_rows(world: int) -> None:
    run_ranks(world, one_token, init={"tp_size": world})


def under_autocast(kind: str, in_block: bool) -> None:
    """What torch.nn.Linear gives under autocast, to its rounding: results in bf16, gradients in fp32."""
    tp, size = context().groups["tp"], {"in_features": IN, "out_features": OUT}
    make = {"column": bmt.nn.ColumnParallelLinear, "row": bmt.nn.RowParallelLinear}[kind]
    layer = make(**size, gather_output=True) if kind == "column" else make(**size, all_reduce_output=True)
    bmt.init_parameters(layer)
    twin = reference(layer)
    whole = torch.randn(ROWS, IN, requires_grad=True)
    x = row_slice(whole, tp) if kind == "column" else whole.chunk(tp.size, dim=-1)[tp.rank]
    mine = x.detach().clone().requires_grad_()
    model = wrapped(layer, in_block)
    with torch.autocast(whole.device.type, dtype=torch.bfloat16):
        out, expected = model(mine), twin(whole)
    assert out.dtype == expected.dtype == torch.bfloat16
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    grad = row_slice(whole.grad, tp) if kind == "column" else whole.grad.chunk(tp.size, dim=-1)[tp.rank]
    pairs = [(out, expected), (mine.grad, grad)]
    for name, param in layer.named_parameters():
        full = gather_flat(param, param.grad).view(param._tp_original_shape)
        pairs.append((full, getattr(twin, name).grad))
    for actual, wanted in pairs:
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0.03 * float(wanted.abs().max()))


@pytest.mark.parametrize("in_block", [False, True], ids=["bare", "block"])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("world", [1, 2])
def test_parallel_linear_under_autocast(world, kind, in_block):
    run_ranks(world, under_autocast, kind, in_block, init={"tp_size": world})


def embedding() -> None:
    tp = context().groups["tp"]
    vocab, dim, batch, seq = 16, 6, 3, 4
    layer = bmt.nn.VPEmbedding(vocab, dim, dtype=torch.float32)
    bmt.init_parameters(layer)
    table = full_value(layer._parameters["weight"]).clone().requires_grad_()
    ids = torch.randint(0, vocab, (tp.size, batch, seq), dtype=torch.int32)
    out_weights = torch.randn(tp.size, batch, seq, dim)
    hidden = torch.randn(tp.size, batch, seq, dim, requires_grad=True)
    logit_weights = torch.randn(batch, tp.size * seq, vocab)
    expected = torch.nn.functional.embedding(ids, table)
    expected_logits = torch.cat(list(hidden.unbind(0)), dim=1) @ table.t()
    ((expected * out_weights).sum() + (expected_logits * logit_weights).sum()).backward()

    out = layer(ids[tp.rank])
    close(out, expected[tp.rank])
    mine = hidden[tp.rank].detach().clone().requires_grad_()
    logits = layer(mine, projection=True)
    columns = slice(tp.rank * vocab // tp.size, (tp.rank + 1) * vocab // tp.size)
    close(logits, expected_logits[..., columns])
    ((out * out_weights[tp.rank]).sum() + (logits * logit_weights[..., columns]).sum()).backward()
    close(mine.grad, hidden.grad[tp.rank])
    param = layer._parameters["weight"]
    close(gather_flat(param, param.grad).view(vocab, dim), table.grad * context().groups["tp_zero"].size)


@pytest.mark.parametrize(("world", "tp_size"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_vocabulary_parallel_embedding_and_projection(world, tp_size):
    run_ranks(world, embedding, init={"tp_size": tp_size})


def drawn(kind: str) -> None:
    layer = getattr(bmt.nn, kind)(256, 64, dtype=torch.float32, init_mean=2.0, init_std=0.25)
    bmt.init_parameters(layer)
    table = full_value(layer._parameters["weight"])
    assert table.mean().item() == pytest.approx(2.0, abs=0.01)  # 5 deviations of a mean of 16,384
    assert table.std().item() == pytest.approx(0.25, abs=0.01)


@pytest.mark.parametrize("kind", ["VPEmbedding", "Projection", "VPProjection"])
def test_tables_are_drawn_as_asked(kind):
    run_ranks(2, drawn, kind, init={"tp_size": 2})


def projections() -> None:
    tp = context().groups["tp"]
    x = torch.randn(2, 3, 6)
    whole = bmt.nn.Projection(8, 6, dtype=torch.float32)
    split = bmt.nn.VPProjection(8, 6, dtype=torch.float32)
    bmt.init_parameters([whole, split])
    split.load_state_dict(whole.state_dict())
    a = x.clone().requires_grad_()
    b = x.clone().requires_grad_()
    expected = whole(a)
    columns = slice(tp.rank * 8 // tp.size, (tp.rank + 1) * 8 // tp.size)
    out = split(b)
    close(out, expected[..., columns])
    expected.square().sum().backward()
    out.square().sum().backward()
    close(b.grad, a.grad)


@pytest.mark.parametrize("world", [1, 2])
def test_projections_agree(world):
    run_ranks(world, projections, init={"tp_size": world})


def untied_head() -> None:
    tp, group = context().groups["tp"], context().groups["tp_zero"]
    table, linear = torch.nn.Embedding(8, 6), torch.nn.Linear(6, 6)
    head = torch.nn.Linear(6, 8, bias=False)
    ids = torch.randint(8, (group.size, 2, 4))
    logits = head(torch.tanh(linear(table(ids))))
    torch.nn.functional.cross_entropy(logits.flatten(0, 2), ids.flatten()).backward()
    parts = bmt.nn.VPEmbedding(8, 6), bmt.nn.Linear(6, 6), bmt.nn.VPEmbedding(8, 6)
    for part, plain in zip(parts, (table, linear, head), strict=True):
        part.float().load_state_dict(plain.state_dict())
    optimizer = bmt.optim.AdamOptimizer([p for part in parts for p in part.parameters()])
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    own = ids[group.rank].chunk(tp.size, dim=1)[tp.rank]
    logits = parts[2].projection(torch.tanh(parts[1](parts[0](own))))
    loss = bmt.loss.FusedCrossEntropy(parallel=True)(logits.flatten(0, 1), ids[group.rank].flatten())
    manager.backward(loss)
    for part, plain in zip(parts, (table, linear, head), strict=True):
        for name, param in part.named_parameters():
            expected = plain.get_parameter(name).grad
            if part is not parts[1]:
                expected = expected.chunk(tp.size)[tp.rank]
            close(param.gather_grad(), expected)


@pytest.mark.parametrize("world", [2, 4])
def test_an_untied_head_that_takes_the_tokens_of_each_rank_has_the_gradients_of_plain_torch(world):
    run_ranks(world, untied_head, init={"tp_size": 2})


def look_up(number: int) -> str:
    layer = bmt.nn.VPEmbedding(6, 4)
    with pytest.raises(IndexError) as error:
        layer(torch.tensor([0, number, 5]))
    return str(error.value)


@pytest.mark.parametrize("number", [-1, 6])
def test_an_id_outside_the_vocabulary_is_named_on_all_ranks(number: int) -> None:
    said = f"x: expected ids in [0, 6), got {number}"
    assert run_ranks(2, look_up, number, init={"tp_size": 2}) == [said] * 2


def indivisible(kind: str) -> str:
    makers = {
        "out_features": lambda: bmt.nn.ColumnParallelLinear(4, 5),
        "in_features": lambda: bmt.nn.RowParallelLinear(5, 4),
        "vocab_size": lambda: bmt.nn.VPEmbedding(5, 4),
        "input": lambda: bmt.nn.RowParallelLinear(4, 4)(torch.zeros(3, 2)),
    }
    with pytest.raises(ValueError, match=kind) as error:
        makers[kind]()
    return str(error.value)


@pytest.mark.parametrize("kind", ["out_features", "in_features", "vocab_size", "input"])
def test_what_does_not_divide_is_named(kind):
    assert all("tp_size 2" in message for message in run_ranks(2, indivisible, kind, init={"tp_size": 2}))


def test_other_tp_size_loads_the_same_file(tmp_path):
    run_ranks(2, save_layer, str(tmp_path / "layer.pt"), init={"tp_size": 2})
    run_ranks(1, load_layer, str(tmp_path / "layer.pt"))


def save_layer(path: str) -> None:
    layer = bmt.nn.ColumnParallelLinear(IN, OUT)
    bmt.init_parameters(layer)
    bmt.save(layer, path)


def load_layer(path: str) -> None:
    layer = bmt.nn.ColumnParallelLinear(IN, OUT)
    bmt.load(layer, path)
    torch.manual_seed(0)
    expected = torch.nn.init.xavier_normal_(torch.empty(OUT, IN))
    assert torch.equal(full_value(layer._parameters["weight"]), expected)


def penalties() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    for layer in (bmt.nn.ColumnParallelLinear(4, 4), bmt.nn.RowParallelLinear(4, 4, split_input=True)):
        (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            gradient.square().sum().backward()
    assert all(
        "4, 2" in repr(kind(4, 2)) for kind in (bmt.nn.VPEmbedding, bmt.nn.Projection, bmt.nn.VPProjection)
    )


def test_a_penalty_on_the_gradient_is_refused_and_not_wrong() -> None:
    run_ranks(2, penalties, init={"tp_size": 2})
