"""What inspection shows, for every form a model can have and any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from harness import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.inspect import inspect_tensor, record_tensor

WORLDS = (1, 2, 4)
DIM = 6


class Recording(nn.Module):
    """Records its input, something in the middle, something nobody uses, and its output."""

    def __init__(self, weight: torch.Tensor, parameter: type = nn.Parameter) -> None:
        super().__init__()
        self.weight = parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        record_tensor(x, "input", group="layer")
        middle = torch.nn.functional.dropout(x @ self.weight, 0.25).tanh()
        record_tensor(middle, "middle", group="layer")
        record_tensor(middle.exp(), "unused", group="layer")
        record_tensor(middle.detach(), "constant")
        out = x + middle @ self.weight
        record_tensor(out, "output", group="layer")
        return out


class DistributedRecording(bmt.DistributedModule, Recording):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight, bmt.DistributedParameter)


def make_layers(form: str, **options) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(DIM, DIM, generator=generator) / 2 for _ in range(3)]
    if form == "plain":
        return nn.ModuleList([Recording(weight) for weight in weights])
    layers = [DistributedRecording(weight) for weight in weights]
    if form == "list":
        return bmt.TransformerBlockList([bmt.Block(layer, **options) for layer in layers])
    if form == "pipeline":
        return bmt.PipelineTransformerBlockList(layers)
    return nn.ModuleList([layer if form == "bare" else bmt.Block(layer, **options) for layer in layers])


def run_recorded(form: str, loss_of: str, **options):
    """Everything a user sees of one pass: entries, their values and gradients, gradients of x and the weights."""
    torch.manual_seed(7)
    layers = make_layers(form, **options)
    x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(bmt.rank()), requires_grad=True)
    with inspect_tensor() as inspector:
        hidden = x * 1
        if form in ("list", "pipeline"):
            hidden = layers(hidden)
        else:
            for layer in layers:
                hidden = layer(hidden)
        if "inside" in loss_of:
            hidden.square().sum().backward()
    middle = inspector.get_tensor("middle", group="layer", index=1)
    if loss_of == "middle":
        middle.sin().sum().backward()
    elif loss_of == "both":
        (
            middle.sin().sum() + hidden.square().sum() + inspector.get_tensor("input", "layer", 2).sum()
        ).backward()
    elif loss_of == "twice":
        hidden.square().sum().backward(retain_graph=True)
        (middle.sin().sum() + hidden.sum()).backward()
    entries = [
        {
            **{key: item[key] for key in ("name", "group", "summary_name", "shape", "requires_grad")},
            "value": item["tensor"].detach().clone(),
            "grad": item["tensor"].grad if item["requires_grad"] else None,
        }
        for item in inspector.summary
    ]
    weights = [layer._parameters["weight"].grad for layer in layers]
    return entries, x.grad, weights, inspector


def assert_close(actual: torch.Tensor | None, expected: torch.Tensor | None, what: object) -> None:
    assert (actual is None) == (expected is None), what
    if expected is not None:
        assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max())), what


@pytest.mark.parametrize("loss_of", ["inside", "middle", "both", "twice"])
@pytest.mark.parametrize("world", (1, 2))
def test_bc68_recorded_tensors_are_part_of_the_graph(world, loss_of):
    # Passes without backward would show in counts of buffers.
    run_ranks(world, check_recorded, loss_of, fresh=True)


def check_recorded(loss_of: str) -> None:
    expected_entries, expected_x, expected_weights, _ = run_recorded("plain", loss_of)
    assert [entry["summary_name"] for entry in expected_entries[:6]] == [
        "layer.0.input", "layer.0.middle", "layer.0.unused", "0.constant", "layer.0.output", "layer.1.input",
    ]  # fmt: skip
    for weight in expected_weights:
        if weight is not None:
            torch_sum(weight)
    cases = [("bare", {}), ("list", {})]
    cases += [
        ("block", {"use_checkpoint": flag, "zero_level": level}) for flag in (True, False) for level in (2, 3)
    ]
    for form, options in cases:
        case = (form, options)
        entries, x_grad, weights, inspector = run_recorded(form, loss_of, **options)
        assert len(entries) == len(expected_entries) == 15, case
        for entry, expected in zip(entries, expected_entries, strict=True):
            for key in ("name", "group", "summary_name", "shape", "requires_grad"):
                assert entry[key] == expected[key], case
            assert torch.equal(entry["value"], expected["value"]), case
            assert_close(entry["grad"], expected["grad"], (case, entry["summary_name"]))
        assert_close(x_grad, expected_x, case)
        for index, (weight, expected) in enumerate(zip(weights, expected_weights, strict=True)):
            if expected is not None:
                param = make_layers("bare")[index]._parameters["weight"]
                begin, end = param._start_partition, param._end_partition
                if form == "bare":
                    assert_close(weight, expected.flatten()[begin:end], case)
        assert inspector.get_tensor("nothing") is None
        assert inspector.get_tensor("middle", "layer", 9) is None
        assert inspector.get_tensor("constant").requires_grad is False


def torch_sum(weight: torch.Tensor) -> None:
    """Adds the ranks' gradients of a plain model, as sharded parameters have them."""
    bmt.config["comm"].all_reduce(weight, bmt._C.ReduceOp.SUM).wait()


