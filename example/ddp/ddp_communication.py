"""The collectives of torch.distributed, one function each.

torchrun --nproc-per-node=2 ddp_communication.py
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def show(name: str, value: object) -> None:
    sys.stdout.write(f"rank {dist.get_rank()} | {name}: {value}\n")  # one write: the ranks' lines stay whole
    sys.stdout.flush()


def own(device: torch.device) -> torch.Tensor:
    """The initial values of this rank: [1, 2] on rank 0, [3, 4] on rank 1, ..."""
    return torch.tensor([1.0, 2.0], device=device) + 2 * dist.get_rank()


def rows(device: torch.device) -> torch.Tensor:
    """A row for every rank: row r is [10 r, 10 r + 1], and 100 more on every next rank."""
    first = 10 * torch.arange(dist.get_world_size(), device=device)[:, None] + torch.arange(2, device=device)
    return first.float() + 100 * dist.get_rank()


def dist_scatter(device: torch.device) -> None:
    row = torch.empty(2, device=device)
    dist.scatter(row, list(rows(device)) if dist.get_rank() == 0 else None, src=0)
    show("scatter", row.tolist())


def dist_gather(device: torch.device) -> None:
    parts = [torch.empty(2, device=device) for _ in range(dist.get_world_size())]
    dist.gather(own(device), parts if dist.get_rank() == 0 else None, dst=0)
    show("gather", torch.stack(parts).tolist() if dist.get_rank() == 0 else [])


def dist_broadcast(device: torch.device) -> None:
    x = own(device)
    dist.broadcast(x, src=0)
    show("broadcast", x.tolist())


def dist_reduce(device: torch.device) -> None:
    x = own(device)
    dist.reduce(x, dst=0)
    show("reduce", x.tolist() if dist.get_rank() == 0 else [])  # elsewhere x is not defined


def dist_all_reduce(device: torch.device) -> None:
    x = own(device)
    dist.all_reduce(x)
    show("all_reduce", x.tolist())


def dist_all_gather(device: torch.device) -> None:
    parts = [torch.empty(2, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own(device))
    show("all_gather", torch.stack(parts).tolist())


def dist_reduce_scatter(device: torch.device) -> None:
    row = torch.empty(2, device=device)
    dist.reduce_scatter(row, list(rows(device)))
    show("reduce_scatter", row.tolist())


def main() -> None:
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dist_scatter(device)
    dist_gather(device)
    dist_broadcast(device)
    dist_reduce(device)
    dist_all_reduce(device)
    dist_all_gather(device)
    dist_reduce_scatter(device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
