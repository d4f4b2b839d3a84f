"""Plans and comparisons as text for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .._engine.policy import Recompute
from .estimates import Plan
from .machine import Machine
from .published import BATCHES, PUBLISHED, Cell, Fit

__all__ = ["format_plan", "format_published"]

_BAR = 28
_RECOMPUTE = {
    Recompute.OFF: "activations kept",
    Recompute.SELECTIVE: "recomputation of all but products",
    Recompute.WHOLE: "recomputation",
}


def format_bytes(nbytes: float) -> str:
    """Bytes as text, in units of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"


def format_count(number: int) -> str:
    """A number of parameters as text, in the usual unit."""
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number:,}"


def format_seconds(seconds: float) -> str:
    """Seconds as text, in the unit that gives the shortest number."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _row(name: str, text: str, share: float) -> str:
    bar = "#" * min(_BAR, round(share * _BAR))
    return f"  {name:<24}{text:>12}  {bar:<{_BAR}} {share:>6.1%}"


def _label(name: str) -> str:
    """The name of a part for people; programs and JSON have the short one."""
    return {"disk": "disk buffers"}.get(name, name.replace("wire", "communication"))


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield f"memory of one device, of {format_bytes(memory.usable)} usable"
    names = "weights gathered gradients optimizer activations wire copies disk scratch total"
    for name in names.split():
        nbytes = getattr(memory, name)
        if name in ("wire", "copies", "disk") and not nbytes:
            continue
        yield _row(_label(name), format_bytes(nbytes), nbytes / memory.usable)
    if memory.host:
        yield _row("host, per node", format_bytes(memory.host), memory.host / memory.host_usable)
        speed = plan.machine.host_bandwidth
        yield f"  the update on the host is at {speed / 1e9:.3g} GB/s a node (--set host_bandwidth={speed:.3g})"


def _time(plan: Plan) -> Iterator[str]:
    time = plan.time
    yield f"one step: {format_seconds(time.step)}"
    parts = {
        "compute": time.compute,
        "communication": time.wire,
        "  exposed": time.exposed_wire,
        "optimizer on the device": time.optimizer,
        "PCIe": time.pcie,
        "host memory": time.host,
        "pipeline waits": time.idle,
        "drives": time.disk,
        "  waited for": time.exposed_disk,
    }
    for name, seconds in parts.items():
        if seconds or name in ("compute", "communication", "  exposed"):
            yield _row(name, format_seconds(seconds), seconds / time.step)


def _traffic(plan: Plan) -> Iterator[str]:
    if plan.traffic:
        yield "sent per rank in a step"
    for name, (messages, nbytes) in plan.traffic.items():
        yield f"  {name:<24}{format_bytes(nbytes):>12}  in {messages} messages"


def _disk(plan: Plan) -> Iterator[str]:
    disk = plan.disk
    if not disk.stored:
        return
    yield f"on drives per rank; a node's drives move {plan.machine.disk_bandwidth / 1e9:.3g} GB/s"
    for name, nbytes in (
        ("stored", disk.stored),
        ("read in a step", disk.read),
        ("written in a step", disk.written),
    ):
        yield f"  {name:<24}{format_bytes(nbytes):>12}"
    yield f"  {'written in a day':<24}{format_bytes(plan.written_per_day):>12}  to all drives of a node"


def _policy(plan: Plan) -> str:
    policy = plan.policy
    parts = [f"micro-batch {policy.micro_batch}", f"level {policy.level}"]
    parts += [f"over {policy.zero_size}"] * (policy.zero_size is not None)
    parts.append(_RECOMPUTE[Recompute(policy.recompute)])
    if policy.compute_dtype is not None:
        parts.append(f"computed in {str(policy.compute_dtype).removeprefix('torch.')}")
    if policy.gather_dtype not in (None, policy.compute_dtype):
        parts.append(f"gathered in {str(policy.gather_dtype).removeprefix('torch.')}")
    if policy.state_dtype != torch.float32:
        parts.append(f"moments in {str(policy.state_dtype).removeprefix('torch.')}")
    if policy.optimizer == "muon":
        inside = sum(block.num_parameters for block in plan.model.blocks)
        parts.append(f"Muon for matrices in blocks of {format_count(inside)} parameters, AdamW for others")
    of_blocks = f"{policy.host_share:.0%} of the " * (policy.host_share < 1)
    parts += [f"{of_blocks}blocks on the host"] * (policy.parameters == "host")
    parts += [f"offload {policy.offload:g}"] * bool(policy.offload) + ["survive"] * policy.survive
    share = f" for {policy.disk_share:g} of the blocks" * (policy.disk_share < 1)
    parts += [f"{' and '.join(policy.disk)} on drives{share}"] * bool(policy.disk)
    parts += [f"{policy.accumulate} micro-batches per step"] * (policy.accumulate > 1)
    parts += ["in vertical order"] * policy.vertical
    parts += [f"tensor parallel {policy.tp_size}"] * (policy.tp_size > 1)
    parts += [f"sequences over {policy.sp_size}"] * (policy.sp_size > 1)
    parts += [f"experts over {policy.ep_size}"] * (policy.ep_size > 1)
    if policy.pipe_size > 1:
        parts.append(f"{policy.pipe_size} stages ({policy.schedule}, {policy.micros} micro-batches)")
    return ", ".join(parts)


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _devices(machine: Machine) -> str:
    count = machine.num_devices
    return "one device" if count == 1 else f"all {count} devices"


def format_plan(plan: Plan, remedies: Sequence[str] = ()) -> str:
    """A plan as text.

    Args:
        plan: by :func:`bmtrain.plan.estimate`.
        remedies: changes that would make it fit, by :func:`bmtrain.plan.remedies`.
    """
    machine = plan.machine
    rules = plan.model.rules.splitlines() if plan.policy.optimizer == "muon" else []
    lines = [
        f"{plan.model.name}: {format_count(plan.model.num_parameters)} parameters, "
        f"{_tokens(plan.model.seq_len)} per sample",
        f"{machine.num_nodes} x {machine.devices_per_node} {machine.name}; {_policy(plan)}",
        *rules,
        "",
        *_memory(plan),
        "",
        *_time(plan),
        "",
        f"{plan.tokens_per_second:,.0f} tokens/s, {plan.samples_per_second:,.2f} samples/s on {_devices(machine)}",
        f"{plan.flops_per_device / 1e12:,.3g} TFLOP/s per device, MFU {plan.mfu:.1%}",
        *_traffic(plan),
        *_disk(plan),
        f"bottleneck: {_label(plan.time.bottleneck)}, {plan.time.bottleneck_seconds / plan.time.step:.0%} of the step",
    ]
    if plan.fits:
        lines.append("fits: yes")
    else:
        what = "device" if plan.memory.total > plan.memory.usable else "host"
        lines.append(f"fits: NO, out of {what} memory")
        lines += [f"  would fit with {change}" for change in remedies] or [
            "  no single change makes it fit: more devices, a smaller model, or several changes (--choose)"
        ]
    return "\n".join(lines)


def format_published(cells: Sequence[Cell], fit: Fit) -> str:
    """The published table beside its predictions."""
    found = {(cell.system, cell.batch): cell for cell in cells}
    lines = [
        "GPT-2 of 13 billion parameters (40 layers, 128 heads of width 40, hidden size",
        "5120, 512 tokens) on 4 x 8 V100-32GB: samples per second, published > predicted",
        "(error). The page says 'of each GPU': 29.42 of those are 13 times a V100's peak.",
        "They are taken as the cluster's. OOM: out of memory. !: the prediction is wrong",
        "about whether it fits.",
        "",
        f"{'batch per GPU':<13}" + "".join(f"{batch:>16}" for batch in BATCHES),
    ]
    for system in PUBLISHED:
        lines.append(f"{system:<13}" + "".join(f"{_cell(found[system, batch]):>16}" for batch in BATCHES))
    errors = [abs(cell.error) for cell in cells if cell.error is not None]
    agreeing = sum(cell.agrees_on_fit for cell in cells)
    lines += [
        "",
        f"fitted: {fit.efficiency:.3f} of the peak of matrix products, "
        f"{fit.network_bandwidth / 1e9:.2f} GB/s of network a server",
        f"mean error {sum(errors) / len(errors):.1%} over {len(errors)} cells, largest {max(errors):.1%}; "
        f"right about fitting in {agreeing} of {len(cells)}",
    ]
    return "\n".join(lines)


def _cell(cell: Cell) -> str:
    mark = "" if cell.agrees_on_fit else "!"
    predicted = "OOM" if cell.predicted is None else f"{cell.predicted:.1f}"
    if cell.error is None:
        return f"OOM>{predicted}{mark}"
    return f"{cell.published:.1f}>{predicted} ({cell.error:+.0%}){mark}"
