"""A small GPT trained for twenty steps, as a user would write it; prints the losses: gpu_script.py [DTYPE [FRACTION]].

With a FRACTION, of blocks whose state stays on the device, the state is offloaded.
The same on CPU and GPU ranks: weights are drawn on the host, and there is no dropout.
"""

from __future__ import annotations

import json
import sys

import torch

import bmtrain as bmt
from bmtrain._tools.gpt import GPT

STEPS = 20


def main(dtype: torch.dtype, fraction: float | None) -> None:
    bmt.init_distributed(seed=0)
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = GPT(num_layers=3, dim=64, num_heads=4, vocab=256, seq=32).to(dtype)
    layers = [bmt.Block(bmt.wrapper.model_wrapper_dispatch(layer)) for layer in plain.layers]
    plain.layers = torch.nn.ModuleList(layers)
    model = bmt.BMTrainModelWrapper(plain)
    options = {"lr": 1e-3, "weight_decay": 0.01}
    optimizer: torch.optim.Optimizer
    if fraction is None:
        optimizer = bmt.optim.AdamOptimizer(model.parameters(), **options)
    else:
        optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), fraction=fraction, **options)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    generator = torch.Generator().manual_seed(7)
    batch = torch.randint(256, (8, 33), generator=generator).chunk(bmt.world_size())[bmt.rank()]
    batch = batch.to(bmt.config["device"])
    losses = []
    for _ in range(STEPS):
        manager.zero_grad()
        loss = model(batch)
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        losses.append(bmt.distributed.all_reduce(loss.detach(), "avg").item())
    bmt.print_rank(json.dumps(losses))


if __name__ == "__main__":
    main(
        getattr(torch, sys.argv[1] if len(sys.argv) > 1 else "float32"),
        float(sys.argv[2]) if len(sys.argv) > 2 else None,
    )
