"""A GPT on characters in one file, sharded over all ranks: the model is plain PyTorch, as in Karpathy's nanoGPT.

torchrun --nproc_per_node 2 example/nano.py                  (a GPU for each rank, or CPU ranks where there is none)
torchrun --nproc_per_node 8 example/nano.py --data input.txt --dim 384 --layers 6 --heads 6 --steps 5000
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import bmtrain as bmt
from bmtrain.distributed import checkpoint

parser = argparse.ArgumentParser(description="Train a GPT on the characters of a text.")
parser.add_argument("--data", default=argparse.__file__, help="file of text; default: a module of Python")
parser.add_argument("--out", default="out/nano", help="folder for checkpoints; a run that is there continues")
sizes = {"steps": 200, "layers": 4, "heads": 4, "dim": 64, "context": 64, "batch-size": 8, "log-every": 20}
for name, value in sizes.items():
    parser.add_argument(f"--{name}", type=int, default=value)
parser.add_argument("--lr", type=float, default=3e-3)
options = parser.parse_args()

bmt.init_distributed(seed=1337)  # every rank runs this file
device = bmt.config["device"]

# ------------------------------------------------------------------------------------------------------------ data
text = Path(options.data).read_text(encoding="utf-8")
chars = sorted(set(text))
ids = torch.tensor([chars.index(c) for c in text])


class Windows(torch.utils.data.Dataset):
    """Pieces of a text of one length, each with its next characters."""

    def __init__(self, ids, stride):
        self.ids, self.starts = ids, range(0, len(ids) - options.context, stride)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, number):
        i = self.starts[number]
        return self.ids[i : i + options.context], self.ids[i + 1 : i + 1 + options.context]


cut = int(0.9 * len(ids))
train = bmt.data.loader(Windows(ids[:cut], 1), options.batch_size, seed=1)  # each rank its own samples
validation = bmt.data.loader(Windows(ids[cut:], options.context), options.batch_size, shuffle=False)


# ----------------------------------------------------------------------------------------------------------- model
class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, options.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab_size, dim):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab_size, dim), nn.Embedding(options.context, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(options.layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, ids, targets):
        x = self.token(ids) + self.position(torch.arange(ids.size(1), device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
model = bmt.BMTrainModelWrapper(GPT(len(chars), options.dim).to(dtype))  # every parameter becomes a shard

# -------------------------------------------------------------------------------------------------------- training
optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
schedule = bmt.lr_scheduler.Cosine(optimizer, options.lr, warmup_iter=10, end_iter=options.steps)
manager = bmt.optim.OptimManager()
manager.add_optimizer(optimizer, schedule)

step = 0
if last := checkpoint.latest(options.out):
    saved = checkpoint.load(last, model, manager)
    step = saved.step
    train.load_state_dict(saved.extra)
    schedule.end_iter = options.steps


def mean_loss(batches):
    """Over batches of all ranks."""
    with torch.no_grad():
        losses = [model(x.to(device), y.to(device)) for x, y in batches]
    return bmt.distributed.all_reduce(torch.stack(losses).mean(), "avg").item()


for x, y in itertools.chain.from_iterable(itertools.repeat(train)):  # one epoch after the other
    if step % options.log_every == 0 or step >= options.steps:
        held_out = mean_loss(itertools.islice(validation, 10))
        bmt.print_rank(f"step {step:>5}  validation loss {held_out:.4f}", flush=True)
    if step >= options.steps:
        break
    loss = model(x.to(device), y.to(device))
    manager.zero_grad()
    manager.backward(loss)
    manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
    manager.step()
    step += 1
    if step % 100 == 0 or step == options.steps:
        checkpoint.save(options.out, step, model, manager, extra=train.state_dict())
