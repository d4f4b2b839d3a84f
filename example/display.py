"""How the progress of a run is shown: a bar on a terminal, with a line above it every few steps; lines elsewhere."""

from __future__ import annotations

import datetime
import importlib.util
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Protocol

__all__ = ["Display", "make_display"]


class Display(Protocol):
    """Shows a run that has begun at some step."""

    width: int | None  # columns of the terminal; None for a file or a pipe

    def step(self, step: int, fields: Sequence[str]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_display(first_step: int, num_steps: int, every: int) -> Display:
    """A display for this standard output, with a line every ``every`` steps."""
    if sys.stdout.isatty():
        if importlib.util.find_spec("rich"):
            return _Rich(first_step, num_steps, every)
        if importlib.util.find_spec("tqdm"):
            return _Tqdm(first_step, num_steps, every)
    return _Lines(first_step, num_steps, every)


def _line(step: int, num_steps: int, fields: Sequence[str], width: int | None) -> str:
    """The step's number and as many fields as there is room for, the first ones first."""
    line = f"step {step:>{len(str(num_steps))}}/{num_steps}"
    for field in fields:
        if width is None or len(line) + 2 + len(field) <= width:
            line += f"  {field}"
    return line


class _Lines:
    """A line every few steps, for logs and where no progress bar is installed."""

    width = None

    def __init__(self, first_step: int, num_steps: int, every: int) -> None:
        self.first_step = first_step
        self.num_steps = num_steps
        self.every = every
        self.started = time.monotonic()

    def step(self, step: int, fields: Sequence[str]) -> None:
        if step % self.every == 0 or step in (1, self.num_steps):
            print(_line(step, self.num_steps, [*fields, *self._left(step)], None), flush=True)

    def _left(self, step: int) -> list[str]:
        done = step - self.first_step
        if done < 2:  # the first step takes longer than the rest
            return []
        a_step = (time.monotonic() - self.started) / done
        return [f"{datetime.timedelta(seconds=round(a_step * (self.num_steps - step)))} left"]

    def note(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class _Rich:
    """A bar drawn by rich, as wide as the terminal."""

    def __init__(self, first_step: int, num_steps: int, every: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        def whole() -> Column:  # the bar gets what these leave
            return Column(no_wrap=True)

        self.width = shutil.get_terminal_size().columns
        self.num_steps = num_steps
        self.every = every
        self.bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=whole()),
            TimeRemainingColumn(table_column=whole()),
            TextColumn("left", table_column=whole()),
            TextColumn("{task.description}", table_column=whole()),
            expand=True,
        )
        self.task = self.bar.add_task("", total=num_steps, completed=first_step)
        self.bar.start()

    def step(self, step: int, fields: Sequence[str]) -> None:
        if step % self.every == 0 or step in (1, self.num_steps):
            self.note(_line(step, self.num_steps, fields, self.width))
        self.bar.update(self.task, completed=step, description=fields[0])

    def note(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()


class _Tqdm:
    """A bar drawn by tqdm."""

    def __init__(self, first_step: int, num_steps: int, every: int) -> None:
        from tqdm import tqdm

        self.width = shutil.get_terminal_size().columns
        self.num_steps = num_steps
        self.every = every
        bar = "{bar} {n_fmt}/{total_fmt} {remaining} left {desc}"
        self.bar = tqdm(total=num_steps, initial=first_step, dynamic_ncols=True, bar_format=bar)

    def step(self, step: int, fields: Sequence[str]) -> None:
        if step % self.every == 0 or step in (1, self.num_steps):
            self.note(_line(step, self.num_steps, fields, self.width))
        self.bar.set_description_str(fields[0], refresh=False)
        self.bar.update(step - self.bar.n)

    def note(self, text: str) -> None:
        self.bar.write(text)

    def close(self) -> None:
        self.bar.close()
