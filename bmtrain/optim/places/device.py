"""State on the device of the parameters, and updates computed there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..._base.tensors import data_of
from .._arrays import MASTER
from .._narrow import random_bits, store_values, values_of
from .._updates import Update
from ..formulas import Part
from .place import Place, States
from .ranges import compute_alike, compute_on_host, split


class OnDevice(Place):
    """The device of the parameters; updates are computed by the core's kernels where available, else by torch."""

    as_torch = True

    def apply(self, parts: list[Part], states: States, *, is_early: bool) -> None:
        on_host, elsewhere = split(parts, lambda _, u: u.param.is_cpu)
        narrow, wide = split(elsewhere, is_narrow)
        compute_on_host(on_host, as_torch=self.as_torch)
        self._compute(wide)
        by_kernel, by_torch = split(narrow, self._has_kernel)
        compute_alike(by_kernel)
        for part in by_torch:
            for update in part.updates:
                in_8_bits = update.state[part.names[0]].dtype is torch.uint8
                numbers = {**part.numbers, "folded": in_8_bits}
                with widened(update, part.names) as one:
                    self._compute([part._replace(updates=[one], numbers=numbers)])

    def _compute(self, parts: Sequence[Part]) -> None:
        by_kernel, by_torch = split(parts, self._has_kernel)
        compute_alike(by_kernel, as_torch=self.as_torch)
        apply_by_torch(by_torch)

    def _has_kernel(self, part: Part, update: Update) -> bool:
        """Whether the core has a kernel for the parameter, on a GPU."""
        param, grad, formula = update.param, update.grad, part.formula
        if not formula.has_kernel(param.device):
            return False
        takes = True
        if is_narrow(part, update):
            takes = formula.kernel_takes_narrow
        elif self.as_torch and param.dtype is torch.float32:
            takes = formula.kernel_takes_fp32(param.device)
        return (
            takes
            and grad.dtype in (torch.float32, torch.float16, torch.bfloat16)
            and param.is_contiguous()
            and grad.is_contiguous()
            and update.state.get(MASTER, param).device == grad.device == param.device
        )


def is_narrow(part: Part, update: Update) -> bool:
    """Whether an array of the state is narrower than fp32."""
    return any(update.state[name].dtype is not torch.float32 for name in part.names)


@contextmanager
def widened(update: Update, names: Sequence[str]) -> Iterator[Update]:
    """Yields an update with its moments in fp32; when the block ends, they are rounded as the CPU's kernels do it."""
    state = update.state
    wide = {name: values_of(state[name], name, update.param.shape).float() for name in names}
    before = state.get(MASTER, data_of(update.param)).clone()
    yield update._replace(state={**state, **wide})
    random = random_bits(state[names[0]].dtype, before, wide[names[0]], state["step"])
    for name in names:
        store_values(state[name], wide[name], name, random)


def apply_by_torch(parts: Sequence[Part]) -> None:
    """Computes updates by operations of torch."""
    for part in parts:
        part.formula.compute_by_torch(part.updates, part.numbers)
        for u in part.updates:
            if MASTER in u.state:
                data_of(u.param).copy_(u.state[MASTER])
