"""The training loop of bmt_mp.py and bmt_torchrun.py: ddp_trainer.py on bmtrain.

Every rank has a shard of the model and a part of the data. Changed lines are marked.
"""

from __future__ import annotations

import argparse

import torch
from task import DIM, LEARNING_RATE, log_line, make_dataset
from torch.utils.data import DataLoader, DistributedSampler

import bmtrain as bmt

__all__ = ["train"]


def train(options: argparse.Namespace) -> None:
    """Train on this rank; `init_distributed` was called already."""
    rank, device = bmt.rank(), bmt.config["device"]  # changed
    torch.manual_seed(0)
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(DIM, 1))  # changed: its parameters become shards
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    optim_manager = bmt.optim.OptimManager()  # changed
    optim_manager.add_optimizer(optimizer)
    sampler = DistributedSampler(make_dataset())
    loader = DataLoader(sampler.dataset, batch_size=options.batch_size, sampler=sampler)

    for epoch in range(options.max_epochs):
        sampler.set_epoch(epoch)
        losses = []
        for inputs, targets in loader:
            optim_manager.zero_grad()  # changed, as the next two
            loss = torch.nn.functional.mse_loss(model(inputs.to(device)), targets.to(device))
            optim_manager.backward(loss)  # gradients of the mean of all ranks' losses
            optim_manager.step()
            losses.append(loss.detach())
        log_line(rank, epoch, options.batch_size, losses)

    if options.save:
        bmt.save(model, options.save)  # changed: all ranks give their shards, rank 0 writes
