"""Detection of hyperparameters, gradients and weights given to ranks, that differ between ranks.

A rank with another learning rate (of ReduceLROnPlateau and the loss of its own batch, say) trains its share of each
parameter with it, one that has dropped a gradient leaves its share as it is, and one that has not loaded the weights
that rank 0 has keeps its share of others. Ranks compare theirs in few steps, so that it costs nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import compress
from typing import Any

import torch

from .._base.deprecate import warn_once
from .._base.tensors import gradient_of
from .._C import ReduceOp
from .._ranks.agree import gather_json
from .._ranks.comm import wire_device
from ..global_var import config, context, rank
from ..parameter import DistributedParameter

_LABEL = "comparison of hyperparameters"
_GIVEN, _GRADIENTS = "weights given", "number of gradients"
_EVERY = 1024  # steps; before, in steps 4, 8, 16, ...


class OptionsWatch:
    """Compares the hyperparameters of a manager's optimizers."""

    def __init__(self) -> None:
        self._num_steps = 0
        #: Of GPUs: the result of the last comparison, and when it is there.
        self._last: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def end_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Warns on rank 0 if ranks have different ones. Collective in few steps."""
        self._num_steps = number = self._num_steps + 1
        if number < 4 or (number & (number - 1) and number % _EVERY):
            return
        ctx = context("OptimManager.step")
        if ctx.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # in a graph the host cannot wait for the numbers
        groups = [each for optimizer in optimizers for each in _groups_of(optimizer)]
        # Stages of a pipeline may have groups of their own.
        if groups and ctx.topology.world_size > 1 and ctx.survival is None and not config["pipe_enabled"]:
            self._compare(groups)

    def _compare(self, groups: list[dict[str, Any]]) -> None:
        """Compares the ranks' groups. Of GPUs the result is read in the next comparison: the host does not wait."""
        comm = context("OptimManager.step").world.comm
        device, own = wire_device(comm), zlib.crc32(repr(groups).encode())
        bounds = torch.tensor([own, -own], device="cpu", pin_memory=device.type == "cuda")
        bounds = bounds.to(device, non_blocking=True)
        comm.all_reduce(bounds, ReduceOp.MAX, _LABEL).wait()
        bounds = bounds.to("cpu", non_blocking=True)
        if device.type == "cuda":
            arrival = torch.cuda.current_stream().record_event()
            earlier, self._last = self._last, (bounds, arrival)
            if earlier is None:
                return
            bounds, arrival = earlier
            arrival.synchronize()
        highest, lowest = bounds.tolist()
        if highest != -lowest:
            _tell(groups)


def _groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Returns hyperparameters, name and number of gradients of each group with distributed parameters."""
    names = getattr(optimizer, "defaults", {"lr": None})
    return [
        {
            "of": f"group {index} of {type(optimizer).__name__}",
            _GIVEN: [getattr(p, "_given", 0) for p in group["params"]],
        }
        | {name: _number(group[name]) for name in names if name in group}
        | {_GRADIENTS: sum(gradient_of(p) is not None for p in shards)}
        for index, group in enumerate(optimizer.param_groups)
        if (shards := [p for p in group["params"] if isinstance(p, DistributedParameter)])
    ]


def _compare_known(everyone: list[list[dict[str, Any]]]) -> None:
    """Puts one checksum for a group, without parameters that a rank has written alone, in the place of several."""
    for of_ranks in zip(*everyone, strict=False):
        is_known = [None not in given for given in zip(*(group[_GIVEN] for group in of_ranks), strict=False)]
        for group in of_ranks:
            group[_GIVEN] = zlib.crc32(repr(list(compress(group[_GIVEN], is_known))).encode())


def _number(value: Any) -> Any:
    """Returns ``value`` if it is a number on the host, or some, in a form equal on all ranks; else None."""
    if isinstance(value, (tuple, list)):
        return [_number(item) for item in value]
    is_number = isinstance(value, (bool, int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu"
    )
    return float(value) if is_number else None


def _tell(groups: list[dict[str, Any]]) -> None:
    """Warns on rank 0 of the first difference of each kind. Collective."""
    everyone = gather_json(groups, _LABEL, context("OptimManager.step").world.comm)
    _compare_known(everyone)
    differences = [
        (name, f"{name} of {group['of']} is {group[name]} on rank 0 and {other[name]} on rank {number}")
        for number, others in enumerate(everyone)
        for group, other in zip(everyone[0], others, strict=False)
        for name in group
        if group["of"] == other["of"] and name in other and group[name] != other[name]
    ]
    if rank() == 0:
        for kind, remedy in _REMEDIES.items():
            told = [
                difference for name, difference in differences if _KINDS.get(name, "hyperparameters") == kind
            ]
            if told:
                text = f"OptimManager: {told[0]}{remedy}"
                warn_once(f"OptimManager.{kind}", text, stacklevel=5, category=UserWarning)


_KINDS = {_GIVEN: "weights", _GRADIENTS: "gradients"}
_REMEDIES = {
    "hyperparameters": ": each rank updates its shards of all parameters with its own. Give all ranks the same, and a "
    "schedule that follows the loss the mean over the ranks: bmtrain.distributed.all_reduce(loss, 'avg')",
    "gradients": ": a rank without one leaves its shard of a parameter as it is. Some ranks have set it to None "
    "(p.grad = None) or frozen the parameter (requires_grad): do so on all ranks or on none",
    "weights": " (checksums): BMTrainModelWrapper or load_state_dict() got other weights on other ranks, of which each "
    "rank keeps its own part, so that the model mixes them. Load weights on all ranks: rank 0 broadcasts none",
}
