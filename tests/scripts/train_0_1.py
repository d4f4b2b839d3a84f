"""A training script for bmtrain 0.1.x: the optimizer owns the loss scale."""

import json
import sys

import torch
import torch.nn.functional as F

import bmtrain as bmt
from bmtrain import lr_scheduler
from bmtrain.block_layer import CheckpointBlock


def init(std):
    return bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=std)


class Linear(bmt.DistributedModule):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(dim_out, dim_in), init_method=init(dim_in**-0.5))
        self.bias = bmt.DistributedParameter(
            torch.empty(dim_out), init_method=bmt.ParameterInitializer(torch.nn.init.zeros_)
        )

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Embedding(bmt.DistributedModule):
    def __init__(self, vocab, dim):
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.empty(vocab, dim), init_method=init(1.0))

    def forward(self, ids):
        return F.embedding(ids, self.weight)


class Layer(bmt.DistributedModule):
    def __init__(self, dim):
        super().__init__()
        self.mix = Linear(dim, dim)
        self.up = Linear(dim, 4 * dim)
        self.down = Linear(4 * dim, dim)

    def forward(self, hidden, mask):
        scores = hidden @ self.mix(hidden).transpose(1, 2) / hidden.shape[-1] ** 0.5
        hidden = hidden + torch.softmax(scores.masked_fill(mask == 0, float("-inf")), dim=-1) @ hidden
        return hidden + self.down(F.gelu(self.up(hidden)))


class Model(bmt.DistributedModule):
    def __init__(self, vocab, dim, num_layers):
        super().__init__()
        self.embedding = Embedding(vocab, dim)
        self.layers = bmt.TransformerBlockList(
            [CheckpointBlock(Layer(dim)) for _ in range(num_layers)], sqrt=True
        )
        self.head = Linear(dim, vocab)

    def forward(self, ids, mask):
        hidden = self.layers(self.embedding(ids), mask)
        return bmt.checkpoint(self.head)(hidden)


class Warmup(lr_scheduler.WarmupLRSchduler):
    def get_lr_warmpup(self, num_iter):
        return self.start_lr * num_iter / self.warmup_iter

    def get_lr_decay(self, num_iter):
        return self.start_lr


def main():
    bmt.init_distributed(23, loss_scale_factor=2, loss_scale_steps=1000)
    model = Model(29, 16, 3)
    bmt.init_parameters(model)
    bmt.print_rank("parameters:", sum(p.numel() for p in model.parameters()))
    bmt.synchronize()

    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100, inplace=False)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3, weight_decay=1e-2, scale=2**10)
    scheduler = Warmup(optimizer, start_lr=1e-2, warmup_iter=4, end_iter=-1, num_iter=0)

    torch.manual_seed(0)
    losses = []
    for iteration in range(8):
        batch = torch.randint(29, (4 * bmt.world_size(), 9))  # all ranks draw the same
        ids = batch[4 * bmt.rank() : 4 * bmt.rank() + 4]
        mask = torch.ones(8, 8).tril()
        optimizer.zero_grad()
        for _ in range(2):
            logits = model(ids[:, :-1], mask)
            loss = loss_func(logits.reshape(-1, 29), ids[:, 1:].reshape(-1))
            loss = optimizer.loss_scale(loss)
            loss.backward()
        global_loss = bmt.sum_loss(loss).item() / optimizer.scale * bmt.world_size()
        grad_norm = bmt.optim.clip_grad_norm(optimizer.param_groups, 1.0, scale=optimizer.scale, norm_type=2)
        bmt.optim_step(optimizer, scheduler)
        bmt.print_rank(f"{iteration}: {global_loss:.4f} {grad_norm.item():.4f} {scheduler.current_lr:.5f}")
        losses.append(global_loss)
    state = bmt.gather_result(torch.tensor([losses[-1]]))
    assert torch.equal(state, torch.tensor([losses[-1]] * bmt.world_size()))
    bmt.wait_loader()
    bmt.print_rank("losses", json.dumps(losses))
    if len(sys.argv) > 1:
        bmt.save(model, sys.argv[1])


if __name__ == "__main__":
    main()
