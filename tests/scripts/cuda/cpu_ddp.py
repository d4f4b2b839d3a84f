"""gpu_ddp.py as one writes it for the CPU."""

import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        print(f"loss {total.item():.9f}")
    dist.destroy_process_group()
