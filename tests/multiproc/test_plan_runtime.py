"""What the planner predicts is what the runtime counts: messages, bytes on the wire, bytes of memory."""

from __future__ import annotations

import gc

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.benchmark._gpt import GPT
from bmtrain.global_var import context
from bmtrain.plan import MACHINES, TrainingPolicy, describe_module, estimate
from bmtrain.wrapper import BMTrainModelWrapper, model_wrapper_dispatch

LAYERS, DIM = 5, 64


def storage_bytes(tensors) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def predicted_and_counted(level: int, recompute: bool, dtype: torch.dtype) -> dict:
    gc.collect()
    model = GPT(LAYERS, DIM, 4, 101, 32).to(dtype)
    model.layers = torch.nn.ModuleList(
        [
            bmt.Block(model_wrapper_dispatch(layer), use_checkpoint=recompute, zero_level=level)
            for layer in model.layers
        ]
    )
    model = BMTrainModelWrapper(model)
    batch = torch.randint(0, 101, (2, 33))
    described = describe_module(model, batch)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    group, pool = context().groups["zero"], context().engine.pool
    for _ in range(4):
        optimizer.zero_grad()
        group.comm.reset_traffic()
        group.reduce_comm.reset_traffic()
        pool.reset_peaks()
        model(batch).backward()
        optimizer.step()
    params = list(model.parameters())
    machine = MACHINES["a100-80gb"].with_devices(bmt.world_size())
    plan = estimate(described, machine, TrainingPolicy(micro_batch=2, level=level, recompute=recompute))
    state = [t for p in params for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    return {
        "predicted": plan.traffic,
        "counted": {**group.comm.traffic(), **group.reduce_comm.traffic()},
        "predicted pool": plan.memory.pool_peak,
        "counted pool": pool.stats()["peak_bytes_in_use"],
        "predicted states": bmt.plan.model_state_bytes(described, bmt.world_size()),
        "counted states": {
            "weights": storage_bytes(params),
            "gradients": storage_bytes([p.grad for p in params]),
            "optimizer": storage_bytes(state),
        },
    }


@pytest.mark.parametrize(
    ("world", "level", "recompute", "dtype"),
    [
        (2, 2, True, torch.float32),
        (2, 3, False, torch.bfloat16),
        (4, 2, False, torch.float32),
        (4, 3, True, torch.float32),
        (4, 3, True, torch.bfloat16),
        (4, 3, False, torch.float32),
    ],
)
def test_prediction_is_what_is_counted(world, level, recompute, dtype) -> None:
    for found in run_ranks(world, predicted_and_counted, level, recompute, dtype):
        assert found["counted"] == found["predicted"]
        assert found["counted pool"] == found["predicted pool"]
        for name, counted in found["counted states"].items():
            predicted = found["predicted states"][name]
            assert counted <= predicted <= 1.05 * counted + 200_000, name
