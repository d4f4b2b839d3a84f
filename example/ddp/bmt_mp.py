"""ddp_mp.py on bmtrain: ranks started by torch.multiprocessing.

python bmt_mp.py --max_epochs=2 --batch_size=32
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.multiprocessing as mp
from bmt_trainer import train
from task import device_kind, parse_options

import bmtrain as bmt


def main(rank: int, world_size: int, options: argparse.Namespace) -> None:
    # What torchrun would have put into the environment.
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12345")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    bmt.init_distributed()
    train(options)


if __name__ == "__main__":
    options = parse_options()
    world_size = torch.cuda.device_count() or options.num_ranks
    print(f"{device_kind()}_Count: {world_size}", flush=True)
    mp.spawn(main, args=(world_size, options), nprocs=world_size)
