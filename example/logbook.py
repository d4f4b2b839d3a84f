"""Reports of rank 0: progress on the screen, metrics.jsonl, TensorBoard events, Weights & Biases and loss.png."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from agree import UserError, together
from display import make_display

import bmtrain as bmt

__all__ = ["Logbook", "percent", "prepare"]


class Logbook:
    """Writes down what happens. On ranks other than 0 every method does nothing. Made by all ranks together.

    Args:
        out: folder that gets ``metrics.jsonl``, ``tensorboard/`` and ``loss.png``.
        first_step: number of steps already done; what a former run noted after it is dropped.
        options: of train.py: ``steps`` in all, ``log_every`` so many of them a line, and whether to write TensorBoard
            events (``tensorboard``) and ``loss.png`` (``plot``), if they can be; ``wandb``, a project of Weights &
            Biases or None.

    Raises:
        UserError: ``wandb`` was asked for and does not work.
    """

    def __init__(self, out: Path, first_step: int, options: argparse.Namespace) -> None:
        self.out = out
        self.plot = options.plot
        self.active = bmt.rank() == 0
        self.wandb = together(lambda: _start_wandb(options) if self.active else None, "--wandb")
        if not self.active:
            return
        out.mkdir(parents=True, exist_ok=True)
        self.records = [r for r in _read_records(out / "metrics.jsonl") if r["step"] <= first_step]
        with (out / "metrics.jsonl").open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in self.records)
        self.metrics = (out / "metrics.jsonl").open("a", buffering=1)
        self.display = make_display(first_step, options.steps, options.log_every)
        self.events = None
        if options.tensorboard and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(out / "tensorboard"), purge_step=first_step + 1)

    def __enter__(self) -> Logbook:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, step: int, **values: float | None) -> None:
        """Note a training step: its number, counted from 1, and its ``loss``, ``lr``, ... of this step."""
        if not self.active:
            return
        self._write(step, values)
        fields = [
            f"loss {values['loss']:.4f}",
            f"norm {values['grad_norm']:.2f}",
            f"{values['tokens_per_second']:,.0f} tok/s",
            f"{values['memory']:,.0f} MiB",
        ]
        if values["share_of_peak"] is not None:
            fields.append(f"{percent(values['share_of_peak'])} of peak")
        fields += [f"waits {percent(values['exposed_communication'])}", f"lr {values['lr']:.1e}"]
        if values["loss_scale"] != 1:  # 1 without loss scaling
            fields.append(f"scale {values['loss_scale']:g}")
        self.display.step(step, fields)

    def validation(self, step: int, loss: float) -> None:
        """Note the validation loss after ``step`` steps."""
        if self.active:
            self._write(step, {"validation_loss": loss})
            self.note(f"validation loss {loss:.4f} at step {step}")

    def note(self, text: str) -> None:
        """Show a line."""
        if self.active:
            self.display.note(text)

    def table(self, step: int, summary: list[dict[str, Any]]) -> None:
        """Show what :func:`bmtrain.inspect.inspect_model` returned after ``step`` steps, as far as it has room."""
        if self.active:
            self.note(f"parameters and gradients of step {step}:\n{_fit_table(summary, self.display.width)}")

    def validation_losses(self) -> tuple[float, float]:
        """The earliest and the latest that are noted; NaN on ranks other than 0."""
        noted = [r["validation_loss"] for r in self.records if "validation_loss" in r] if self.active else []
        losses = [math.nan if loss is None else loss for loss in noted] or [math.nan]
        return losses[0], losses[-1]

    def close(self) -> None:
        """Draw ``loss.png`` and close all files; a second time nothing happens."""
        if not self.active or self.metrics.closed:
            return
        self.display.close()
        self.metrics.close()
        if self.events:
            self.events.close()
        if self.wandb:
            self.wandb.finish()
        if self.plot and importlib.util.find_spec("matplotlib"):
            _draw(self.records, self.out / "loss.png")

    def written(self) -> list[Path]:
        """The files of results to look at."""
        names = ("metrics.jsonl", "tensorboard", "loss.png")
        return [self.out / name for name in names if (self.out / name).exists()]

    def _write(self, step: int, values: dict[str, float | None]) -> None:
        # JSON knows neither NaN nor infinity, and a gradient's norm can be both.
        finite = {k: v if v is not None and math.isfinite(v) else None for k, v in values.items()}
        record = {"step": step, **finite}
        self.records.append(record)
        self.metrics.write(json.dumps(record) + "\n")
        if self.events:
            for name, value in values.items():
                if value is not None:
                    self.events.add_scalar(name, value, step)
        if self.wandb:
            self.wandb.log({k: v for k, v in values.items() if v is not None}, step=step)


def percent(share: float | None) -> str:
    """A share of 1; a dash if it is not known."""
    return "-" if share is None else f"{share:.1%}"


def _fit_table(summary: list[dict[str, Any]], width: int | None) -> str:
    """The numbers of bmtrain.inspect as a table of as many columns as a terminal has room for."""
    columns = ["shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]
    for dropped in (None, "mean", "grad_mean", "min", "max", "shape"):
        columns = [column for column in columns if column != dropped]
        rows = [["name", *columns], *([row["name"], *(_cell(row[c]) for c in columns)] for row in summary)]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        if width is None or sum(widths) + 2 * len(columns) <= width:
            break
    lines = []
    for name, *cells in rows:
        padded = (cell.rjust(size) for cell, size in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"  # gradients are small: a fixed number of decimals shows zeros
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def _start_wandb(options: argparse.Namespace) -> Any:
    """The run at Weights & Biases; None if it was not asked for."""
    if options.wandb is None:
        return None
    if not importlib.util.find_spec("wandb"):
        raise UserError("--wandb: expected Weights & Biases to be installed: pip install wandb")
    return importlib.import_module("wandb").init(project=options.wandb, config=vars(options), resume="allow")


def _read_records(path: Path) -> list[dict[str, Any]]:
    records = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:  # the line that an interruption cut
                break
    return records


def _draw(records: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, label, style in (("loss", "training loss", "-"), ("validation_loss", "validation loss", "o-")):
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def prepare(out: Path, resume: bool) -> Path | None:
    """Make the folder; move what a former run left in it to ``out/earlier-<time>``, unless to be resumed.

    A new run must neither mix with the former one's checkpoints nor delete them.

    Returns:
        Where the former run is now, None if it was not moved.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = ("checkpoints", "model.pt", "model.safetensors", "metrics.jsonl", "tensorboard", "loss.png")
    former = [out / name for name in names if (out / name).exists()]
    if resume or not former:
        return None
    target = out / time.strftime("earlier-%Y%m%d-%H%M%S")
    target.mkdir()
    for path in former:
        path.rename(target / path.name)
    return target
