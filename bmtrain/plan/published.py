"""The user's published measurements, and the planner's error against them.

A GPT-2 of 13 billion parameters (40 layers, 128 heads of width 40, hidden size 5120, 512 tokens) on 4 servers with 8
V100-32GB each. The page that published them calls the figures samples per second *of each GPU*. They cannot be: 29.42
samples per second are 1.6 PFLOP/s of useful work, 13 times the peak of one V100 (125 TFLOP/s). They are figures of the
cluster, and are taken as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .decoder import gpt2
from .estimator import model_state_bytes
from .machine import MACHINES, Machine
from .model import ModelDescription
from .network import Network
from .policy import TrainingPolicy
from .simulation import Rates, SimulatedStep

__all__ = ["FITTED", "PUBLISHED", "Cell", "Fit", "compare", "fit_constants"]

BATCHES = (8, 16, 24, 32)

#: System -> samples per second of the cluster at each batch per GPU; None: out of memory.
PUBLISHED: dict[str, tuple[float | None, ...]] = {
    "BMTrain": (24.15, 26.94, 29.42, 28.28),
    "ZeRO3(mp=1)": (14.88, 21.69, 24.38, None),
    "ZeRO3(mp=4)": (15.51, None, None, None),
    "ZeRO3(mp=8)": (15.51, None, None, None),
    "ZeRO2(mp=1)": (None, None, None, None),
    "ZeRO2(mp=4)": (22.85, None, None, None),
    "ZeRO2(mp=8)": (21.33, None, None, None),
}

# Defaults of DeepSpeed's documented configuration, in elements of two bytes: "reduce_bucket_size" and
# "allgather_bucket_size" (ZeRO-2), "stage3_max_live_parameters" and "stage3_prefetch_bucket_size" (ZeRO-3).
_BUCKET, _LIVE, _PREFETCH = 5e8, 1e9, 5e7


@dataclass(frozen=True)
class Fit:
    """The two fitted constants.

    Args:
        efficiency: share of a V100's peak that matrix products reach.
        network_bandwidth: of one server, in bytes per second.
    """

    efficiency: float
    network_bandwidth: float

    def machine(self) -> Machine:
        """The cluster with these constants."""
        return replace(
            MACHINES["v100-32gb"], efficiency=self.efficiency, network_bandwidth=self.network_bandwidth
        )


#: The result of :func:`fit_constants` (``bmtrain plan --published --fit``).
FITTED = Fit(efficiency=0.4191, network_bandwidth=9.231e9)


@dataclass(frozen=True)
class Cell:
    """One cell of the table: the published and the predicted speed (None: out of memory)."""

    system: str
    batch: int
    published: float | None
    predicted: float | None
    speed: float
    memory: float

    @property
    def agrees_on_fit(self) -> bool:
        return (self.published is None) == (self.predicted is None)

    @property
    def error(self) -> float | None:
        """Relative error of the predicted speed, predicted to fit or not; None where none was published."""
        return None if self.published is None else self.speed / self.published - 1


def _model() -> ModelDescription:
    return gpt2(
        40, 5120, 128, dim_head=40, seq_len=512, dtype=torch.float16, attention="whole", name="GPT-2 13B"
    )


def _simulate(system: str, batch: int, machine: Machine) -> tuple[float, float]:
    """Samples per second of the cluster, and bytes of one device."""
    ours = system == "BMTrain"
    level = 3 if ours or "3" in system[:5] else 2
    tp_size = 1 if ours else int(system.split("=")[1].rstrip(")"))
    ranks = machine.num_devices // tp_size
    model = _model().sliced(tp_size, 1)
    states: dict[str, float] = {**model_state_bytes(model, ranks)}
    if not ours and level == 2:
        states["weights"] = 2.0 * model.num_parameters
        states["buckets"] = 2 * 2 * _BUCKET
    elif not ours:
        states["buckets"] = 2 * (_BUCKET + _LIVE + _PREFETCH)
    step = SimulatedStep(
        model,
        TrainingPolicy(micro_batch=batch, level=level, recompute=True, tp_size=tp_size, reduce="ring"),
        batch * tp_size,
        Network(machine, ranks, stride=tp_size),
        Rates(machine.flops * machine.efficiency, machine.memory_bandwidth),
        tp=Network(machine, tp_size) if tp_size > 1 else None,
        fixed=states,
        overlaps=ours,
        early_stop=False,
    )
    result = step.run()
    peak = result.memory.peak
    if not ours and level == 2:
        # Whole weights stay where they are; the simulation counts them a second time as gathered.
        peak -= result.memory.at_peak.get("gathered", 0.0) + result.memory.at_peak.get("outside blocks", 0.0)
    touched = 2 * (states["optimizer"] + states["gradients"]) + states["gradients"]
    seconds = result.seconds + touched / machine.memory_bandwidth
    return batch * machine.num_devices / seconds, peak


def compare(fit: Fit) -> list[Cell]:
    """Every cell of the table with its prediction."""
    machine = fit.machine()
    cells = []
    for system, row in PUBLISHED.items():
        for batch, published in zip(BATCHES, row, strict=True):
            speed, memory = _simulate(system, batch, machine)
            fits = memory <= machine.usable_memory
            cells.append(Cell(system, batch, published, speed if fits else None, speed, memory))
    return cells


def _mean_error(fit: Fit) -> float:
    """Mean of the absolute errors over the cells with a published speed."""
    machine = fit.machine()
    errors = [
        abs(_simulate(system, batch, machine)[0] / published - 1)
        for system, row in PUBLISHED.items()
        for batch, published in zip(BATCHES, row, strict=True)
        if published is not None
    ]
    return sum(errors) / len(errors)


def fit_constants(error: Callable[[Fit], float] = _mean_error) -> Fit:
    """The constants with the least mean error: a coarse grid, then smaller ones around its best point."""
    best = Fit(0.4, 10e9)
    width = (0.7, 1.2)  # of the logarithms
    for points, shrink in ((7, 3.0), (5, 2.5), (5, 2.5)):
        offsets = [2 * k / (points - 1) - 1 for k in range(points)]
        candidates = [
            Fit(
                min(best.efficiency * math.exp(width[0] * a), 1.0),
                best.network_bandwidth * math.exp(width[1] * b),
            )
            for a in offsets
            for b in offsets
        ]
        best = min(candidates, key=error)
        width = (width[0] / shrink, width[1] / shrink)
    return best
