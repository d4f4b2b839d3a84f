"""Schedules of a pipeline whose loss is inside: equal bits, peaks of activations, and idle shares."""

from __future__ import annotations

import re
import warnings
import weakref

import pytest
import torch
from harness import rank_outcomes, run_ranks

import bmtrain as bmt
from bmtrain._base import deprecate
from bmtrain._engine.pipe_schedule import Action, Kind, actions_of, ends_of, peak_micros

DIM, ROWS = 8, 6
LIVE: list[weakref.ref] = []


class Token:
    """Is there as long as the activations of one layer and one micro-batch are."""


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.token = Token()
        LIVE.append(weakref.ref(ctx.token))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Layer(bmt.DistributedModule):
    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        normal = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.3)
        self.weight = bmt.DistributedParameter(torch.empty(DIM, DIM, dtype=dtype), init_method=normal)
        self.bias = bmt.DistributedParameter(torch.zeros(DIM, dtype=dtype))

    def forward(self, x, scale):
        return x + Held.apply(torch.tanh(torch.nn.functional.linear(x, self.weight, self.bias))) * scale


class Head(bmt.DistributedModule):
    """Its weight is also read before the layers (tied)."""

    def __init__(self, embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.scale = bmt.DistributedParameter(torch.linspace(0.5, 1.5, DIM))

    def forward(self, x, wanted):
        return torch.nn.functional.cross_entropy(
            (x.float() * self.scale) @ self.embedding.weight.float().t(), wanted
        )


class Model(bmt.DistributedModule):
    def __init__(self, num_layers, dtype=torch.float32, policy=None, **options) -> None:
        super().__init__()
        self.embedding = bmt.nn.Linear(DIM, DIM, bias=False, dtype=dtype)
        blocks = [bmt.Block(Layer(dtype), mode="PIPE", policy=policy) for _ in range(num_layers)]
        self.layers = bmt.PipelineTransformerBlockList(blocks, **options)
        self.head = Head(self.embedding)

    def forward(self, x, wanted):
        return self.layers.loss(self.embedding(x), 0.5, head=self.head, labels=wanted)


def trained(num_layers, options, scale=None, accumulate=1, dtype="float32", rows=ROWS, policy=None, frozen=0):
    """Losses and weights of three steps, and the gradients of the last."""
    torch.manual_seed(1)
    dtype = getattr(torch, dtype)
    policy = None if policy is None else bmt.BlockPolicy(**policy)
    model = Model(num_layers, dtype, policy, **options)
    bmt.init_parameters(model)
    for block in list(model.layers)[:frozen]:
        block.requires_grad_(False)
    optimizer = bmt.optim.SGDOptimizer(model.parameters(), lr=0.1)
    manager = bmt.optim.OptimManager(loss_scale=scale, loss_scale_steps=2, accumulate=accumulate)
    manager.add_optimizer(optimizer)
    torch.manual_seed(2)
    losses = []
    for _ in range(3 * accumulate):
        x, wanted = torch.randn(bmt.world_size(), rows, DIM), torch.randint(DIM, (bmt.world_size(), rows))
        manager.zero_grad()
        loss = model(x[bmt.rank()].to(dtype), wanted[bmt.rank()])
        manager.backward(loss)
        losses.append(loss.item())
        gradients = [param.gather_grad() for param in model.parameters() if param.requires_grad]
        manager.step()
    assert all(not block._runtime.defers for block in model.layers)
    return losses, [param.gather().detach() for param in model.parameters()], gradients


CASES = [
    (2, {"pipe_size": 2, "num_micro_batches": 4}, 4),
    (4, {"pipe_size": 4, "num_micro_batches": 8}, 9),
    (4, {"pipe_size": 2, "num_micro_batches": 4}, 5),
]


OPTIONS = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "interleaved", "chunks": 2},
    {"schedule": "zb1p"},
]


@pytest.mark.parametrize(("world", "init", "num_layers"), CASES, ids=str)
def test_schedules_have_the_bits_of_gpipe(world, init, num_layers):
    expected = run_ranks(world, trained, num_layers, OPTIONS[0], init=init)
    for options in OPTIONS[1:]:
        assert_equal(run_ranks(world, trained, num_layers, options, init=init), expected)


