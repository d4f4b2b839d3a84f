"""DDP with ranks started by torch.multiprocessing.

    python ddp_mp.py --max_epochs=2 --batch_size=32

One rank on each GPU, or 4 CPU ranks where there are none.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ddp_trainer import train
from task import device_kind, parse_options


def main(rank: int, world_size: int, options: argparse.Namespace) -> None:
    # With spawn nobody tells a process who it is: rank and size are arguments.
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12345")
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    train(options, local_rank=rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    options = parse_options()
    world_size = torch.cuda.device_count() or options.num_ranks
    print(f"{device_kind()}_Count: {world_size}", flush=True)
    mp.spawn(main, args=(world_size, options), nprocs=world_size)