def summaries(form: str) -> list:
    """With nothing random, at equal total batch."""
    layers = make_layers(form)
    for layer in layers:
        layer.train()
    x = torch.randn(8, DIM, generator=torch.Generator().manual_seed(2), requires_grad=True)
    local = x.chunk(bmt.world_size())[bmt.rank()]
    original = torch.nn.functional.dropout
    torch.nn.functional.dropout = lambda value, p: value
    try:
        with inspect_tensor() as inspector:
            hidden = local
            if form == "pipeline":
                hidden = layers(hidden)
            else:
                for layer in layers:
                    hidden = layer(hidden)
            record_tensor(hidden.sum(), "scalar")
        before = inspector.get_summary()
        with inspect_tensor():
            hidden.square().sum().backward()
    finally:
        torch.nn.functional.dropout = original
    return before + inspector.get_summary()


def test_bc69_recorded_statistics_are_equal_for_all_forms():
    for world in WORLDS:
        forms = [run_ranks(world, summaries, form) for form in ("bare", "block", "list")]
        expected = forms[0][0]
        half = len(expected) // 2
        assert all(row["grad_mean"] is None for row in expected[:half])
        assert expected[0]["shape"] == (8, DIM)
        assert expected[half - 1] == {**expected[half - 1], "name": "0.scalar", "shape": ()}
        assert [row["grad_mean"] is not None for row in expected[half : half + 5]] == [
            True,
            True,
            False,
            False,
            True,
        ]
        for ranks in forms:
            for rows in ranks:
                assert len(rows) == len(expected)
                for row, other in zip(rows, expected, strict=True):
                    assert row["name"] == other["name"]
                    for key in ("min", "max", "mean", "std", "grad_mean", "grad_std"):
                        if other[key] is None:
                            assert row[key] is None
                        else:
                            assert row[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6, nan_ok=True), (
                                row["name"]
                            )


@pytest.mark.parametrize(
    ("world", "init"), [(2, {"pipe_size": 2}), (4, {"pipe_size": 2, "num_micro_batches": 4})]
)
def test_bc69_a_pipeline_shows_what_a_list_shows(world, init):
    expected = run_ranks(world, summaries, "list")[0]
    for rows in run_ranks(world, summaries, "pipeline", init=init):
        assert [row["name"] for row in rows] == [row["name"] for row in expected]
        for row, other in zip(rows, expected, strict=True):
            assert row["shape"] == other["shape"]
            for key in ("min", "max", "mean", "std", "grad_mean", "grad_std"):
                if other[key] is None:
                    assert row[key] is None, (row["name"], key)
                else:
                    assert row[key] == pytest.approx(other[key], rel=1e-5, abs=1e-6, nan_ok=True), row["name"]


@pytest.mark.parametrize("loss_of", ["inside", "middle", "both", "twice", "by rank"])
def test_bc68_tensors_recorded_in_a_pipeline_are_part_of_the_graph(loss_of):
    run_ranks(2, check_recorded_in_pipeline, loss_of, init={"pipe_size": 2}, fresh=True)


def check_recorded_in_pipeline(loss_of: str) -> None:
    by_rank = loss_of == "by rank"  # stages run backward for the ranks whose loss needs them
    if by_rank:
        loss_of = ("middle", "inside")[bmt.rank()]
    original = torch.nn.functional.dropout
    torch.nn.functional.dropout = lambda value, p: value
    try:
        expected_entries, expected_x, _, _ = run_recorded("plain", loss_of)
        entries, x_grad, _, _ = run_recorded("pipeline", loss_of)
    finally:
        torch.nn.functional.dropout = original
    assert_close(x_grad, expected_x, "x")
    for entry, expected in zip(entries, expected_entries, strict=True):
        for key in ("name", "group", "summary_name", "shape", "requires_grad"):
            assert entry[key] == expected[key], entry
        assert torch.allclose(entry["value"], expected["value"], rtol=1e-5, atol=1e-6)
        if by_rank and expected["grad"] is None and entry["grad"] is not None:
            assert not entry["grad"].any(), entry["summary_name"]
        else:
            assert_close(entry["grad"], expected["grad"], entry["summary_name"])


