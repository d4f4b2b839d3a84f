"""Train until an exchange fails; write how it failed, and when, to FOLDER/rank.

unshare --uts python cut_link.py HOST FOLDER TIMEOUT
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch

import bmtrain as bmt
from bmtrain.errors import CommunicationError


def await_all(folder: Path) -> None:
    """Importing torch takes some ranks longer than others, and counts for the time-out of their meeting."""
    (folder / f"{os.environ['RANK']}.ready").touch()
    while len(list(folder.glob("*.ready"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.05)


def main() -> None:
    """Needs the launcher's variables, and a name space of its own for the host's name."""
    socket.sethostname(sys.argv[1])  # by its name and the machine's boot a host is told from others
    folder, timeout = Path(sys.argv[2]), float(sys.argv[3])
    await_all(folder)
    bmt.init_distributed(timeout=timeout)
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    manager = bmt.optim.OptimManager(loss_scale=16.0)
    manager.add_optimizer(optimizer)
    note = folder / str(bmt.rank())
    try:
        for step in range(1_000_000):
            manager.zero_grad()
            manager.backward(model(torch.ones(2, 64)).square().mean())
            manager.step()
            if step == 20:
                (folder / f"{bmt.rank()}.trains").touch()
    except CommunicationError as error:
        partial = note.with_suffix(".partial")
        partial.write_text(json.dumps({"message": str(error), "time": time.monotonic()}))
        partial.rename(note)
        raise


if __name__ == "__main__":
    main()
