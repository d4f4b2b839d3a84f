"""How fast a rank trains, how much memory it takes, and how much of its time it waits for others."""

from __future__ import annotations

import math
import resource
import time

import torch

import bmtrain as bmt

__all__ = ["Pace", "peak_memory"]


def peak_memory() -> float:
    """The largest memory of this rank so far, in MiB: of its GPU, or of its process."""
    if bmt.config["device"].type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak of a device in 16-bit matrix products, in operations per second; None where it is unknown."""
    if dtype == torch.float32 or "PCIe" in device_name:  # the figures below are of SXM modules
        return None
    for name, machine in bmt.plan.MACHINES.items():
        if name.split("-")[0].upper() in device_name:
            return machine.flops
    return None


def drive_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from drives and written to them, by the kernel's count."""
    with open("/proc/self/io") as file:
        counts = dict(line.split(": ") for line in file)
    return int(counts["read_bytes"]), int(counts["write_bytes"])


class Pace:
    """Tokens a second, and the share of recent steps in which this rank had nothing to do but wait for the others.

    The share comes from one window of steps after the other (``bmtrain.timeline``), which costs less than a percent.
    Where BMTRAIN_TIMELINE records already, that goes first, and no share is known here.

    Args:
        tokens: of a step, on all ranks together.
        flops: of a token, forward and backward; compared with the peak of the devices, where that is known.
        dtype: of the products.
        window: number of steps.
        counts_drives: whether to add up what steps read from drives and write to them.
    """

    def __init__(
        self, tokens: int, flops: float, dtype: torch.dtype, window: int = 10, *, counts_drives: bool = False
    ) -> None:
        self.tokens = tokens
        self.flops = flops
        device = bmt.config["device"]
        peak = peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
        self.peak = None if peak is None else peak * bmt.world_size()
        self.window = window
        self.num_steps = 0
        self.seconds = 0.0
        self.shares: list[float] = []
        self._recording: bmt.timeline.Timeline | None = None
        self._started = 0.0
        self.counts_drives = counts_drives
        self.moved = [0, 0]  # read, written
        self._before = (0, 0)

    def begin_step(self) -> None:
        """A step begins."""
        if self.counts_drives:
            self._before = drive_bytes()
        self._started = time.perf_counter()

    def end_step(self) -> dict[str, float | None]:
        """The step is over.

        Returns:
            its ``tokens_per_second``; ``share_of_peak`` of the devices, 0 to 1, None if that is not known; ``memory``,
            the peak of this rank so far in MiB; and the ``exposed_communication`` of the last window: the share of its
            time that this rank waited, None before the first window is complete.
        """
        elapsed = time.perf_counter() - self._started
        self.num_steps += 1
        self.seconds += elapsed
        if self.counts_drives:
            now = drive_bytes()
            for way in range(2):
                self.moved[way] += now[way] - self._before[way]
        self._go_on_recording()
        return {
            "tokens_per_second": self.tokens / elapsed,
            "share_of_peak": None if self.peak is None else self.tokens * self.flops / elapsed / self.peak,
            "memory": peak_memory(),
            "exposed_communication": self.shares[-1] if self.shares else None,
        }

    def tokens_per_second(self) -> float:
        """In all steps; NaN if there was none."""
        return self.num_steps * self.tokens / self.seconds if self.seconds else math.nan

    def exposed_communication(self) -> float | None:
        """The share in all windows; None if none was complete."""
        return sum(self.shares) / len(self.shares) if self.shares else None

    def close(self) -> None:
        """End the window that is open."""
        if self._recording is not None:
            self._recording.stop()

    def _go_on_recording(self) -> None:
        if self._recording is not None and not self._recording.is_running:
            self.shares.append(self._recording.summary().exposed_communication)
            self._recording = None
        if self._recording is None:
            try:
                self._recording = bmt.timeline.record(steps=self.window).start()
            except RuntimeError:  # BMTRAIN_TIMELINE
                return
