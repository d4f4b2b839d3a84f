"""Detection of mistakes from the loss: equal samples on all ranks, no loss scale in it, numbers that stay inf or NaN.

[Note: Watching without waiting]
A step must not make the host wait for a GPU. The first losses are compared once, in one exchange of a few numbers, and
never again. Whether a number is finite is read from a pinned copy of it that may be some steps old: a loss that has
become NaN stays so.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .._base.deprecate import warn_once
from .._base.tensors import nodes_of
from .._C import ReduceOp
from .._engine.pipe_loss import LossCall
from ..global_var import config, context, num_losses, rank
from ..parameter import DistributedParameter

_NUM_COMPARED = 3  # losses; one may be equal by chance, or because the first layer is zero
_NUM_BAD = 3  # steps in a row; a single one may come from an odd batch


class LossWatch:
    """Checks losses and norms of a manager's steps, see [Note: Watching without waiting].

    Attributes:
        has_scaled: whether the manager has scaled a loss.
    """

    has_scaled = False  # of the class: pickled objects may have none

    def __init__(self) -> None:
        self._first_losses: list[Tensor] | None = []  # None: compared
        self._numbers = {"loss": _Number(), "gradient norm": _Number()}

    def see_loss(self, loss: Tensor) -> None:
        """Records a loss."""
        if self._first_losses is not None and len(self._first_losses) < _NUM_COMPARED:
            if 1 < num_losses() == config["pipe_size"] and _is_of_pipeline(loss):
                self._first_losses = None  # all ranks have one
            else:
                self._first_losses.append(loss.detach().to(torch.float32).reshape(()).clone())
        self._numbers["loss"].see(loss)

    def see_norm(self, norm: Tensor) -> None:
        """Records a norm of the gradients."""
        self._numbers["gradient norm"].see(norm)

    def end_step(self, parameters: Iterable[Tensor], has_loss_scale: bool) -> None:
        """Warns on rank 0 of detected mistakes. Collective, once."""
        if self._first_losses is not None and len(self._first_losses) == _NUM_COMPARED:
            losses, self._first_losses = self._first_losses, None
            # Managers of plain parameters may step on some ranks only.
            if any(isinstance(p, DistributedParameter) for p in parameters):
                _compare(losses)
        if has_loss_scale and not self.has_scaled and rank() == 0:
            warn_once(
                "OptimManager.not_scaled",
                "OptimManager.step: gradients are divided by the loss scale, but neither backward(loss) nor "
                "scale_loss(loss) of this manager was called, which multiply the loss by it: write "
                "manager.backward(loss) for loss.backward()",
                stacklevel=3,
                category=UserWarning,
            )
        for name, number in self._numbers.items():
            if number.end_step() and not has_loss_scale:
                warn_once(
                    "OptimManager.not_finite",
                    f"OptimManager: the {name} was inf or NaN in {_NUM_BAD} steps in a row, and parameters probably "
                    "are by now: continue from the last good checkpoint, with a smaller learning rate or "
                    "clip_grad_norm(). float16 needs OptimManager(loss_scale=2**15), bfloat16 does not",
                    stacklevel=3,
                    category=UserWarning,
                )


class _Number:
    """Number of consecutive steps in which a value was not finite, as far as the host knows."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._num_bad = 0

    def see(self, value: Tensor) -> None:
        if rank() != 0:
            return
        if self._copy is None:
            self._copy = torch.zeros((), dtype=torch.float32, device="cpu", pin_memory=value.is_cuda)
            # Reads the memory as it is, where a read through torch would wait for nothing but count as one that may.
            self._value = ctypes.c_float.from_address(self._copy.data_ptr())
        self._copy.copy_(value.detach().reshape(()), non_blocking=True)

    def end_step(self) -> bool:
        """Returns whether the value has been inf or NaN for too many steps."""
        if self._copy is None:
            return False
        self._num_bad = 0 if math.isfinite(self._value.value) else self._num_bad + 1
        return self._num_bad >= _NUM_BAD


def _is_of_pipeline(loss: Tensor) -> bool:
    """Whether a loss depends on one that all ranks of a pipeline have."""
    return any(isinstance(getattr(node, "call", None), LossCall) for node in nodes_of([loss]))


def _compare(losses: list[Tensor]) -> None:
    """Warns if all ranks had the same losses. Collective."""
    ctx = context("OptimManager.step")
    if num_losses() == 1 or ctx.virtual_shards:
        return
    values = torch.stack(losses).to(ctx.device)
    bounds = torch.cat([values, -values])
    ctx.world.comm.all_reduce(bounds, ReduceOp.MAX, "comparison of losses").wait()
    largest, smallest = bounds.view(2, -1).tolist()
    is_same = all(math.isfinite(a) and a == -b for a, b in zip(largest, smallest, strict=True))
    if is_same and rank() == 0:
        warn_once(
            "OptimManager.same_samples",
            f"OptimManager: the losses of all {ctx.topology.world_size} ranks were equal bit for bit in the first "
            f"{_NUM_COMPARED} backwards, as if all trained on the same samples. bmtrain.data.loader(dataset, "
            "batch_size, seed) gives each rank its own. (All ranks are seeded alike: DataLoader(shuffle=True) and "
            "torch.randint draw the same on each. A loss over all ranks' results, by all_gather, is the same on each, "
            "too: multiply it by bmtrain.world_size(), and apply a learnt temperature before the gather.)",
            stacklevel=4,
            category=UserWarning,
        )
