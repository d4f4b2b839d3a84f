"""Adam (Kingma and Ba, 2015) and AdamW (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.adam import adam as torch_adam

from ... import _ops
from ..._base.arguments import require_number
from .._arrays import MASTER, MOMENTS
from .._options import check_betas, check_not_negative
from .._updates import Ranges, Update
from .formula import Formula, Part, groups_of

_BATCH = 1 << 26  # elements that torch's multi-tensor Adam updates together, if there are several parameters


class Deltas:
    """Sums of one step for mean and variance."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.squares = 0.0

    def add(self, total: float, squares: float, count: int) -> None:
        self.count += count
        self.total += total
        self.squares += squares

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        return max(self.squares / self.count - self.mean**2, 0.0) if self.count else 0.0


class Adam(Formula):
    """Adam and AdamW.

    Args:
        decoupled: kind of weight decay: True as in AdamW, False added to the gradient, None decoupled for 16-bit
            parameters only.
        hold_steps: number of first updates of each parameter that move its moments only.
        record_delta: collect the deltas of a step; on the CPU only.
        deltas: sums of the last step.

    Raises:
        TypeError, ValueError: an argument is of another type, or out of its range.
    """

    name = "adam"
    arrays = needed_arrays = MOMENTS
    kernel_takes_narrow = True
    settings = ("decoupled", "hold_steps", "record_delta", "deltas")

    def __init__(
        self,
        *,
        decoupled: bool | None = None,
        hold_steps: int = 0,
        record_delta: bool = False,
        deltas: Deltas | None = None,
    ) -> None:
        require_number("hold_steps", hold_steps)
        if not hold_steps >= 0:
            raise ValueError(f"hold_steps: expected 0 or more, got {hold_steps}")
        if decoupled is not None and not isinstance(decoupled, bool):
            raise TypeError(f"decoupled: expected None, True or False, got {decoupled!r}")
        self.decoupled = decoupled
        self.hold_steps = int(hold_steps)
        self.record_delta = bool(record_delta)
        self.deltas = Deltas() if deltas is None else deltas

    def check(self, options: dict[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay")
        check_betas(options)

    def numbers_of(self, group: dict[str, Any], *, is_low: bool, scale: float) -> dict[str, Any]:
        return {
            "lr": float(group["lr"]) * group.get("lr_factor", 1.0),
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "scale": scale,
            "decoupled": is_low if self.decoupled is None else self.decoupled,
            "maximize": group["maximize"],
            "folded": False,
            "hold_steps": self.hold_steps,
        }

    def operands_of(self, ranges: Ranges) -> Sequence[Any]:
        return ranges.weights, ranges.rounded, ranges.grads, *ranges.arrays, ranges.steps

    def start_step(self) -> None:
        self.deltas = Deltas()

    def compute(
        self, ranges: Ranges, parts: Sequence[Part], *, as_torch: bool = False, **options: Any
    ) -> None:
        sums = _ops.step_of_groups(
            self.name,
            self.operands_of(ranges),
            *groups_of(parts),
            as_torch=as_torch and not ranges.rounded and ranges.arrays[0][0].dtype is torch.float32,
            with_delta=self.record_delta,
            **options,
        )
        if self.record_delta:
            self.deltas.add(*sums, sum(weight.numel() for weight in ranges.weights))

    def compute_by_torch(self, updates: Sequence[Update], numbers: dict[str, Any]) -> None:
        scale = numbers["scale"]
        for now in _batches(updates, self.hold_steps):
            torch_adam(
                [u.state.get(MASTER, u.param) for u in now],
                [u.grad.float() if scale == 1 else u.grad.float() / scale for u in now],
                [u.state["exp_avg"] for u in now],
                [u.state["exp_avg_sq"] for u in now],
                [],
                [torch.tensor(float(u.state["step"] - 1), device="cpu") for u in now],
                # The same choice as torch.optim.Adam's for plain parameters.
                foreach=now[0].param.is_cuda or None,
                amsgrad=False,
                beta1=numbers["beta1"],
                beta2=numbers["beta2"],
                lr=0.0 if now[0].state["step"] <= self.hold_steps else numbers["lr"],
                weight_decay=numbers["weight_decay"],
                eps=numbers["eps"],
                maximize=numbers["maximize"],
                decoupled_weight_decay=numbers["decoupled"],
            )

    def has_kernel(self, device: torch.device) -> bool:
        # Only the kernel of the CPU computes the sums of updates.
        return super().has_kernel(device) and (device.type == "cpu" or not self.record_delta)

    def kernel_takes_fp32(self, device: torch.device) -> bool:
        return _kernel_has_torchs_bits(device)


@functools.cache
def _kernel_has_torchs_bits(device: torch.device) -> bool:
    """Whether this torch's multi-tensor Adam rounds where the kernel does; tried once, as releases may differ."""
    draw = torch.Generator(device).manual_seed(0)
    weight, exp_avg, grad = (
        torch.randn(4099, generator=draw, device=device, dtype=torch.float32) for _ in range(3)
    )
    options: dict[str, Any] = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.01, "maximize": False}
    for beta1, decoupled, step in itertools.product((0.9, 0.3), (False, True), (1, 1000)):
        ours, theirs = ([weight.clone(), exp_avg.clone(), exp_avg.square()] for _ in range(2))
        group = {"betas": (beta1, 0.999), **options}
        numbers = Adam(decoupled=decoupled).numbers_of(group, is_low=False, scale=1.0)
        lists: Sequence[Any] = [ours[0]], [], [grad], [ours[1]], [ours[2]], [step]
        _ops.step_of_groups("adam", lists, [1], [numbers], as_torch=True)
        before = torch.tensor(step - 1.0, dtype=torch.float32, device="cpu")
        torch_adam(
            [theirs[0]], [grad], [theirs[1]], [theirs[2]], [], [before],
            foreach=True, amsgrad=False, beta1=beta1, beta2=0.999, decoupled_weight_decay=decoupled, **options,
        )  # fmt: skip
        if not all(map(torch.equal, ours, theirs)):
            return False
    return True


def _batches(updates: Sequence[Update], hold_steps: int) -> Iterator[list[Update]]:
    """Returns held updates and the others, each in parts, since torch's multi-tensor Adam allocates temporaries."""
    for held in (True, False):
        part: list[Update] = []
        numel = 0
        for update in updates:
            if (update.state["step"] <= hold_steps) != held:
                continue
            if part and numel + update.param.numel() > _BATCH:
                yield part
                part, numel = [], 0
            part.append(update)
            numel += update.param.numel()
        if part:
            yield part
