"""Pipeline, tensor parallelism and sharding together, against one process in plain torch."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.global_var import context

DIM, FF, VOCAB, ROWS, LAYERS, STEPS = 8, 16, 12, 4, 3, 4


class Layer(bmt.DistributedModule):
    """A residual MLP over slices of tokens: rows of all tensor-parallel ranks, columns of one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = bmt.DistributedParameter(
            torch.empty(DIM), init_method=bmt.ParameterInitializer(torch.nn.init.ones_)
        )
        self.up = bmt.nn.ColumnParallelLinear(DIM, FF)
        self.down = bmt.nn.RowParallelLinear(FF, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x * self.scale)))


class PlainLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(DIM))
        self.up = torch.nn.Linear(DIM, FF)
        self.down = torch.nn.Linear(FF, DIM)

    forward = Layer.forward


class Model(bmt.DistributedModule):
    def __init__(self, pipeline: bool) -> None:
        super().__init__()
        layers = bmt.PipelineTransformerBlockList if pipeline else bmt.TransformerBlockList
        self.layers = layers([Layer() for _ in range(LAYERS)])
        self.head = bmt.nn.Linear(DIM, VOCAB)

    def forward(self, x):
        return self.head(self.layers(x))


class PlainModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*[PlainLayer() for _ in range(LAYERS)])
        self.head = torch.nn.Linear(DIM, VOCAB)

    forward = Model.forward


def train(pipeline: bool) -> None:
    """Each tensor-parallel group has a batch of rows; a rank of it works on its slice of them."""
    model = Model(pipeline)
    bmt.init_parameters(model)
    plain = PlainModel()
    plain.load_state_dict(model.state_dict())
    twin = PlainModel()  # the same, with its batch cut as the ranks cut it: what rounding alone may do
    twin.load_state_dict(plain.state_dict())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    references = [(m, torch.optim.Adam(m.parameters(), lr=1e-2)) for m in (plain, twin)]
    tp, data = context().groups["tp"], context().groups["tp_zero"]
    for step in range(STEPS):
        torch.manual_seed(step)
        batch = torch.randn(data.size, ROWS, DIM)
        target = torch.randint(0, VOCAB, (data.size, ROWS))
        mine = batch[data.rank].chunk(tp.size)[tp.rank]
        mine_target = target[data.rank].chunk(tp.size)[tp.rank]
        # The tp ranks' slices make one loss together: each adds its share of the mean.
        loss = torch.nn.functional.cross_entropy(model(mine), mine_target, reduction="sum") / ROWS
        manager.zero_grad()
        manager.backward(loss)
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=0.5)
        manager.step()
        losses = []
        for (reference, reference_optimizer), parts in zip(references, (1, data.size), strict=True):
            reference_optimizer.zero_grad()
            total = 0.0
            for x, y in zip(batch.flatten(0, 1).chunk(parts), target.flatten().chunk(parts), strict=True):
                part = torch.nn.functional.cross_entropy(reference(x), y) / parts
                part.backward()
                total += float(part)
            expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            reference_optimizer.step()
            losses.append((total, float(expected_norm)))
        total = bmt.distributed.all_reduce(loss.detach(), "sum") / data.size
        assert float(total) == pytest.approx(losses[0][0], rel=1e-6)
        assert float(norm) == pytest.approx(losses[0][1], rel=1e-5)
    for name, value in model.state_dict().items():
        expected, other = plain.state_dict()[name], twin.state_dict()[name]
        allowed = max(2 * float((expected - other).abs().max()), 1e-5)
        assert float((value - expected).abs().max()) <= allowed, name
    gathered = manager.state_dict(gather_opt=True)["optimizers"][0]
    assert gathered["is_whole"]
    for index, (param, state) in enumerate(references[0][1].state.items()):
        whole = gathered["state"][index]
        assert whole["step"] == STEPS
        for name in ("exp_avg", "exp_avg_sq"):
            difference = (whole[name].view(param.shape) - state[name]).abs().max()
            assert float(difference) <= 1e-5 * float(state[name].abs().max())


FACTORS = [
    (world, pipe, tp)
    for world in (1, 2, 4, 8)
    for pipe in (0, 1, 2, 4)
    for tp in (1, 2, 4)
    if world % (max(pipe, 1) * tp) == 0 and (pipe != 1 or world <= 2)
]


@pytest.mark.parametrize(
    ("world", "pipe", "tp"),
    [pytest.param(*factor, marks=pytest.mark.slow if factor[0] == 8 else ()) for factor in FACTORS],
)
def test_every_factorisation_trains_like_one_process(world, pipe, tp):
    init = {"tp_size": tp, **({"pipe_size": pipe} if pipe else {})}
    run_ranks(world, train, pipe > 0, init=init)
