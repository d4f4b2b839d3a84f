"""ddp_communication.py on bmtrain: every call returns a new tensor, through which gradients flow.

torchrun --nproc-per-node=2 bmt_communication.py
"""

from __future__ import annotations

import sys

import torch

import bmtrain as bmt


def show(name: str, value: object) -> None:
    sys.stdout.write(f"rank {bmt.rank()} | {name}: {value}\n")  # one write: the ranks' lines stay whole
    sys.stdout.flush()


def main() -> None:
    bmt.init_distributed()
    rank, world_size, device = bmt.rank(), bmt.world_size(), bmt.config["device"]
    own = torch.tensor([1.0, 2.0], device=device) + 2 * rank  # [1, 2] on rank 0, [3, 4] on rank 1, ...
    rows = 10 * torch.arange(world_size, device=device)[:, None] + torch.arange(2, device=device)
    rows = rows.float() + 100 * rank  # a row for every rank

    show("scatter", bmt.distributed.scatter(rows, root=0).tolist())
    show("gather", bmt.distributed.gather(own, root=0).tolist())  # [] on other ranks than the root
    show("broadcast", bmt.distributed.broadcast(own, root=0).tolist())
    show("reduce", bmt.distributed.reduce(own, root=0).tolist())
    show("all_reduce", bmt.distributed.all_reduce(own).tolist())
    show("all_gather", bmt.distributed.all_gather(own).tolist())
    show("reduce_scatter", bmt.distributed.reduce_scatter(rows)[0].tolist())


if __name__ == "__main__":
    main()
