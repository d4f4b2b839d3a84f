"""ddp_communication_intro.py on bmtrain: send, recv and all_reduce between two ranks.

torchrun --nproc-per-node=2 bmt_communication_intro.py
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
    rank, device = bmt.rank(), bmt.config["device"]

    x = torch.zeros(2, device=device)
    if rank == 0:
        x += 1
        bmt.distributed.send(x, dst=1)  # shape and dtype travel with it
    elif rank == 1:
        x = bmt.distributed.recv(src=0)  # a new tensor
    show("send/recv", x.tolist())

    x = torch.tensor([1.0, 2.0], device=device) * (rank + 1)
    total = bmt.distributed.all_reduce(x, op="sum")  # a new tensor, through which gradients flow
    show("all_reduce", total.tolist())


if __name__ == "__main__":
    main()