RUNS = [0]  # not of a module: those are as they were when a forward runs again


class SavesOther(DistributedRecording):
    """Every other run saves other tensors for its backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS[0] += 1
        first = x @ self.weight
        record_tensor(first, "first", group="layer")
        second = first.sigmoid() if RUNS[0] % 2 else 1 / (1 + (-first).exp())
        record_tensor(second, "second", group="layer")
        return second @ self.weight


def check_second_graph() -> None:
    weight = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1)).requires_grad_()
    block = bmt.Block(SavesOther(weight.detach().clone()), use_checkpoint=True)
    given = torch.randn(4, DIM, generator=torch.Generator().manual_seed(bmt.rank()))
    x, y = given.clone().requires_grad_(), given.clone().requires_grad_()
    with inspect_tensor() as inspector:
        hidden = block(x * 1)
        (hidden.square().sum() + inspector.get_tensor("first", "layer").sin().sum()).backward()
    assert RUNS[0] == 2
    first = y @ weight
    second = first.sigmoid()
    for tensor in (first, second):
        tensor.retain_grad()
    ((second @ weight).square().sum() + first.sin().sum()).backward()
    assert_close(x.grad, y.grad, "x")
    for name, tensor in (("first", first), ("second", second)):
        found = inspector.get_tensor(name, "layer")
        assert_close(found.detach(), tensor.detach(), name)
        assert_close(found.grad, tensor.grad, name)


def test_recorded_tensors_have_gradients_of_a_second_run_that_saves_others() -> None:
    run_ranks(2, check_second_graph, fresh=True)


class WithoutBatch(DistributedRecording):
    """Records what has no row for each sample, in so many calls."""

    calls_left = 100

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls_left -= 1
        if self.calls_left >= 0:
            record_tensor(self.weight.norm(), "norm", group="weight")
            record_tensor(self.weight[:3, 0], "column", group="weight")
        return x @ self.weight


def check_without_batch() -> None:
    modules = [WithoutBatch(torch.randn(DIM, DIM)) for _ in range(2)]
    layers = bmt.PipelineTransformerBlockList(modules)
    x = torch.randn(3, DIM, requires_grad=True)
    with inspect_tensor() as inspector:
        layers(x).sum().backward()
    for index, layer in enumerate(modules):
        weight = bmt.parameter.full_value(layer._parameters["weight"])
        for name, expected in (("norm", weight.norm()), ("column", weight[:3, 0])):
            found = inspector.get_tensor(name, group="weight", index=index)
            assert torch.equal(found, expected) and not found.requires_grad, (index, name)
    modules[1].calls_left = 1
    with inspect_tensor(), pytest.raises(ValueError, match="stage 1 .* recorded other tensors in some"):
        layers(x)


def test_tensors_without_a_batch_are_recorded_once_in_a_pipeline() -> None:
    run_ranks(2, check_without_batch, init={"pipe_size": 2, "num_micro_batches": 3})


class UsedForSome(DistributedRecording):
    """Records a tensor that the result depends on for some inputs only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = x @ self.weight
        record_tensor(middle, "middle", group="layer")
        return middle.tanh() if x[0, 0] > 0 else x * 2


def check_used_for_some() -> None:
    weight = torch.eye(DIM) + torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1)) / 10
    layers = bmt.PipelineTransformerBlockList([UsedForSome(weight) for _ in range(2)])
    first = torch.full((3, DIM), 0.5 if bmt.rank() == 0 else -0.5, requires_grad=True)
    with inspect_tensor() as inspector:
        layers(first).square().sum().backward()
    x = first.detach().requires_grad_()
    hidden, middles = x, []
    for _ in range(2):
        middles.append(hidden @ weight)
        middles[-1].retain_grad()
        hidden = middles[-1].tanh() if bmt.rank() == 0 else hidden * 2
    hidden.square().sum().backward()
    assert_close(first.grad, x.grad, "x")
    for index, middle in enumerate(middles):
        found = inspector.get_tensor("middle", group="layer", index=index)
        assert_close(found, middle, index)
        expected = torch.zeros_like(middle) if middle.grad is None else middle.grad
        assert_close(found.grad, expected, index)


