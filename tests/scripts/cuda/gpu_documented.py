"""A script for GPUs in the documented style: .cuda(), streams, memory statistics, fp16 with a loss scale."""

import torch

import bmtrain as bmt

assert torch.cuda.is_available()


class Layer(bmt.DistributedModule):
    def __init__(self, dim):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(dim, dim, device="cuda").normal_(0, 1 / dim))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


class Model(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.table = bmt.DistributedParameter(torch.randn(64, 16).cuda() / 8)
        self.layers = bmt.TransformerBlockList([bmt.CheckpointBlock(Layer(16)) for _ in range(2)])

    def forward(self, ids):
        x = self.layers(self.table[ids])
        return x @ self.table.T


bmt.init_distributed(seed=0, backend="nccl")
model = Model()
optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
optim_manager = bmt.optim.OptimManager(loss_scale=2**10)
optim_manager.add_optimizer(optimizer)
loss_func = torch.nn.CrossEntropyLoss().cuda()
ids = torch.randint(64, (8, 16)).cuda().chunk(bmt.world_size())[bmt.rank()]
side = torch.cuda.Stream()

torch.cuda.reset_peak_memory_stats()
for _ in range(5):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.current_stream())
        batch = ids.to("cuda", non_blocking=True)
        batch.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    optim_manager.zero_grad()
    logits = model(batch)
    loss = loss_func(logits.float().view(-1, 64), batch.roll(1, 1).view(-1))
    global_loss = bmt.sum_loss(loss).item()
    optim_manager.backward(loss)
    optim_manager.step()
    end.record()
    torch.cuda.synchronize()
    bmt.print_rank(f"loss {global_loss:.9f}")
    assert start.elapsed_time(end) >= 0
assert torch.cuda.max_memory_allocated() > 0 and torch.cuda.memory_allocated() > 0
bmt.print_rank(torch.cuda.memory_summary())
