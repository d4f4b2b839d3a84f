"""Training whose loss is the mean over all tokens, or with --wrong over the tokens of each rank."""

import sys

import torch
import torch.nn.functional as F

import bmtrain as bmt


class Layer(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(dim), torch.nn.Linear(dim, 3 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList([Layer(16), Layer(16)])
        self.head = torch.nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


bmt.init_distributed(seed=1)
model = bmt.BMTrainModelWrapper(Model())
optimizer = bmt.optim.SGDOptimizer(model.named_parameters(), lr=0.1)
manager = bmt.optim.OptimManager()
manager.add_optimizer(optimizer)
texts = [torch.randint(50, (13,), generator=torch.Generator().manual_seed(i)) for i in range(8)]
for ids in bmt.data.loader(texts, batch_size=4 // bmt.config["dp_size"], shuffle=False):
    part = bmt.shard_sequence({"input_ids": ids, "labels": ids})
    targets = part["shift_labels"].flatten()
    losses = F.cross_entropy(model(part["input_ids"]).flatten(0, 1), targets, reduction="none")
    counted = targets != -100
    loss = (
        losses.sum() / counted.sum() if "--wrong" in sys.argv else bmt.nn.sequence.token_mean(losses, counted)
    )
    manager.zero_grad()
    manager.backward(loss)
    manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
    manager.step()