def assert_equal(found, expected):
    for (losses, weights, gradients), reference in zip(found, expected, strict=True):
        assert losses == reference[0]
        for one, other in zip([*weights, *gradients], [*reference[1], *reference[2]], strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    "kinds",
    [
        {"scale": 2.0**10, "dtype": "float16"},
        {"scale": 3.0},
        {"accumulate": 2},
        {"accumulate": 2, "frozen": 2},  # gpipe: the whole first stage
        {"rows": 5},
        {"policy": {"level": 2, "recompute": "off"}},
        {"policy": {"level": 0, "recompute": "selective"}},
    ],
    ids=str,
)
def test_bits_with_loss_scales_accumulation_uneven_rows_and_policies(kinds):
    init = {"pipe_size": 2, "num_micro_batches": 4}
    expected = run_ranks(4, trained, 4, OPTIONS[0], init=init, **kinds)
    for options in OPTIONS[1:]:
        assert_equal(run_ranks(4, trained, 4, options, init=init, **kinds), expected)


def seeded_twice() -> None:
    """Gradients of any seed are those that a first call with this seed has."""
    found = []
    for before in ([], [1.0, 7.0]):
        torch.manual_seed(1)
        model = Model(4)
        bmt.init_parameters(model)
        for factor in [*before, 0.3, 0.3]:
            torch.manual_seed(2)
            x, wanted = torch.randn(ROWS, DIM), torch.randint(DIM, (ROWS,))
            for param in model.parameters():
                param.grad = None
            (model(x, wanted) * factor).backward()
        found.append([param.gather_grad() for param in model.parameters()])
    for gradients in found:
        assert all(torch.equal(one, other) for one, other in zip(gradients, found[0], strict=True))


def test_gradients_have_the_bits_of_the_true_seed():
    run_ranks(2, seeded_twice, init={"pipe_size": 2, "num_micro_batches": 4})


def passes_of_steps() -> list[float]:
    """How often each step runs the layers of this stage, where nothing is recomputed."""
    model = Model(4, policy=bmt.BlockPolicy(level=2, recompute="off"))
    bmt.init_parameters(model)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[int] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    found = []
    for factor in (1.0, 1.0, 3.0, 3.0):
        calls.clear()
        manager.zero_grad()
        manager.backward(model(torch.randn(ROWS, DIM), torch.randint(DIM, (ROWS,))) * factor)
        manager.step()
        found.append(len(calls) / (2 * 4))
    return found


def test_a_step_runs_the_layers_twice_after_a_change_of_the_seed_only():
    init = {"pipe_size": 2, "num_micro_batches": 4}
    assert run_ranks(4, passes_of_steps, init=init) == [[1, 1, 2, 1]] * 4


def losses_without_backward() -> None:
    torch.manual_seed(1)
    model = Model(4)
    bmt.init_parameters(model)
    x, wanted = torch.randn(ROWS, DIM), torch.randint(DIM, (ROWS,))
    loss = model(x, wanted)
    loss.backward()
    expected = [param.gather_grad() for param in model.parameters()]
    for param in model.parameters():
        param.grad = None
    model(x + 1, wanted)
    dropped = model(x + 2, wanted)
    loss = model(x, wanted)
    with torch.no_grad():
        model(x + 3, wanted)
    loss.backward()
    for param, reference in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.gather_grad(), reference)
    with pytest.raises(RuntimeError, match="after a later call of the same list"):
        dropped.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    model.layers.loss(x, 0.5, head=model.head, labels=wanted)
    assert not x.requires_grad
    loss = model(x, wanted)
    with torch.no_grad():
        for param in model.layers.parameters():
            param.add_(1)
    with pytest.raises(RuntimeError, match="modified in place between"):
        loss.backward()


def test_a_loss_without_backward_leaves_nothing():
    run_ranks(2, losses_without_backward, init={"pipe_size": 2, "num_micro_batches": 4})


