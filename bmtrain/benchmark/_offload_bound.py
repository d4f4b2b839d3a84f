"""The least time of a training step whose optimizer is on the host, from the measured rates of a machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..optim._arrays import allocate

#: Bytes per 16-bit parameter that its update moves on the host: gradient in, fp32 weight and moments in and out,
#: parameter out.
HOST_BYTES = 28
#: Bytes of a 16-bit gradient or parameter.
_WIRE_BYTES = 2


class Rates(NamedTuple):
    """Bytes per second: of copies from the device and to it, and of an update's reads and writes in host memory."""

    to_host: float
    to_device: float
    host: float


class Unit(NamedTuple):
    """A unit of updates and waits, in forward order.

    Attributes:
        numel: 16-bit parameters of this rank that the host updates.
        share: of the time of a forward, and of a backward.
    """

    numel: int
    share: float


def least_seconds(units: Sequence[Unit], forward: float, backward: float, rates: Rates) -> float:
    """The lower bound of the time of a step, at full rates and without unneeded waits.

    A block's gradients leave when its backward is over, one block after the other. The first update begins when the
    backward (and clipping, which is in its time) is over, since the norm is not known before; then the host updates
    block after block, parameters return one after the other, and a block's forward follows the forward of the block
    before and the return of its own parameters.

    Args:
        units: in forward order.
        forward: seconds of all of it.
        backward: the same.
        rates: of the machine.

    Example:
        >>> rates = Rates(to_host=4, to_device=4, host=28)
        >>> least_seconds([Unit(0, 0.5), Unit(0, 0.5)], 2, 4, rates)                # everything on the device
        6.0
        >>> least_seconds([Unit(1, 0.5), Unit(1, 0.5)], 2, 4, rates)                # 1 s and 0.5 s for each block
        8.0
    """
    done = sent = 0.0
    arrived: list[float] = []
    for unit in reversed(units):
        done += unit.share * backward
        if unit.numel:
            sent = max(sent, done) + _WIRE_BYTES * unit.numel / rates.to_host
        arrived.insert(0, sent)
    computed = returned = run = backward
    for unit, at in zip(units, arrived, strict=True):
        if unit.numel:
            computed = max(computed, at) + HOST_BYTES * unit.numel / rates.host
            returned = max(returned, computed) + _WIRE_BYTES * unit.numel / rates.to_device
            run = max(run, returned)
        run += unit.share * forward
    return run


def measure_rates(device: torch.device, numel: int, repeat: int) -> Rates:
    """Medians over copies of ``numel`` 16-bit elements, and over a pass that moves an update's bytes on the host."""
    on_device = torch.zeros(numel, dtype=torch.bfloat16, device=device)
    on_host = torch.zeros(numel, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    (weight,), (exp_avg,), (exp_avg_sq,) = allocate(
        [torch.Size([numel])], [torch.float32] * 3, torch.device("cpu")
    )
    gradient, rounded = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)
    lists = [weight], [rounded], [gradient], [exp_avg], [exp_avg_sq]
    moved = _WIRE_BYTES * numel
    return Rates(
        to_host=moved / _median(lambda: on_host.copy_(on_device, non_blocking=True), device, repeat),
        to_device=moved / _median(lambda: on_device.copy_(on_host, non_blocking=True), device, repeat),
        host=HOST_BYTES * numel / _median(lambda: torch.ops.bmtrain.adam_move_(*lists), device, repeat),
    )


def _median(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    seconds = []
    for number in range(repeat + 2):
        wait_for(device)
        begin = time.perf_counter()
        work()
        wait_for(device)
        if number >= 2:
            seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]


def wait_for(device: torch.device) -> None:
    """Waits until a device has completed all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
