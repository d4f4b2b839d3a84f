"""The training loop of ddp_mp.py and ddp_torchrun.py: DistributedDataParallel of PyTorch.

Every rank has the whole model and a part of the data. In backward the ranks' gradients are averaged (all-reduce), so
that all make the same step and stay equal.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from task import DIM, LEARNING_RATE, log_line, make_dataset
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

__all__ = ["train"]


def train(options: argparse.Namespace, local_rank: int) -> None:
    """Train on this rank; the process group is there already."""
    rank = dist.get_rank()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)  # DDP takes rank 0's first parameters anyway
    model = DistributedDataParallel(torch.nn.Linear(DIM, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    sampler = DistributedSampler(make_dataset())
    loader = DataLoader(sampler.dataset, batch_size=options.batch_size, sampler=sampler)

    for epoch in range(options.max_epochs):
        sampler.set_epoch(epoch)  # or every epoch has the same order
        losses = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        log_line(rank, epoch, options.batch_size, losses)

    if rank == 0 and options.save:
        torch.save(model.module.state_dict(), options.save)