def losses_beside_gradients_that_wait() -> None:
    """One that comes to no backward, and one that brings another gradient of the loss than the first."""
    torch.manual_seed(1)
    model = Model(4)
    bmt.init_parameters(model)
    x, wanted = torch.randn(ROWS, DIM), torch.randint(DIM, (ROWS,))
    model(x, wanted).backward()
    expected = [4 * param.gather_grad() for param in model.parameters()]
    for param in model.parameters():
        param.grad = None
    with bmt.no_sync():
        model(x, wanted).backward()
    model(x + 1, wanted)
    (model(x, wanted) * 3).backward()
    for param, reference in zip(model.parameters(), expected, strict=True):
        check(param.gather_grad(), reference)


def test_gradients_that_wait_are_neither_dropped_nor_mixed_with_others():
    init = {"pipe_size": 2, "num_micro_batches": 4}
    run_ranks(2, losses_beside_gradients_that_wait, init=init)


def losses_around_an_evaluation(chunks: int) -> None:
    """A pass without gradients keeps those of a loss before it, until its backward or the next loss."""
    schedule = {"schedule": "interleaved" if chunks > 1 else "1f1b", "chunks": chunks}
    x, wanted = torch.randn(ROWS, DIM), torch.randint(DIM, (ROWS,))
    found = []
    for is_evaluated in (False, True):
        torch.manual_seed(1)
        model = Model(4, **schedule)
        bmt.init_parameters(model)
        gradients = []
        for is_dropped, factor in ((True, 1.0), (False, 1.0), (True, 3.0), (False, 0.3)):
            if is_dropped:
                model(x + 1, wanted)
            loss = model(x, wanted) if not is_dropped else None
            if is_evaluated:
                with torch.no_grad():
                    model(x + 2, wanted)
                    model.layers(x, 0.5)
            if loss is not None:  # the second one brings another gradient of the loss
                (loss * factor).backward()
                gradients += [param.gather_grad() for param in model.parameters()]
        found.append(gradients)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_evaluation_drops_no_gradients_and_keeps_none(chunks):
    run_ranks(2, losses_around_an_evaluation, chunks, init={"pipe_size": 2, "num_micro_batches": 4})


def chosen_boundaries() -> tuple[list[int], list[torch.Tensor]]:
    torch.manual_seed(1)
    model = Model(7, part_lens=[1, 0, 5, 1], schedule="interleaved", chunks=2)
    other = Model(7, part_lens=[5, 2])
    bmt.init_parameters(model)
    other.load_state_dict(model.state_dict())
    x, wanted = torch.randn(ROWS, DIM), torch.randint(DIM, (ROWS,))
    for each in (model, other):
        each(x, wanted).backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.gather_grad(), two.gather_grad())
    return model.layers.layer_ids


def test_a_boundary_may_be_anywhere():
    init = {"pipe_size": 2, "num_micro_batches": 4}
    assert run_ranks(2, chosen_boundaries, init=init) == [[0, 1, 2, 3, 4, 5], [6]]


