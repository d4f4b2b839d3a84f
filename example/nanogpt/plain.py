import torch
import torch.nn.functional as F
from torch import nn

batch_size, context, dim, heads, num_layers, lr, steps = 8, 32, 64, 4, 2, 1e-3, 50
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)

with open("input.txt") as file:
    text = file.read()
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])


class Windows(torch.utils.data.Dataset):
    def __len__(self):
        return len(data) - context

    def __getitem__(self, i):
        return data[i : i + context], data[i + 1 : i + 1 + context]


loader = torch.utils.data.DataLoader(Windows(), batch_size, shuffle=True)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        heads_of = self.qkv(self.norm1(x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads_of, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(len(chars), dim), nn.Embedding(context, dim)
        self.layers = nn.ModuleList([Layer() for _ in range(num_layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, len(chars))

    def forward(self, ids, targets):
        x = self.token(ids) + self.position(torch.arange(context, device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

for step, (x, y) in enumerate(loader):
    if step == steps:
        break
    optimizer.zero_grad()
    loss = model(x.to(device), y.to(device))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

torch.save(model.state_dict(), "model.pt")