def test_a_tensor_that_some_micro_batches_use_has_their_gradients() -> None:
    run_ranks(2, check_used_for_some, init={"pipe_size": 2})


@pytest.mark.parametrize("world", (1, 2))
def test_statistics_over_ranks(world):
    run_ranks(world, check_statistics)


def check_statistics() -> None:
    with inspect_tensor() as inspector:
        record_tensor(torch.arange(4).view(2, 2) + 10 * bmt.rank(), "whole")
        record_tensor(torch.ones(3), "whole")
        assert inspector.get_tensor("whole").shape == (2, 2)  # the first of this name
    row = inspector.get_summary()[0]
    values = [torch.arange(4.0) + 10 * rank for rank in range(bmt.world_size())]
    assert row["mean"] == pytest.approx(sum(v.mean().item() for v in values) / len(values))
    assert row["std"] == pytest.approx((sum(v.var().item() for v in values) / len(values)) ** 0.5)
    assert (row["min"], row["max"]) == (0.0, values[-1].max().item())
    assert row["shape"] == (2 * bmt.world_size(), 2)
    assert row["grad_mean"] is row["grad_std"] is None


def check_uneven() -> None:
    """A rank without elements has no part in the statistics, and one element has no variance."""
    own = [torch.empty(0), torch.tensor([2.0]), torch.tensor([4.0, 8.0])][bmt.rank()].requires_grad_()
    nothing, unknown = torch.empty(0), torch.tensor([torch.nan, 1.0])
    with inspect_tensor() as inspector:
        for tensor in (own * 1, nothing, unknown, torch.tensor([bmt.rank() * 1.0])):
            record_tensor(tensor, "x")
    inspector.get_tensor("x").square().sum().backward()
    first, second, third, fourth = inspector.get_summary()
    assert (first["min"], first["max"], first["mean"]) == (2.0, 8.0, (2 + 6) / 2)
    assert first["std"] == pytest.approx(8**0.5)
    assert (first["grad_mean"], first["grad_std"]) == (pytest.approx((4 + 12) / 2), pytest.approx(32**0.5))
    assert all(math.isnan(second[name]) for name in ("min", "max", "mean", "std"))
    assert all(math.isnan(third[name]) for name in ("min", "max", "mean", "std"))  # as of torch
    assert (fourth["min"], fourth["max"], fourth["mean"]) == (0.0, 2.0, 1.0) and math.isnan(fourth["std"])


def test_ranks_without_elements_have_no_part_in_statistics() -> None:
    run_ranks(3, check_uneven)


def test_rules_of_recording():
    run_ranks(1, check_rules)
    run_ranks(1, check_rules_before_init, init=False)


def check_rules_before_init() -> None:
    record_tensor(torch.ones(2), "nowhere")
    with inspect_tensor() as inspector:
        record_tensor(torch.ones(2), "here")
    assert [item["name"] for item in inspector.summary] == ["here"]


def check_rules() -> None:
    x = torch.ones(2, requires_grad=True)
    record_tensor(x, "nowhere")
    with inspect_tensor() as inspector:
        with pytest.raises(RuntimeError, match="nested"), inspect_tensor():
            pass
        with pytest.raises(RuntimeError, match="parameters"):
            record_tensor(nn.Parameter(x), "parameter")
        with pytest.raises(TypeError, match="x: expected a tensor, got 3"):
            record_tensor(3, "number")
        with torch.no_grad():
            record_tensor(x * 2, "plain")
            teacher = make_layers("block")[0]
            teacher(torch.ones(1, DIM))
        record_tensor(x * 2, "with history")
        bmt.checkpoint(lambda y: record_and_return(y * 3))(x).sum().backward()
    assert inspector._summary is inspector.summary
    names = [item["name"] for item in inspector.summary]
    assert names == [
        "plain", "input", "middle", "unused", "constant", "output", "with history", "checkpointed",
    ]  # fmt: skip
    assert [item["requires_grad"] for item in inspector.summary][:7] == [False] * 6 + [True]
    with inspect_tensor() as second:
        pass
    assert second.summary == []


def record_and_return(y: torch.Tensor) -> torch.Tensor:
    record_tensor(y, "checkpointed")
    return y
