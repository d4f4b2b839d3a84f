"""gpu_amp.py as one writes it for the CPU."""

import io

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))

for inputs, targets in DataLoader(data, batch_size=16):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"loss {loss.item():.9f}")

buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
buffer.seek(0)
model.load_state_dict(torch.load(buffer, weights_only=True))
noise = torch.randn(2, generator=torch.Generator().manual_seed(1))
print(f"loss {model(torch.ones(2, 16)).mean().item() + noise.mean().item():.9f}")
