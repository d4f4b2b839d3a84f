"""Trains a small model by Lightning's Trainer and by Fabric, plain or sharded, each of `VARIANTS`; writes what it saw.

python tests/integrations/lightning_script.py plain FOLDER
python tests/integrations/lightning_script.py sharded FOLDER PLAIN   # after the other; Lightning starts the second rank
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    "fp16": {"precision": "16-mixed", "gradient_clip_val": 0.5},
    "bf16": {"precision": "bf16-mixed", "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "averaged": {"callbacks": [functools.partial(EMAWeightAveraging, decay=0.5)]},
}
BATCH = 8  # of all ranks together
STEPS = 6  # batches of an epoch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12)) for _ in range(2)
        )
        self.last = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses: list[float] = []

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        penalty = self.net.layers[0][2].weight.norm() + self.net.last.weight.norm()
        return nn.functional.mse_loss(self.net(x).float(), y) + 0.1 * penalty

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        """This rank's part of each batch, in order; Lightning's own sampler shuffles."""
        ranks = self.trainer.world_size
        order = list(range(self.trainer.global_rank, BATCH * STEPS, ranks))
        return torch.utils.data.DataLoader(samples(), batch_size=BATCH // ranks, sampler=order)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.losses.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).float()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)}


def samples() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(BATCH * STEPS, 5, generator=generator)
    return torch.utils.data.TensorDataset(x, x.pow(2).sum(1, keepdim=True))


def loader(ranks: int) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(samples(), batch_size=BATCH // ranks)


def trainer_of(
    kind: str, ranks: int, folder: Path, options: dict[str, Any], epochs: int
) -> lightning.Trainer:
    if kind == "sharded":
        from bmtrain.integrations.lightning import BMTrainStrategy

        options = {**options, "strategy": BMTrainStrategy()}
    if options.get("precision") == "16-mixed":
        options = {**options, "precision": None, "plugins": [fp16(lightning.pytorch.plugins)]}
    callbacks = [make() for make in options.get("callbacks", ())]
    options = {name: value for name, value in options.items() if name != "callbacks"}
    callbacks.append(ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_last=True))
    return lightning.Trainer(
        accelerator="cpu", devices=ranks, max_epochs=epochs, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **options,
    )  # fmt: skip


def train(kind: str, ranks: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    module = Module()
    trainer = trainer_of(kind, ranks, folder, options, 2)
    trainer.fit(module)
    seen: dict[str, Any] = {"losses": module.losses, "val_loss": trainer.callback_metrics["val_loss"].item()}
    seen["test"] = trainer.test(module, verbose=False)[0]["val_loss"]
    predicted = torch.cat(trainer.predict(module))  # type: ignore[arg-type]
    seen["predicted"] = (
        predicted.mean().item() if ranks == 1 else trainer.strategy.reduce(predicted.mean()).item()
    )
    weights = folder / "weights.ckpt"
    trainer.save_checkpoint(weights, weights_only=True)
    seen["weights"] = trainer.test(module, ckpt_path=weights, verbose=False)[0]["val_loss"]
    resumed = Module()
    trainer = trainer_of(kind, ranks, folder / "resumed", options, 2)
    trainer.fit(resumed, ckpt_path=folder / "epoch=0.ckpt")
    seen["resumed"] = resumed.losses
    fresh = Module()
    last = trainer_of(kind, ranks, folder / "validated", options, 2)
    seen["validated"] = last.validate(fresh, ckpt_path=folder / "last.ckpt", verbose=False)[0]["val_loss"]
    return seen


def resume_plain(folder: Path, plain: Path) -> list[float]:
    """Losses of a sharded run that continues from a file of a plain one."""
    module = Module()
    trainer_of("sharded", 2, folder / "of-plain", {}, 2).fit(
        module, ckpt_path=plain / "plain" / "epoch=0.ckpt"
    )
    return module.losses


def fp16(module: Any) -> Any:
    """The precision "16-mixed", which Lightning replaces on CPUs. The first step overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, backoff_factor=2.0**-10)
    return module.MixedPrecision("16-mixed", "cpu", scaler=scaler)


def train_by_fabric(kind: str, ranks: int, folder: Path, plain: Path, ours: bool = False) -> dict[str, Any]:
    strategy: Any = "auto"
    if kind == "sharded":
        from bmtrain.integrations.lightning import BMTrainFabricStrategy

        strategy = BMTrainFabricStrategy()
    fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    torch.manual_seed(1)
    net = Net()
    if ours and kind == "sharded":
        from bmtrain.optim import AdamOptimizer

        model = fabric.setup_module(net)
        made = AdamOptimizer(model.parameters(), lr=0.01, weight_decay=0.01, decoupled=True)
        optimizer = fabric.setup_optimizers(made)
    else:
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    batches = fabric.setup_dataloaders(loader(ranks))
    seen: dict[str, Any] = {"losses": [], "norms": []}

    def epoch(losses: list[float]) -> None:
        for number, (x, y) in enumerate(batches):
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss / 2)
            losses.append(fabric.all_reduce(loss.detach()).item())
            if number % 2:
                seen["norms"].append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()

    epoch(seen["losses"])
    state = {"model": model, "optimizer": optimizer, "step": 7}
    fabric.save(folder / "fabric.ckpt", state)
    epoch(seen["losses"])
    for name, source in {"again": folder, "of-plain": plain}.items():
        state["step"] = 0
        fabric.load(source / "fabric.ckpt", state)
        assert state["step"] == 7
        seen[name] = []
        epoch(seen[name])
    return seen


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    warnings.filterwarnings("ignore", module="lightning")
    ranks = 2 if kind == "sharded" else 1
    seen: dict[str, Any] = {
        name: train(kind, ranks, folder / name, options) for name, options in VARIANTS.items()
    }
    plain = Path(sys.argv[-1])
    seen["fabric"] = train_by_fabric(kind, ranks, folder, plain)
    seen["fabric-ours"] = train_by_fabric(kind, ranks, folder / "ours", plain, ours=True)
    if kind == "sharded":
        seen["of-plain"] = resume_plain(folder, plain)
    if lightning.fabric.utilities.rank_zero.rank_zero_only.rank == 0:
        (folder / "log.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
