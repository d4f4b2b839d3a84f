"""A training script for bmtrain 0.2.x: OptimManager, ZeRO level for all blocks at once."""

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
        self.layers = bmt.TransformerBlockList([bmt.CheckpointBlock(Layer(dim)) for _ in range(num_layers)])
        self.head = Linear(dim, vocab)

    def forward(self, ids, mask):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        bmt.inspect.record_tensor(hidden, "hidden")
        return self.head(hidden)


def main():
    bmt.init_distributed(seed=23, zero_level=2)
    model = Model(29, 16, 3)
    bmt.init_parameters(model)
    bmt.print_rank(bmt.inspect.format_summary(bmt.inspect.inspect_model(model, "*")))
    bmt.synchronize()

    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100, inplace=True)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), weight_decay=1e-2)
    scheduler = bmt.lr_scheduler.NoDecay(optimizer, start_lr=1e-2, warmup_iter=4, end_iter=-1)
    optim_manager = bmt.optim.OptimManager(loss_scale=2**10, loss_scale_steps=1000)
    optim_manager.add_optimizer(optimizer, scheduler)

    torch.manual_seed(0)
    losses = []
    for iteration in range(8):
        batch = torch.randint(29, (4 * bmt.world_size(), 9))  # all ranks draw the same
        ids = batch[4 * bmt.rank() : 4 * bmt.rank() + 4]
        mask = torch.ones(8, 8).tril()
        optim_manager.zero_grad()
        with bmt.inspect.inspect_tensor() as inspector:
            for _ in range(2):
                logits = model(ids[:, :-1], mask)
                loss = loss_func(logits.reshape(-1, 29), ids[:, 1:].reshape(-1))
                optim_manager.backward(loss)
        global_loss = bmt.sum_loss(loss).item()
        grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        optim_manager.step()
        bmt.print_rank(f"{iteration}: {global_loss:.4f} {grad_norm:.4f} {int(optim_manager.loss_scale)}")
        losses.append(global_loss)
    bmt.print_rank(bmt.inspect.format_summary(inspector.get_summary()))
    gathered = bmt.store.allgather_object(losses[-1], bmt.config["comm"])
    assert gathered == [losses[-1]] * bmt.world_size()
    bmt.print_rank("losses", json.dumps(losses))
    if len(sys.argv) > 1:
        bmt.save(model, sys.argv[1])


if __name__ == "__main__":
    main()
