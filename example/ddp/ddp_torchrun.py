"""DDP with ranks started by torchrun.

    torchrun --nproc-per-node=4 ddp_torchrun.py --max_epoch=2 --batch_size=32
    python -m torch.distributed.launch --use-env --nproc-per-node=4 ddp_torchrun.py --max_epoch=2 --batch_size=32

Both launchers put RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT into the environment.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from ddp_trainer import train
from task import device_kind, parse_options


def main() -> None:
    options = parse_options()
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_rank() == 0:
        print(f"{device_kind()}_Count: {dist.get_world_size()}", flush=True)
    dist.barrier()
    train(options, local_rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
