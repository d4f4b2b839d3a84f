"""Train three Blocks for some steps; rank 0 writes the losses and what crossed the interface that it is told.

The file, named by the argument, has ``{"losses": [...], "sent": bytes, "backends": [...]}`` of each way of summing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import torch

import bmtrain as bmt

WARM_UP, STEPS, BLOCKS, DIM = 2, 4, 3, 256


class Layer(bmt.DistributedModule):
    """Adds a linear map of its input to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = bmt.nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(rows, DIM)`` to the same."""
        out: torch.Tensor = x + self.linear(x).tanh()
        return out


def sent_bytes() -> int:
    """What this host has sent to the other one; 0 if there is none."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text()) if interface else 0


def sent_bytes_of_all() -> int:
    """The same, while no rank of the host is ahead or behind."""
    bmt.synchronize()
    sent = sent_bytes()
    bmt.synchronize()
    return sent


def train(reduce: Literal["direct"] | None) -> dict[str, Any]:
    """Returns what is written of one training."""
    torch.manual_seed(1)
    policy = bmt.BlockPolicy(reduce=reduce)
    model = bmt.TransformerBlockList([bmt.Block(Layer(), policy=policy) for _ in range(BLOCKS)])
    bmt.init_parameters(model)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3))
    random = torch.Generator().manual_seed(bmt.rank())
    losses, before = [], 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            before = sent_bytes_of_all()
        manager.zero_grad()
        loss = model(torch.randn(8, DIM, generator=random)).square().mean()
        manager.backward(loss)
        manager.step()
        losses.append(float(loss.detach()).hex())
    sent = sent_bytes_of_all() - before
    backends = [bmt.config[name].backend for name in ("comm", "tp_comm")]
    return {"losses": bmt.store.allgather_objects(losses), "sent": sent, "backends": backends}


if __name__ == "__main__":
    bmt.init_distributed(seed=1, tp_size=2)
    found = {"direct": train("direct"), "by hosts": train(None)}
    if bmt.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
