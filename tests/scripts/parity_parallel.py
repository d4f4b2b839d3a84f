"""Tensor-parallel layers in a pipeline; with --wrong each rank's loss counts whole, not as its share of the group's."""

import sys

import torch

import bmtrain as bmt


class Layer(bmt.DistributedModule):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = bmt.nn.ColumnParallelLinear(dim, 4 * dim), bmt.nn.RowParallelLinear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


bmt.init_distributed(seed=1, pipe_size=1)
layers = bmt.PipelineTransformerBlockList([bmt.Block(Layer(8), mode="PIPE") for _ in range(4)])
bmt.init_parameters(layers)
optimizer = bmt.optim.SGDOptimizer(layers.parameters(), lr=0.1)
manager = bmt.optim.OptimManager()
manager.add_optimizer(optimizer)
config = bmt.config
for step in range(4):
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    own = rows.chunk(config["dp_size"])[config["dp_rank"]].chunk(config["tp_size"])[config["tp_rank"]]
    loss = (layers(own) - 1).square().mean()
    manager.zero_grad()
    manager.backward(loss if "--wrong" in sys.argv else loss / config["tp_size"])
    manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
    manager.step()
