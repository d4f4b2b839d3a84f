"""A training script for bmtrain 1.0.1: policies for each block, states of all layers, a data shard by tp rank."""

import json
import sys

import torch
import torch.nn.functional as F

import bmtrain as bmt


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
            [
                bmt.Block(Layer(dim), zero_level=2 + i % 2, use_checkpoint=i % 2 == 0)
                for i in range(num_layers)
            ]
        )
        self.head = Linear(dim, vocab)

    def forward(self, ids, mask):
        hidden, states = self.layers(self.embedding(ids), mask, return_hidden_states=True)
        assert states.shape == (len(self.layers), *hidden.shape)
        return self.head(hidden)


def main():
    bmt.init_distributed(init_method="env://", seed=23, tp_size=1)
    model = Model(29, 16, 3)
    bmt.init_parameters(model)
    bmt.synchronize()

    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100, parallel=False)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1, betas=(0.9, 0.999), weight_decay=1e-2)
    scheduler = bmt.lr_scheduler.NoDecay(optimizer, 1e-2, 4, -1, 0)
    optim_manager = bmt.optim.OptimManager(loss_scale=2**10, loss_scale_steps=1000, min_loss_scale=1)
    optim_manager.add_optimizer(optimizer, scheduler)
    average = bmt.utils.AverageRecorder()

    torch.manual_seed(0)
    shard, num_shards = bmt.config["tp_zero_rank"], bmt.config["tp_zero_size"]
    losses = []
    for iteration in range(8):
        batch = torch.randint(29, (4 * num_shards, 9))  # all ranks draw the same
        ids = batch[4 * shard : 4 * shard + 4]
        mask = torch.ones(8, 8).tril()
        optim_manager.zero_grad()
        for _ in range(2):
            logits = model(ids[:, :-1], mask)
            loss = loss_func(logits.reshape(-1, 29), ids[:, 1:].reshape(-1))
            optim_manager.backward(loss)
        global_loss = bmt.distributed.all_reduce(loss, "avg").item()
        grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, 1.0, norm_type=2)
        optim_manager.step()
        average.record(global_loss)
        bmt.print_rank(f"{iteration}: {global_loss:.4f} {average.value:.4f} {grad_norm.item():.4f}")
        losses.append(global_loss)
    assert bmt.store.allgather_objects(losses[-1]) == [losses[-1]] * bmt.world_size()
    bmt.print_rank("losses", json.dumps(losses))
    if len(sys.argv) > 1:
        bmt.save(model, sys.argv[1])


if __name__ == "__main__":
    main()
