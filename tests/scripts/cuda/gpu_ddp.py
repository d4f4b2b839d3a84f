"""A script for GPUs with DistributedDataParallel over nccl, one rank."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

local_rank = int(os.environ.get("LOCAL_RANK", "0"))
torch.cuda.set_device(local_rank)
assert torch.cuda.current_device() == local_rank < torch.cuda.device_count()
with tempfile.TemporaryDirectory() as folder:
    device_id = torch.device("cuda", local_rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1, device_id=device_id
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 2).to(local_rank), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 8).cuda(local_rank)
        with torch.cuda.device(local_rank), torch.cuda.nvtx.range("step"):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        print(f"loss {total.item():.9f}")
    dist.destroy_process_group()
