"""Recorder of spans: the engine reports where operations begin and end.

[Note: Overhead of recording]
Off, the engine has no :class:`Observer`. On, it calls a :class:`Timeline` where an operation begins or ends, which
records the time and appends a tuple. On CUDA the time is an event on the current stream, read when
the recording is over, so nothing waits for the device; the spans are the device's then, not the host's.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .._base.arguments import require_integer, require_path
from .._C import ShardedBuffer
from .._engine.block_state import BlockState
from .._engine.engine import current_engine
from .._engine.observer import Observer
from .._engine.phase import Phase
from .._ranks.context import current
from ..global_var import context
from .summary import Summary, summarize
from .trace import Span, make_folder, write_trace

__all__ = ["Timeline", "record", "record_from_environment"]

#: Steps that BMTRAIN_TIMELINE records, after as many as it takes to learn the order of blocks.
_DEFAULT_STEPS, _LEARNING_STEPS = 10, 3


class _Clock(Protocol):
    def now(self) -> Any: ...

    def seconds(self, mark: Any) -> float: ...


class _HostClock:
    """Seconds since the recording began."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, mark: float) -> float:
        return mark - self._begin


class _DeviceClock:
    """The times at which the device reaches the present end of the current stream."""

    def __init__(self) -> None:
        self._begin = self.now()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return float(self._begin.elapsed_time(mark)) / 1e3


class _Mark(NamedTuple):
    kind: str
    name: str
    begin: Any
    end: Any
    detail: str


