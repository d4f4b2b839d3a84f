"""gpu_documented.py as one writes it for the CPU."""

import torch

import bmtrain as bmt


class Layer(bmt.DistributedModule):
    def __init__(self, dim):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(dim, dim).normal_(0, 1 / dim))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight)


class Model(bmt.DistributedModule):
    def __init__(self):
        super().__init__()
        self.table = bmt.DistributedParameter(torch.randn(64, 16) / 8)
        self.layers = bmt.TransformerBlockList([bmt.CheckpointBlock(Layer(16)) for _ in range(2)])

    def forward(self, ids):
        x = self.layers(self.table[ids])
        return x @ self.table.T


bmt.init_distributed(seed=0)
model = Model()
optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
optim_manager = bmt.optim.OptimManager(loss_scale=2**10)
optim_manager.add_optimizer(optimizer)
loss_func = torch.nn.CrossEntropyLoss()
ids = torch.randint(64, (8, 16)).chunk(bmt.world_size())[bmt.rank()]

for _ in range(5):
    optim_manager.zero_grad()
    logits = model(ids)
    loss = loss_func(logits.float().view(-1, 64), ids.roll(1, 1).view(-1))
    global_loss = bmt.sum_loss(loss).item()
    optim_manager.backward(loss)
    optim_manager.step()
    bmt.print_rank(f"loss {global_loss:.9f}")
