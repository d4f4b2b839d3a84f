"""ddp_torchrun.py on bmtrain: ranks started by torchrun.

torchrun --nproc-per-node=4 bmt_torchrun.py --max_epoch=2 --batch_size=32
python -m torch.distributed.launch --use-env --nproc-per-node=4 bmt_torchrun.py --max_epoch=2 --batch_size=32
"""

from __future__ import annotations

from bmt_trainer import train
from task import device_kind, parse_options

import bmtrain as bmt


def main() -> None:
    options = parse_options()
    bmt.init_distributed()
    bmt.print_rank(f"{device_kind()}_Count: {bmt.world_size()}", flush=True)
    bmt.synchronize()
    train(options)


if __name__ == "__main__":
    main()
