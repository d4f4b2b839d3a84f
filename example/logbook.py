"""What rank 0 reports: a progress bar or lines, metrics.jsonl, TensorBoard events and loss.png."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

import bmtrain as bmt

__all__ = ["Logbook", "percent", "prepare"]

_NARROW = 100  # columns; below, the bar leaves out what metrics.jsonl has anyway


class _Display(Protocol):
    """How the progress of a run is shown."""

    width: int | None  # columns of the terminal; None for a file or a pipe

    def step(self, step: int, text: str) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """A line every few steps, for logs and where no progress bar is installed."""

    width = None

    def __init__(self, first_step: int, num_steps: int, every: int) -> None:
        self.first_step = first_step
        self.num_steps = num_steps
        self.every = every
        self.started = time.monotonic()

    def step(self, step: int, text: str) -> None:
        if step % self.every == 0 or step in (1, self.num_steps):
            width = len(str(self.num_steps))
            print(f"step {step:>{width}}/{self.num_steps}  {text}{self._left(step)}", flush=True)

    def _left(self, step: int) -> str:
        done = step - self.first_step
        if done < 2:  # the first step takes longer than the rest
            return ""
        a_step = (time.monotonic() - self.started) / done
        return f"  {datetime.timedelta(seconds=round(a_step * (self.num_steps - step)))} left"

    def note(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class _Rich:
    """A bar drawn by rich."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        def whole() -> Column:  # on a narrow terminal the text at the end is cut, not this
            return Column(no_wrap=True, min_width=5)

        count, remaining = (
            MofNCompleteColumn(table_column=whole()),
            TimeRemainingColumn(compact=True, table_column=whole()),
        )
        text = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        self.width = shutil.get_terminal_size().columns
        bar = BarColumn(bar_width=4 if self.width < _NARROW else 8)
        self.bar = Progress(bar, count, remaining, text)
        self.task = self.bar.add_task("", total=num_steps, completed=first_step)
        self.bar.start()

    def step(self, step: int, text: str) -> None:
        self.bar.update(self.task, completed=step, description=text)

    def note(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()


class _Tqdm:
    """A bar drawn by tqdm."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        from tqdm import tqdm

        self.width = shutil.get_terminal_size().columns
        bar = "{n_fmt}/{total_fmt} {remaining} {desc}" if self.width < _NARROW else None
        self.bar = tqdm(total=num_steps, initial=first_step, dynamic_ncols=True, bar_format=bar)

    def step(self, step: int, text: str) -> None:
        if self.width < _NARROW:
            self.bar.set_description_str(text, refresh=False)
        else:
            self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(step - self.bar.n)

    def note(self, text: str) -> None:
        self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


def _display(first_step: int, num_steps: int, every: int) -> _Display:
    if sys.stdout.isatty():
        if importlib.util.find_spec("rich"):
            return _Rich(first_step, num_steps)
        if importlib.util.find_spec("tqdm"):
            return _Tqdm(first_step, num_steps)
    return _Lines(first_step, num_steps, every)


class Logbook:
    """Writes down what happens. On ranks other than 0 every method does nothing.

    Args:
        out: folder that gets ``metrics.jsonl``, ``tensorboard/`` and ``loss.png``.
        first_step: number of steps already done; what a former run noted after it is dropped.
        options: of train.py: ``steps`` in all, ``log_every`` so many of them where no bar is shown, and whether
            to write TensorBoard events (``tensorboard``) and ``loss.png`` (``plot``), if they can be.
    """

    def __init__(self, out: Path, first_step: int, options: argparse.Namespace) -> None:
        self.out = out
        self.plot = options.plot
        self.active = bmt.rank() == 0
        if not self.active:
            return
        out.mkdir(parents=True, exist_ok=True)
        self.records = [r for r in _read_records(out / "metrics.jsonl") if r["step"] <= first_step]
        with (out / "metrics.jsonl").open("w") as file:
            file.writelines(json.dumps(record) + "\n" for record in self.records)
        self.metrics = (out / "metrics.jsonl").open("a", buffering=1)
        self.display = _display(first_step, options.steps, options.log_every)
        self.events = None
        if options.tensorboard and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.events = SummaryWriter(str(out / "tensorboard"), purge_step=first_step + 1)

    def step(self, step: int, **values: float | None) -> None:
        """Note a training step: its number, counted from 1, and its ``loss``, ``lr``, ... of this step."""
        if not self.active:
            return
        self._write(step, values)
        is_narrow = self.display.width is not None and self.display.width < _NARROW
        shown = [f"loss {values['loss']:.4f}", f"lr {values['lr']:.1e}"]
        if values["loss_scale"] != 1:  # 1 without loss scaling
            shown.append(f"scale {values['loss_scale']:g}")
        if not is_narrow:
            shown.append(f"norm {values['grad_norm']:.2f}")
        shown.append(f"{values['tokens_per_second']:,.0f} {'tok/s' if is_narrow else 'tokens/s'}")
        shown.append(f"waits {percent(values['exposed_communication'])}")
        self.display.step(step, (" " if is_narrow else "  ").join(shown))

    def validation(self, step: int, loss: float) -> None:
        """Note the validation loss after ``step`` steps."""
        if self.active:
            self._write(step, {"validation_loss": loss})
            self.note(f"validation loss {loss:.4f} at step {step}")

    def note(self, text: str) -> None:
        """Show a line."""
        if self.active:
            self.display.note(text)

    def table(self, summary: list[dict[str, Any]]) -> None:
        """Show what :func:`bmtrain.inspect.inspect_model` returned, as far as it has room."""
        if self.active:
            self.note(_fit_table(summary, self.display.width))

    def validation_losses(self) -> tuple[float, float]:
        """The earliest and the latest that are noted; NaN on ranks other than 0."""
        noted = [r["validation_loss"] for r in self.records if "validation_loss" in r] if self.active else []
        losses = [math.nan if loss is None else loss for loss in noted] or [math.nan]
        return losses[0], losses[-1]

    def close(self) -> None:
        """Draw ``loss.png`` and close all files."""
        if not self.active:
            return
        self.display.close()
        self.metrics.close()
        if self.events:
            self.events.close()
        if self.plot and importlib.util.find_spec("matplotlib"):
            _draw(self.records, self.out / "loss.png")

    def written(self) -> list[Path]:
        """What there is to look at."""
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


def percent(share: float | None) -> str:
    """A share of 1; a dash if it is not known."""
    return "-" if share is None else f"{share:.1%}"


def _fit_table(summary: list[dict[str, Any]], width: int | None) -> str:
    """The table of bmtrain.inspect; where the terminal is too narrow for it, one of fewer columns."""
    whole = bmt.inspect.format_summary(summary)
    if width is None or max(map(len, whole.splitlines())) <= width:
        return whole
    columns = ["shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]
    for dropped in (None, "mean", "grad_mean", "min", "max", "shape"):
        columns = [column for column in columns if column != dropped]
        rows = [["name", *columns], *([row["name"], *(_cell(row[c]) for c in columns)] for row in summary)]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        if sum(widths) + 2 * len(columns) <= width:
            break
    lines = []
    for name, *cells in rows:
        padded = (cell.rjust(size) for cell, size in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


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
    for name, style in (("loss", "-"), ("validation_loss", "o--")):
        points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "), linewidth=1)
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def prepare(out: Path, resume: bool) -> Path | None:
    """Make the folder; move what a former run left in it to ``out/earlier-<time>``, unless to be resumed.

    A run that starts anew must neither mix with the former one's checkpoints nor delete them.

    Returns:
        Where the former run is now, None if it was not moved.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = ("checkpoints", "model.pt", "metrics.jsonl", "tensorboard", "loss.png")
    former = [out / name for name in names if (out / name).exists()]
    if resume or not former:
        return None
    target = out / time.strftime("earlier-%Y%m%d-%H%M%S")
    target.mkdir()
    for path in former:
        path.rename(target / path.name)
    return target
