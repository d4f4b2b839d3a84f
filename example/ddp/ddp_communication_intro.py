"""send, recv and all_reduce of torch.distributed between two ranks.

torchrun --nproc-per-node=2 ddp_communication_intro.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def show(name: str, value: object) -> None:
    sys.stdout.write(f"rank {dist.get_rank()} | {name}: {value}\n")  # one write: the ranks' lines stay whole
    sys.stdout.flush()


def main() -> None:
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()

    x = torch.zeros(2, device=device)
    if rank == 0:
        x += 1
        dist.send(x, dst=1)  # waits until rank 1 takes it
    elif rank == 1:
        dist.recv(x, src=0)  # written into x
    show("send/recv", x.tolist())

    x = torch.tensor([1.0, 2.0], device=device) * (rank + 1)
    dist.all_reduce(x, op=dist.ReduceOp.SUM)  # in place
    show("all_reduce", x.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
