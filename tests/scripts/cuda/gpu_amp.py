"""A script for GPUs in plain PyTorch: autocast, GradScaler, pinned loader, checkpoint with map_location."""

import io

import torch
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
torch.manual_seed(0)
torch.cuda.manual_seed_all(0)
torch.backends.cuda.matmul.allow_tf32 = True

model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1, device="cuda")
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
data = TensorDataset(torch.randn(64, 16), torch.randn(64, 1))
loader = DataLoader(data, batch_size=16, pin_memory=True)
assert next(model.parameters()).is_cuda

first = {
    name: value.cpu() for name, value in model.state_dict().items()
}  # a copy, as every .cpu() from a GPU
for inputs, targets in loader:
    inputs, targets = inputs.to(device, non_blocking=True), targets.cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.cuda.current_stream().synchronize()
    print(f"loss {loss.item():.9f}")
assert not torch.equal(first["0.weight"], model[0].weight.detach().cpu())

buffer = io.BytesIO()
torch.save(model.state_dict(), buffer)
buffer.seek(0)
model.load_state_dict(torch.load(buffer, map_location="cuda:0", weights_only=True))
noise = torch.randn(2, device="cuda", generator=torch.Generator(device="cuda").manual_seed(1))
print(f"loss {model(torch.ones(2, 16, device=device)).mean().item() + noise.mean().item():.9f}")
torch.cuda.empty_cache()
