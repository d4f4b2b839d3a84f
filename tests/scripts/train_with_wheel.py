"""Trains a small model on the ranks of a launcher, where there is no compiler; prints losses and the core it ran on."""

import shutil

import torch

import bmtrain as bmt

assert shutil.which("c++") is None and shutil.which("g++") is None
bmt.init_distributed(seed=0)
torch.manual_seed(bmt.rank())
model = bmt.BMTrainModelWrapper(
    torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
)
manager = bmt.optim.OptimManager()
manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2))
x = torch.randn(64, 16, device=bmt.config["device"])
for _ in range(20):
    manager.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    manager.backward(loss)
    manager.step()
    bmt.print_rank("loss", bmt.distributed.all_reduce(loss.detach(), "avg").item())
bmt.print_rank("core", bmt.build_info()["extension"])