class InBlock(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = bmt.Block(bmt.nn.Linear(DIM, 1))


def order_of_actions(options) -> list[str]:
    """What this stage did, in order, in a pass: forwards, backwards and products that are gradients of weights."""
    stages, chunks = bmt.config["pipe_size"], options.get("chunks", 1)
    policy = bmt.BlockPolicy(level=2, recompute="off")
    model = Model(stages * chunks, policy=policy, **options)
    done = []
    forward, backward = Held.forward, Held.backward
    Held.forward = staticmethod(lambda ctx, x: (done.append("F"), forward(ctx, x))[1])
    Held.backward = staticmethod(lambda ctx, gradient: (done.append("B"), backward(ctx, gradient))[1])
    for block in model.layers:
        block._module.weight.register_hook(lambda _: done.append("W"))
    try:
        model(torch.randn(ROWS, DIM), torch.randint(DIM, (ROWS,)))
    finally:
        Held.forward, Held.backward = staticmethod(forward), staticmethod(backward)
    return done


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_stage_acts_in_the_order_of_its_schedule(options):
    stages, micros = 4, 8
    found = run_ranks(
        stages, order_of_actions, options, init={"pipe_size": stages, "num_micro_batches": micros}
    )
    actions = actions_of(options["schedule"], stages, micros, options.get("chunks", 1))
    letters = {"F": "F", "B": "BW", "I": "B", "W": "W"}
    assert ["".join(done) for done in found] == [
        "".join(letters[action.kind.value] for action in of_stage) for of_stage in actions
    ]
    if options["schedule"] == "1f1b":
        assert "".join(found[0]).replace("BW", "B") == "FFFFBFBFBFBFBBBB"


class Outputs(torch.nn.Module):
    def forward(self, out):
        return out


class Elsewhere(torch.nn.Module):
    def __init__(self, held) -> None:
        super().__init__()
        self.held = [held]

    def forward(self, out):
        return self.held[0](out).mean()


def mistakes() -> None:
    def pipeline(**options):
        return bmt.PipelineTransformerBlockList([torch.nn.Tanh() for _ in range(4)], **options)

    for options, message in (
        ({"schedule": "2f2b"}, "schedule: expected one of gpipe, 1f1b, interleaved"),
        ({"chunks": 2}, "chunks: expected 1 with schedule '1f1b', got 2"),
        ({"schedule": "interleaved"}, "chunks: expected at least 2"),
        ({"schedule": "interleaved", "chunks": 2}, "expected a multiple of the 2 stages"),
        ({"part_lens": [1, 2]}, "part_lens: expected 2 numbers with the sum 4"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline(**options)
    layers, x = pipeline(), torch.zeros(2, DIM)
    with pytest.raises(ValueError, match="parameter 'block.weight' is in a Block"):
        layers.loss(x, head=InBlock())
    with pytest.raises(ValueError, match="expected distributed parameters.*'weight'"):
        layers.loss(x, head=torch.nn.Linear(DIM, 1))
    with pytest.raises(TypeError, match="head"):
        layers.loss(x, head=torch.sum)
    with pytest.raises(ValueError, match="at least one row for each of the 3 micro-batches"):
        layers.loss(x[:1], head=Outputs())


def test_mistakes_are_named():
    run_ranks(2, mistakes, init={"pipe_size": 2, "num_micro_batches": 3})


class TiedToLayer(torch.nn.Module):
    def __init__(self, layers) -> None:
        super().__init__()
        self.held = [layers]

    def forward(self, out):
        return torch.nn.functional.linear(out, self.held[0][0].weight).mean()


def broken_head(kind: str) -> None:
    layers = bmt.PipelineTransformerBlockList([bmt.nn.Linear(DIM, DIM) for _ in range(4)])
    bmt.init_parameters(layers)
    heads = {
        "shape": Outputs,
        "read": lambda: Elsewhere(bmt.nn.Linear(DIM, 1)),
        "layer": lambda: TiedToLayer(layers),
    }
    layers.loss(torch.zeros(2, DIM), head=heads[kind]())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", "expected a module that returns the mean loss"),
        ("read", "read a parameter.*; register the module"),
        ("layer", "read a parameter.*; call the list, and compute"),
    ],
)
def test_a_wrong_head_is_named_by_the_last_stage(kind, message):
    outcomes = rank_outcomes(2, broken_head, kind, init={"pipe_size": 2}, grace=1)
    assert re.search(message, str(outcomes[1]))


def parity(options, num_layers, rows=ROWS) -> None:
    torch.manual_seed(1)
    model = Model(num_layers, **options)
    bmt.init_parameters(model)
    world, rank = bmt.world_size(), bmt.rank()
    x_all, wanted = torch.randn(world, rows, DIM), torch.randint(DIM, (world, rows))
    full = {name: param.gather().detach().requires_grad_() for name, param in model.named_parameters()}
    expected_x = x_all.clone().requires_grad_()
    losses = []
    for r in range(world):
        h = expected_x[r] @ full["embedding.weight"].t()
        for i in range(num_layers):
            y = torch.tanh(
                torch.nn.functional.linear(h, full[f"layers.{i}.weight"], full[f"layers.{i}.bias"])
            )
            h = h + y * 0.5
        logits = (h * full["head.scale"]) @ full["embedding.weight"].t()
        losses.append(torch.nn.functional.cross_entropy(logits, wanted[r]))
    torch.stack(losses).mean().backward()

    x = x_all[rank].clone().requires_grad_()
    loss = model(x, wanted[rank])
    bmt.optim.OptimManager().backward(loss)
    group = pipe_members(model)
    torch.testing.assert_close(loss.detach(), torch.stack([losses[r] for r in group]).mean().detach())
    for name, param in model.named_parameters():
        check(param.gather_grad(), full[name].grad)
    check(x.grad, expected_x.grad[rank])
    with torch.no_grad():
        assert torch.equal(model(x, wanted[rank]), loss.detach())
        if rows == ROWS:  # else outputs of the micro-batches are not divisible by the ranks
            out = model.layers(model.embedding(x), 0.5)
            assert out.shape == x.shape


def pipe_members(model) -> list[int]:
    own = torch.tensor([bmt.rank()])
    members = own.new_empty(model.layers.stages)
    model.layers._pipe.comm.all_gather(members, own, "test").wait()
    return members.tolist()


def check(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("world", "init", "num_layers"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_plain_torch(world, init, num_layers, options):
    run_ranks(world, parity, options, num_layers, init=init)


@pytest.mark.parametrize("rows", [3, 5])
def test_micro_batches_of_several_sizes_count_by_their_rows(rows):
    """Of 6 rows, or 10, in 4 micro-batches."""
    run_ranks(2, parity, OPTIONS[1], 4, rows, init={"pipe_size": 2, "num_micro_batches": 4})


def live_micros(options, layers_per_chunk) -> int:
    """The largest number of micro-batches (of each chunk) whose activations were alive in a pass."""
    stages, chunks = bmt.config["pipe_size"], options.get("chunks", 1)
    policy = bmt.BlockPolicy(level=2, recompute="off")
    model = Model(stages * chunks * layers_per_chunk, policy=policy, **options)
    LIVE.clear()
    peak = 0
    forward = Layer.forward

    def counting(self, x, scale):
        nonlocal peak
        out = forward(self, x, scale)
        peak = max(peak, sum(reference() is not None for reference in LIVE))
        return out

    Layer.forward = counting
    try:
        loss = model(torch.randn(ROWS, DIM), torch.randint(DIM, (ROWS,)))
    finally:
        Layer.forward = forward
    loss.backward()
    assert peak % layers_per_chunk == 0
    return peak // layers_per_chunk


@pytest.mark.parametrize(
    ("name", "chunks", "peak"),
    [
        ("gpipe", 1, lambda stages, stage, chunks: 10**6),
        ("1f1b", 1, lambda stages, stage, chunks: stages - stage),
        # Narayanan et al., 2021: forwards of the warm-up, as Megatron-LM makes them, and one more.
        (
            "interleaved",
            2,
            lambda stages, stage, chunks: 2 * (stages - stage - 1) + (chunks - 1) * stages + 1,
        ),
        (
            "interleaved",
            3,
            lambda stages, stage, chunks: 2 * (stages - stage - 1) + (chunks - 1) * stages + 1,
        ),
        ("zb1p", 1, lambda stages, stage, chunks: stages),
    ],
)
def test_peaks_are_those_of_the_papers(name, chunks, peak):
    for stages in (1, 2, 3, 4):
        for micros in (stages, 2 * stages, 5 * stages):
            found = [peak_micros(of_stage) for of_stage in actions_of(name, stages, micros, chunks)]
            assert found == [min(peak(stages, stage, chunks), micros * chunks) for stage in range(stages)]


def test_stages_that_would_wait_for_ever_are_found():
    forward, backward = Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)
    assert ends_of(((forward, backward), (forward, backward))) == [[1, 4], [2, 3]]
    with pytest.raises(ValueError, match="waits for what is never sent"):
        ends_of(((backward, forward), (forward, backward)))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("stages", "micros"), [(2, 8), (4, 8)])
def test_peak_of_activations_is_that_of_the_schedule(stages, micros, options):
    found = run_ranks(
        stages, live_micros, options, 2, init={"pipe_size": stages, "num_micro_batches": micros}
    )
    actions = actions_of(options["schedule"], stages, micros, options.get("chunks", 1))
    if options["schedule"] == "zb1p":  # its graphs go earlier; operands of products stay
        assert found == [min(stages - stage, micros) for stage in range(stages)]
        assert [peak_micros(of_stage) for of_stage in actions] == [stages] * stages
        return
    assert found == [peak_micros(of_stage) for of_stage in actions]
    if options["schedule"] == "1f1b":
        assert found == [stages - stage for stage in range(stages)]


class Spare(bmt.DistributedModule):
    """A head that reads a parameter which its loss does not depend on, and has one that it does not read."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale, self.read, self.left = (
            bmt.DistributedParameter(torch.ones(DIM, dtype=dtype)) for _ in range(3)
        )
        self.frozen = bmt.DistributedParameter(torch.ones(DIM, dtype=dtype)).requires_grad_(False)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        _ = self.read + 1
        return ((x - wanted) * self.scale * self.frozen).square().mean()


def decayed(dtype: torch.dtype) -> list[list[float]]:
    """Weights of the head after two steps with decay, the second with another loss scale."""
    layers = bmt.PipelineTransformerBlockList([bmt.Block(Layer(dtype), mode="PIPE") for _ in range(2)])
    head = Spare(dtype)
    bmt.init_parameters(layers)
    optimizer = torch.optim.AdamW([*layers.parameters(), *head.parameters()], lr=0.1, weight_decay=0.5)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for scale in (1, 8):
        loss = layers.loss(
            torch.ones(ROWS, DIM, dtype=dtype), 0.5, head=head, labels=torch.zeros(ROWS, DIM, dtype=dtype)
        )
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        manager.zero_grad(set_to_none=True)
        manager.backward(loss * scale)
        assert [p.grad is None for p in head.parameters()] == [False, True, True, True]
        manager.step()
    return [p.gather().tolist() for p in head.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_that_a_head_does_not_use_have_no_gradient(dtype: torch.dtype) -> None:
    for scale, *others in run_ranks(2, decayed, dtype, init={"pipe_size": 2, "num_micro_batches": 2}):
        assert max(scale) < 1
        assert others == [[1.0] * DIM] * 3


class Chooses(bmt.DistributedModule):
    """A head whose loss depends on a parameter for some labels only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.extra = (bmt.DistributedParameter(torch.ones(DIM)) for _ in range(2))

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return (x * self.scale * (self.extra if wanted.max() > 0 else 1)).square().mean()


def trained_by_one_pipeline() -> list[float]:
    """The gradient of a parameter that one of two pipelines uses alone."""
    layers = bmt.PipelineTransformerBlockList(
        [bmt.Block(Layer(torch.float32), mode="PIPE") for _ in range(2)]
    )
    head = Chooses()
    bmt.init_parameters(layers)
    labels = torch.full((ROWS, DIM), float(bmt.rank() == 3))
    layers.loss(torch.ones(ROWS, DIM), 0.5, head=head, labels=labels).backward()
    extra = dict(head.named_parameters())["extra"]
    assert extra.grad is not None
    return extra.grad.tolist()


def test_a_parameter_of_the_head_that_one_of_two_pipelines_uses() -> None:
    init = {"pipe_size": 2, "num_micro_batches": 2, "timeout": 20}
    assert any(any(found) for found in run_ranks(4, trained_by_one_pipeline, init=init))


def warnings_of_trainings() -> list[str]:
    """Warnings of ranks with one loss, and of equal samples: in a model outside of the pipeline, and in a call."""
    told = []
    for kind in ("loss", "loss of a frozen list", "outside", "call"):
        deprecate._seen.discard("OptimManager.same_samples")
        model = Model(2)
        bmt.init_parameters(model)
        model.layers.requires_grad_("frozen" not in kind)
        manager = bmt.optim.OptimManager()
        trained = model if kind in ("loss", "call") else model.embedding
        manager.add_optimizer(bmt.optim.AdamOptimizer(trained.parameters()))
        x, wanted = torch.ones(4, DIM) * (bmt.rank() if "loss" in kind else 1), torch.arange(4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                manager.zero_grad()
                if "loss" in kind:
                    loss = model(x, wanted) + 1
                else:
                    loss = (trained(x) if kind == "outside" else model.layers(x, 0.5)).square().mean()
                manager.backward(loss)
                manager.step()
        told += [str(warning.message).partition(":")[0] + kind for warning in caught]
    return told


def test_ranks_with_one_loss_are_not_told_that_their_samples_are_the_same():
    assert run_ranks(2, warnings_of_trainings, init={"pipe_size": 2}) == [
        ["OptimManageroutside", "OptimManagercall"],
        [],
    ]