class Timeline(Observer):
    """A recording of this rank, from ``start`` (or ``with``) until ``stop`` or ``steps`` optimizer steps later.

    Args:
        steps: stop by itself after so many; None: at ``stop``.
        skip: optimizer steps before the recording begins.
        directory: where the trace is written when it stops; None: nowhere.

    Attributes:
        spans: the recorded spans, by their end; complete once stopped.
    """

    def __init__(
        self, steps: int | None = None, *, skip: int = 0, directory: str | os.PathLike[str] | None = None
    ) -> None:
        self._steps = None if steps is None else require_integer("steps", steps, 1)
        self._skip = require_integer("skip", skip, 0)
        if directory is not None:
            require_path("directory", directory)
        self._directory = None if directory is None else Path(directory)
        self.spans: list[Span] = []
        self.is_running = False
        self._marks: list[_Mark] = []
        self._open: dict[Any, Any] = {}
        self._phases: dict[int, str] = {}
        self._reducing: dict[int, str] = {}
        self._moving: dict[int, tuple[str, str]] = {}
        self._remove_hooks: list[Callable[[], None]] = []
        self._num_copying = 0  # waits for copies that are open
        self._reserved = Observer()  # while steps are skipped, so that no other recording starts meanwhile

    # ---- on and off

    def start(self) -> Timeline:
        """Begin; there is one recording at a time.

        Raises:
            RuntimeError: another one is running, or bmtrain is not initialized.
            OSError: the directory cannot be made or written to.
        """
        engine = current_engine(context("timeline.record"))
        if engine.observer is not None or self.is_running:
            raise RuntimeError("timeline: a recording is running already; stop it first")
        if self._directory is not None:
            make_folder(self._directory)
        self.is_running = True
        self._rank = context().topology.rank
        self._began = time.time()
        self._clock: _Clock = _DeviceClock() if context().device.type == "cuda" else _HostClock()
        self._marks.clear()
        self._stepping: Any = None
        self._remove_hooks = [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        engine.observer = self._reserved
        if self._skip == 0:
            self._begin()
        return self

    def _begin(self) -> None:
        self._observe(self)
        self._open = {"step": self._clock.now()}

    def _observe(self, observer: Observer | None) -> None:
        engine = current_engine(context())
        engine.observer = observer
        if engine.drives is not None:
            engine.drives.observer = observer

    def stop(self) -> None:
        """Ends; writes the trace if there is a directory. Does nothing the second time."""
        if not self.is_running:
            return
        self.is_running = False
        for remove in self._remove_hooks:
            remove()
        place = current()
        if place is not None and current_engine(place).observer in (self, self._reserved):
            self._observe(None)
        seconds = self._clock.seconds
        self.spans = [Span(m.kind, m.name, seconds(m.begin), seconds(m.end), m.detail) for m in self._marks]
        self._stepping = None  # a kept recording does not keep the optimizer and its state
        self._marks.clear()
        if self._directory is not None:
            write_trace(self._directory, self.spans, self._rank, self._began)

    def __enter__(self) -> Timeline:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def summary(self) -> Summary:
        """Shares of this rank's time, see :class:`Summary`.

        Raises:
            ValueError: nothing was recorded, or the recording is not over.
        """
        if self.is_running:
            raise ValueError("timeline: expected a recording that is over; call stop() first")
        return summarize({self._rank: self.spans})

    # ---- optimizers

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._num_copying:  # the update of a copy is a part of its wait
            self._open["optimizer"] = self._clock.now()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        engine = current_engine(context())
        self._stepping = self._stepping or optimizer
        counts = self._stepping is optimizer  # a step of several optimizers is counted once
        if engine.observer is self._reserved:
            self._skip -= int(counts)
            if self._skip <= 0:
                self._begin()
            return
        if engine.observer is not self:  # bmtrain has been initialized again since
            return
        self._close("optimizer", "optimizer", type(optimizer).__name__)
        if counts:
            self._close("step", "step", "step")
            if self._steps is not None and sum(mark.kind == "step" for mark in self._marks) >= self._steps:
                self.stop()
                return
            self._open["step"] = self._clock.now()

    # ---- called by the engine

    def _close(self, key: Any, kind: str, name: str, detail: str = "") -> None:
        begin = self._open.pop(key, None)
        if begin is not None:
            self._marks.append(_Mark(kind, name, begin, self._clock.now(), detail))

    def gathering(self, runtime: BlockState) -> None:
        if any(group.layout.num_ranks > 1 for group in runtime.buffers):
            self._open["gather", id(runtime)] = self._clock.now()

    def awaiting_gather(self, runtime: BlockState) -> None:
        if ("gather", id(runtime)) in self._open:
            self._open["wait"] = self._clock.now()

    def gathered(self, runtime: BlockState) -> None:
        self._close("wait", "wait", runtime.label, "gather")
        self._close(("gather", id(runtime)), "gather", runtime.label)

    def computing(self, runtime: BlockState, phase: Phase) -> None:
        self._phases[id(runtime)] = phase.value
        self._open["compute", id(runtime)] = self._clock.now()

    def computed(self, runtime: BlockState) -> None:
        self._close(("compute", id(runtime)), "compute", runtime.label, self._phases.pop(id(runtime), ""))

    def reducing(self, runtime: BlockState, groups: Sequence[ShardedBuffer]) -> None:
        if any(group.layout.num_ranks * group.num_replicas > 1 for group in groups):
            self._reducing[id(groups)] = runtime.label
            self._open["reduce", id(groups)] = self._clock.now()

    def awaiting_reduction(self, groups: Sequence[ShardedBuffer]) -> None:
        if id(groups) in self._reducing:
            self._open["wait"] = self._clock.now()

    def reduced(self, groups: Sequence[ShardedBuffer]) -> None:
        label = self._reducing.pop(id(groups), "")
        self._close("wait", "wait", label, "reduce")
        self._close(("reduce", id(groups)), "reduce", label)

    def transferring(self, transfer: object, label: str, *, is_write: bool) -> None:
        self._moving[id(transfer)] = "write" if is_write else "read", label
        self._open["drive", id(transfer)] = self._clock.now()

    def transferred(self, transfer: object) -> None:
        self._close(("drive", id(transfer)), *self._moving.pop(id(transfer), ("", "")))

    @contextmanager
    def waiting(self, name: str, reason: str) -> Iterator[None]:
        begin = self._clock.now()
        self._num_copying += reason == "copies"
        try:
            yield
        finally:
            self._num_copying -= reason == "copies"
            self._marks.append(_Mark("wait", name, begin, self._clock.now(), reason))


def record(
    steps: int | None = None, *, skip: int = 0, directory: str | os.PathLike[str] | None = None
) -> Timeline:
    """Records the work and the waits of this rank while the ``with`` block runs.

    Args:
        steps: stop after so many optimizer steps; None: at the end of the block.
        skip: steps before that; the order of blocks is learnt in the first two or three.
        directory: where to write ``rank00000.json``, for ``bmtrain timeline`` and trace viewers.

    Returns:
        The recording, a context manager; with ``.spans`` and ``.summary()``.

    Example::

        with bmt.timeline.record(steps=5, skip=3, directory="out/timeline") as timeline:
            for batch in batches:
                train(batch)
        print(timeline.summary())
    """
    return Timeline(steps, skip=skip, directory=directory)


def record_from_environment() -> None:
    """Starts a recording if ``BMTRAIN_TIMELINE`` names a directory; it ends after ``BMTRAIN_TIMELINE_STEPS`` steps.

    Raises:
        ValueError: the number of steps is not a number, or the directory cannot be written to.
    """
    directory = os.environ.get("BMTRAIN_TIMELINE")
    if not directory:
        return
    given = os.environ.get("BMTRAIN_TIMELINE_STEPS", str(_DEFAULT_STEPS))
    if not given.isdigit() or int(given) < 1:
        raise ValueError(
            f"environment variable BMTRAIN_TIMELINE_STEPS: expected a number of steps, got {given!r}"
        )
    try:
        timeline = Timeline(int(given), skip=_LEARNING_STEPS, directory=directory).start()
    except OSError as error:
        raise ValueError(
            f"environment variable BMTRAIN_TIMELINE: expected a folder to write to, got {directory!r} "
            f"({error.strerror})"
        ) from None
    atexit.register(timeline.stop)  # a run that ends before
