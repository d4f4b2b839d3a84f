"""Scaling curves from 1 to 4,096 devices, simulated: ``bmtrain plan --scale DIR``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._tools.pictures import COLORS, new_figure, plain
from .decoder import gpt2
from .estimates import Plan
from .estimator import estimate
from .machine import MACHINES, Machine
from .model import ModelDescription
from .policy import TrainingPolicy

__all__ = ["CURVES", "Curve", "draw_scale"]

#: Devices of a point.
COUNTS = tuple(2**exponent for exponent in range(13))
_TABLE_COUNTS = (8, 64, 512, 4096)
_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Curve:
    """One model at growing numbers of devices; the batch per device stays, so the total batch grows.

    Args:
        label: in the pictures.
        model: the model to train.
        policy: its policy, whose micro-batch is the largest one of 1, 2, 4, 8, 16 that fits at each number of devices.
    """

    label: str
    model: ModelDescription
    policy: TrainingPolicy

    def points(self, machine: Machine) -> list[tuple[Plan, Plan]]:
        """Plans for each number of devices at which the model fits: with ring reductions, and with direct slices."""
        factor = self.policy.tp_size * self.policy.pipe_size
        plans = []
        for count in COUNTS:
            if count % factor == 0:
                plan = self._largest(machine.with_devices(count))
                if plan is not None:
                    direct = estimate(self.model, plan.machine, replace(plan.policy, reduce="direct"))
                    plans.append((plan, direct))
        return plans

    def _largest(self, machine: Machine) -> Plan | None:
        best = None
        for batch in _BATCHES:
            plan = estimate(self.model, machine, replace(self.policy, micro_batch=batch, reduce="ring"))
            if not plan.fits:
                break
            best = plan
        return best


CURVES = (
    Curve("1.3B", gpt2(24, 2048, 16, seq_len=2048), TrainingPolicy()),
    Curve("13B", gpt2(40, 5120, 40, seq_len=2048), TrainingPolicy()),
    Curve("175B", gpt2(96, 12288, 96, seq_len=2048), TrainingPolicy()),
    Curve("175B, TP 8", gpt2(96, 12288, 96, seq_len=2048), TrainingPolicy(tp_size=8)),
    Curve(
        "1T, TP 8, PP 16",
        gpt2(128, 25600, 160, seq_len=2048),
        TrainingPolicy(tp_size=8, pipe_size=16, schedule="1f1b", num_micro_batches=64),
    ),
)


def draw_scale(directory: Path, machine: Machine | None = None) -> list[str]:
    """Draws the pictures and makes the table of ``docs/explanation/scale.md``.

    Args:
        directory: existing or new, where ``scale-mfu.png`` and ``scale-parts.png`` are written.
        machine: the nodes; default: eight H100 a node.

    Returns:
        The lines of a Markdown table.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(11, 4.8)
    machine = MACHINES["h100-80gb"] if machine is None else machine
    found = {curve.label: curve.points(machine) for curve in CURVES}
    directory.mkdir(parents=True, exist_ok=True)
    left, right = figure.subplots(1, 2)
    for color, curve in zip(COLORS, CURVES, strict=True):
        plans = found[curve.label]
        devices = [ring.machine.num_devices for ring, _ in plans]
        left.plot(devices, [100 * ring.mfu for ring, _ in plans], color=color, linewidth=4, alpha=0.35)
        left.plot(devices, [100 * direct.mfu for _, direct in plans], color=color, linestyle="--")
        memory = [ring.memory.total / 2**30 for ring, _ in plans]
        right.plot(devices, memory, color=color, marker=".", label=curve.label)
    left.plot([], [], color="gray", linewidth=4, alpha=0.35, label="ring reduction")
    left.plot([], [], color="gray", linestyle="--", label="direct slices")
    left.legend(loc="lower left", frameon=False)
    left.set_ylabel("MFU, %")
    left.set_ylim(0)
    right.set_ylabel("memory per device, GiB")
    usable = machine.usable_memory / 2**30
    right.axhline(usable, color="gray", linewidth=0.8)
    right.annotate(
        f"usable: {usable:.1f} GiB", (1, usable), xytext=(0, 3), textcoords="offset points", color="gray"
    )
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter(lambda size, _: f"{size:.0f}")
    for axes in (left, right):
        _count_axis(axes, machine)
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside upper center", ncols=len(CURVES), frameon=False
    )
    figure.savefig(directory / "scale-mfu.png", dpi=110)
    _draw_parts(
        [ring for ring, _ in found["1.3B"]],
        [direct for _, direct in found["1.3B"]],
        directory / "scale-parts.png",
        machine,
    )
    return _table(found)


def _count_axis(axes: Any, machine: Machine) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    axes.set_xlabel(f"{machine.name} devices, {machine.devices_per_node} per node")
    plain(axes)


def _draw_parts(ring: list[Plan], direct: list[Plan], path: Path, machine: Machine) -> None:
    figure = new_figure(11, 4.2)
    for axes, plans, title in zip(
        figure.subplots(1, 2, sharey=True), (ring, direct), ("ring reduction", "direct slices"), strict=True
    ):
        devices = [str(plan.machine.num_devices) for plan in plans]
        base = [0.0] * len(plans)
        for name, color in (("compute", COLORS[0]), ("exposed_wire", COLORS[2]), ("optimizer", COLORS[3])):
            # Of one sample, as the batch that fits grows with the number of devices.
            values = [1e3 * getattr(plan.time, name) / plan.policy.micro_batch for plan in plans]
            axes.bar(devices, values, bottom=base, color=color, label=name.replace("_wire", " communication"))
            base = [low + value for low, value in zip(base, values, strict=True)]
        axes.set_title(f"1.3B, {title}", fontsize=10)
        axes.tick_params("x", labelsize=8)
        axes.set_xlabel(f"{machine.name} devices")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
    )
    figure.axes[0].set_ylabel("ms per step and sample of a device")
    figure.savefig(path, dpi=110)


def _table(found: dict[str, list[tuple[Plan, Plan]]]) -> list[str]:
    lines = [
        "| model | devices | micro-batch | memory, GiB | MFU, ring | MFU, direct | exposed, ring | exposed, direct |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for label, plans in found.items():
        for ring, direct in plans:
            if ring.machine.num_devices in _TABLE_COUNTS:
                lines.append(
                    f"| {label} | {ring.machine.num_devices:,} | {ring.policy.micro_batch} "
                    f"| {ring.memory.total / 2**30:.1f} | {ring.mfu:.1%} | {direct.mfu:.1%} "
                    f"| {ring.time.exposed_wire / ring.time.step:.1%} "
                    f"| {direct.time.exposed_wire / direct.time.step:.1%} |"
                )
    return lines
