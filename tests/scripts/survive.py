"""Train with survive=1, and print the number of ranks and of steps at the end, and a digest of everything trained.

survive.py 12               12 steps
survive.py grow             ranks 1 and 3 of 4 die, two sharing a Block; train until four are there, and three steps
survive.py hosts HOST DIR   on a host of this name, until ranks are lost, and three steps more; files in DIR tell
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch

import bmtrain as bmt

#: Step at which a rank dies.
DEATHS = {"1": 3, "3": 6}


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.dropout(self.up(x), 0.1, self.training)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = torch.nn.Embedding(16, 12), torch.nn.ModuleList([Layer(), Layer()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def await_all(folder: Path) -> None:
    """Importing torch takes some ranks longer than others, and counts for the time-out of their meeting."""
    (folder / f"{os.environ['RANK']}.ready").touch()
    while len(list(folder.glob("*.ready"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)


def main() -> None:
    """Needs the launcher's variables; for hosts, a name space of its own for the host's name."""
    way, folder = sys.argv[1], Path(sys.argv[-1])
    if way == "hosts":
        socket.sethostname(sys.argv[2])
        await_all(folder)
    bmt.init_distributed(seed=1, virtual_shards=8, survive=1, timeout=6 if way == "hosts" else 60)
    torch.manual_seed(4)
    with bmt.default_policy(bmt.BlockPolicy(zero_size=2 if way == "grow" else None)):
        model = bmt.BMTrainModelWrapper(Model())
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    schedule = bmt.lr_scheduler.Linear(optimizer, start_lr=1e-2, warmup_iter=2, end_iter=5000)
    manager.add_optimizer(optimizer, schedule)
    batches = bmt.batches(torch.randint(16, (64, 6)), 2, seed=1)
    seen: list[int] = []
    bmt.survive.register("seen", seen.copy, lambda was: seen.__setitem__(slice(None), was))
    stop, ranks = int(way) if way.isdecimal() else 0, bmt.world_size()
    for step in bmt.survive.steps(1_000_000):
        if step == 5:  # which a process that joins later does not see
            model.layers[0].requires_grad_(False)
        manager.zero_grad()
        for shard in bmt.virtual_shards(step):
            if step not in seen:
                seen.append(step)
            manager.backward(model(shard.of(batches[step])))
            if way == "grow" and "BMTRAIN_JOIN" not in os.environ and DEATHS.get(os.environ["RANK"]) == step:
                os.kill(os.getpid(), signal.SIGKILL)
        manager.clip_grad_norm(optimizer.param_groups, 0.5)
        manager.step()
        if way == "hosts" and step == 3:
            (folder / f"{os.environ['RANK']}.trains").touch()
        if way == "grow" and step > 8:
            time.sleep(0.05)  # new processes need the processors
        if not stop and (step > 8 and bmt.world_size() == 4 if way == "grow" else bmt.world_size() < ranks):
            stop = step + 4
        if step + 1 == stop:
            break
    assert seen == list(range(stop))
    values = dict(model.state_dict())
    for index, entry in optimizer.state_dict(gather=True)["state"].items():
        values.update({f"{index}.{name}": torch.as_tensor(value) for name, value in entry.items()})
    data = b"".join(value.contiguous().numpy().tobytes() for _, value in sorted(values.items()))
    rest = optimizer.param_groups[0]["lr"], torch.rand(1).item()
    print("end", bmt.world_size(), stop, hashlib.sha256(data).hexdigest(), *rest, flush=True)


if __name__ == "__main__":
    main()
