"""What one training step puts on the wire, and what it keeps in memory, counted and held to the formulas."""

from __future__ import annotations

import gc

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain._shards.sharding import slot_length
from bmtrain.global_var import context

LAYERS, DIM = 5, 16


class Linear(bmt.DistributedModule):
    def __init__(self, dim_in: int, dim_out: int) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(dim_out, dim_in) / dim_in**0.5)
        self.bias = bmt.DistributedParameter(torch.zeros(dim_out))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Linear(DIM, 3 * DIM), Linear(3 * DIM, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(bmt.DistributedModule):
    """Two parameters outside blocks, weight and bias of the head: small, so they travel together."""

    def __init__(self, **block_options) -> None:
        super().__init__()
        self.layers = bmt.TransformerBlockList([bmt.Block(Layer(), **block_options) for _ in range(LAYERS)])
        self.head = Linear(DIM, 3)

    def forward(self, x):
        return self.head(self.layers(x))


def traffic_of_step(step) -> dict[str, tuple[int, int]]:
    group = context().world
    group.comm.reset_traffic()
    group.reduce_comm.reset_traffic()
    step()
    return {**group.comm.traffic(), **group.reduce_comm.traffic()}


def steady_state_traffic(options: dict) -> dict:
    model = Model(**options)
    x = torch.randn(4, DIM)

    def step() -> None:
        model(x).sum().backward()

    for _ in range(3):  # the order of blocks is learnt in the first steps
        step()
    head = [param._spec.part(0)[1] for param in model.head.parameters()]
    partitions = [storage.shards.layout.partition for block in model.layers for storage in block._storages]
    return {"traffic": traffic_of_step(step), "partitions": partitions, "head": head}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("options", "gathers"),
    [
        ({}, 2 * LAYERS - 1),
        ({"use_checkpoint": False}, 2 * LAYERS - 1),
        ({"zero_level": 2}, LAYERS),
        ({"zero_level": 2, "use_checkpoint": False}, LAYERS),
    ],
    ids=["level3", "level3-kept-activations", "level2", "level2-kept-activations"],
)
def test_a_step_sends_what_the_formula_says(world, options, gathers):
    for outcome in run_ranks(world, steady_state_traffic, options):
        traffic, partitions, head = outcome["traffic"], outcome["partitions"], outcome["head"]
        assert len(set(partitions)) == 1
        block_bytes = 4 * (world - 1) * partitions[0]
        head_bytes = 4 * (world - 1) * slot_length(sum(head), 4)
        assert traffic["all_gather"] == (gathers + 1, gathers * block_bytes + head_bytes)
        assert traffic["all_to_all"] == (LAYERS, LAYERS * block_bytes)
        assert traffic["reduce_scatter"] == (1, head_bytes)


def evaluation_traffic() -> tuple[int, int]:
    model = Model()
    x = torch.randn(4, DIM)

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    evaluate()
    return traffic_of_step(evaluate)["all_gather"][0], current_engine(context()).pool.stats()[
        "buffers_in_use"
    ]


def test_evaluation_gathers_each_block_once_and_keeps_none():
    assert run_ranks(2, evaluation_traffic) == [(LAYERS + 1, 0)] * 2


def other_paths() -> list[int]:
    """Messages of steps that run other blocks, or in another order, than the step before."""
    model = Model()
    x = torch.randn(4, DIM)
    blocks = list(model.layers)
    counts = []
    for path in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 2, 4], [4, 3, 2, 1, 0], [1, 1, 1], [0, 1, 2, 3, 4]):

        def step(path=path) -> None:
            hidden = x
            for index in path:
                hidden = blocks[index](hidden)
            hidden.sum().backward()

        counts.append(traffic_of_step(step)["all_to_all"][0])
    pool = current_engine(context()).pool.stats()
    return [*counts, pool["buffers_in_use"]]


def test_a_model_that_takes_another_path_replans_and_leaves_nothing_gathered():
    for counts in run_ranks(4, other_paths):
        assert counts == [5, 5, 3, 5, 3, 5, 0]


def storage_bytes(tensors) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def held_between_steps(dtype: torch.dtype) -> dict[str, int]:
    gc.collect()  # what ran in these ranks before may have left buffers in cycles of garbage
    current_engine(context()).pool.reset_peaks()
    layers = [Layer().to(dtype) for _ in range(LAYERS)]
    model = bmt.TransformerBlockList(layers)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    x = torch.randn(4, DIM, dtype=dtype)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).float().sum().backward()
        optimizer.step()
    params = list(model.parameters())
    state = [t for p in params for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    pool = current_engine(context()).pool.stats()
    return {
        "numel": sum(p._original_shape.numel() for p in params),
        "parameters": storage_bytes(params),
        "gradients": storage_bytes([p.grad for p in params]),
        "state": storage_bytes(state),
        "in_use": pool["buffers_in_use"],
        "peak_buffers": pool["peak_buffers_in_use"],
    }


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "state_bytes"), [(torch.float32, 8), (torch.bfloat16, 12)], ids=["fp32", "bf16"]
)
def test_model_states_take_the_formula_divided_by_the_ranks(world, dtype, state_bytes):
    size = torch.empty((), dtype=dtype).element_size()
    for held in run_ranks(world, held_between_steps, dtype):
        share = held["numel"] / world
        slack = 4 * 512 * LAYERS / world  # four parameters a block, each aligned to 512 bytes
        skew = 64 * 1024  # ranges of optimizer state start apart from each other
        assert held["parameters"] <= 1.02 * size * share + slack
        assert held["gradients"] <= 1.02 * size * share + slack
        assert held["state"] <= 1.02 * state_bytes * share + state_bytes * slack / size + skew
        assert held["in_use"] == 0
        # Gathered: the block that runs and the one ahead. Gradients: one arriving, one (sent and received) on its way.
        assert held["peak_buffers"] <= 5


def gradients_come_and_go() -> None:
    """Dropped gradients leave no memory behind during the forward; what comes after them is what came before."""
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    model = bmt.TransformerBlockList(layers)
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.0)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    groups = [group for block in model for group in block._runtime.buffers]
    x = torch.randn(4, DIM)
    seen = []
    for _ in range(3):
        manager.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in model.parameters())
        loss = model(x).sum()
        assert all(group.gradient_shard is None for group in groups)
        manager.backward(loss)
        seen.append([group.gradient_shard.clone() for group in groups if group.gradient_shard is not None])
        of_parameters = sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None)
        # Gaps are zero.
        assert sum(float(flat.abs().sum()) for flat in seen[-1]) == pytest.approx(of_parameters)
    assert seen[0]
    for later in seen[1:]:
        assert all(torch.equal(one, other) for one, other in zip(seen[0], later, strict=True))
    kept = [p.grad for p in model.parameters()]
    manager.zero_grad()
    manager.backward(model(x).sum())
    # Filled, not dropped.
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_dropped_gradients_take_no_memory_in_the_forward(world: int) -> None:
    run_ranks(world, gradients_come_and_go)
