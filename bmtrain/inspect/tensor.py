"""Recording of intermediate tensors of a model, inside Blocks too."""

from __future__ import annotations

from typing import Any

import torch

from .._base.arguments import require_tensor, require_text
from .._engine.engine import current_engine
from .._engine.recording import place_outside, record_again, running_call
from .._engine.run_state import active_recorder
from .._ranks import context as _context
from .._ranks.comm import wire_device
from ..global_var import context
from ._statistics import mean_and_variance, smallest_and_largest

__all__ = ["InspectTensor", "InspectTensorManager", "inspect_tensor", "record_tensor"]


class InspectTensor:
    """The tensors passed to :func:`record_tensor`, in forward order.

    ``summary`` is a list of dicts with ``name`` and ``group`` as given, ``summary_name``, ``shape``,
    ``requires_grad`` and ``tensor``, which is part of the autograd graph; its ``grad`` is filled by backward.
    """

    def __init__(self) -> None:
        self._summary: list[dict[str, Any]] = []

    @property
    def summary(self) -> list[dict[str, Any]]:
        """The recorded entries, in forward order."""
        return self._summary

    def get_tensor(
        self, name: str, group: str | None = None, index: int | None = None
    ) -> torch.Tensor | None:
        """The recorded tensor of that group and name; with ``index`` that occurrence of it, else the first.

        Args:
            name: as given to :func:`record_tensor`.
            group: the same.
            index: 0 for the first time that this group and name were recorded, 1 for the second, ...

        Returns:
            This rank's tensor, part of the graph; None if there is none.

        Raises:
            TypeError: ``index`` is no integer.
        """
        found = [item for item in self._summary if item["name"] == name and item["group"] == group]
        if index is not None and not isinstance(index, int):
            raise TypeError(f"index: expected an integer, got {index!r:.80} ({type(index).__name__})")
        wanted = 0 if index is None else index
        return found[wanted]["tensor"] if 0 <= wanted < len(found) else None

    def get_summary(self) -> list[dict[str, Any]]:
        """Statistics of the recorded tensors over all ranks. Collective; all ranks must have recorded equally many.

        Returns:
            one dict per entry: ``name`` (``"<group>.<i>.<name>"``, without a group ``"<i>.<name>"``, where ``i`` counts
            the entries of that group and name), ``shape`` (dim 0 counted over all ranks), ``min``, ``max``, ``mean``
            and ``std`` (from the mean of the variances of ranks that have some: no rank without elements counts, nor a
            variance of one element), ``grad_mean`` and ``grad_std`` (None without gradient).

        Raises:
            ValueError: if the ranks have recorded different numbers of tensors.
        """
        comm = context("get_summary()").world.comm
        per_rank = _gathered([_statistics_of(item["tensor"]) for item in self._summary])
        lines = []
        for number, item in enumerate(self._summary):
            of_ranks = per_rank[:, number]
            of_ranks = of_ranks[_those_of(of_ranks, elements=1)]
            smallest, largest, mean, variance, grad_mean, grad_variance, has_gradient, _ = of_ranks.T
            varies = _those_of(of_ranks, elements=2)
            any_gradient = bool(has_gradient.any())
            shape = item["shape"]
            lines.append(
                {
                    "name": item["summary_name"],
                    "min": float(smallest.min()),
                    "max": float(largest.max()),
                    "mean": float(mean.mean()),
                    "std": float(variance[varies].mean().sqrt()),
                    "shape": (shape[0] * comm.size, *shape[1:]) if shape else (),
                    "grad_mean": float(grad_mean.mean()) if any_gradient else None,
                    "grad_std": float(grad_variance[varies].mean().sqrt()) if any_gradient else None,
                }
            )
        return lines

    def add(self, tensor: torch.Tensor, name: str, group: str | None) -> dict[str, Any]:
        """A new entry of the summary."""
        count = sum(item["name"] == name and item["group"] == group for item in self._summary)
        entry = {
            "name": name,
            "group": group,
            "summary_name": f"{count}.{name}" if group is None else f"{group}.{count}.{name}",
            "shape": tuple(tensor.shape),
            "requires_grad": tensor.requires_grad,
            "tensor": tensor,
        }
        self._summary.append(entry)
        return entry


class InspectTensorManager:
    """The context of :func:`inspect_tensor`."""

    def __init__(self) -> None:
        self._inspector = InspectTensor()
        self._token: Any = None

    def __enter__(self) -> InspectTensor:
        if active_recorder.get() is not None:
            raise RuntimeError("inspect_tensor() is active already: its contexts cannot be nested")
        self._token = active_recorder.set(self._inspector)
        return self._inspector

    def __exit__(self, *error: object) -> None:
        active_recorder.reset(self._token)


def inspect_tensor() -> InspectTensorManager:
    """A context in which :func:`record_tensor` records.

    Raises:
        RuntimeError: on entering, if such a context is active.

    Example:
        >>> import torch
        >>> with inspect_tensor() as inspector:
        ...     record_tensor(torch.ones(2, 3), "hidden")
        >>> inspector.summary[0]["summary_name"], inspector.get_tensor("hidden").shape
        ('0.hidden', torch.Size([2, 3]))
    """
    return InspectTensorManager()


def record_tensor(x: torch.Tensor, name: str, group: str | None = None) -> None:
    """Records a tensor, and its gradient, if a context of :func:`inspect_tensor` is active.

    In a Block, the recorded tensor is the one outside of the Block: it may be used in a loss. Running a
    forward again in backward records nothing.

    Args:
        x: a tensor; not a parameter.
        name: its name.
        group: put in front of the name in summaries.

    Raises:
        RuntimeError: if ``x`` is a parameter.
        TypeError: if ``x`` is not a tensor, or ``name`` not a str.

    Example:
        >>> import torch
        >>> with inspect_tensor() as inspector:
        ...     record_tensor(torch.tensor([1.0, 3.0]), "hidden", group="encoder")
        >>> [(row["name"], row["mean"]) for row in inspector.get_summary()]
        [('encoder.0.hidden', 2.0)]
    """
    current = _context.current()
    call = running_call(current_engine(current)) if current is not None else None
    if torch._C._current_graph_task_id() != -1:  # in a backward: a forward that runs again
        record_again(call, x)
        return
    recorder = active_recorder.get()
    if recorder is None:
        return
    require_tensor("x", x)
    require_text("name", name)
    if isinstance(x, torch.nn.Parameter):
        raise RuntimeError(f"record_tensor({name!r}): parameters are inspected with inspect_model()")
    if not torch.is_grad_enabled():
        x = x.detach()
    place_outside(recorder.add(x, name, group), x, None if current is None else current_engine(current))


def _statistics_of(tensor: torch.Tensor) -> list[float]:
    gradient = tensor.grad if tensor.requires_grad else None
    of_gradient = (0.0, 0.0) if gradient is None else mean_and_variance(gradient)
    return [
        *smallest_and_largest(tensor),
        *mean_and_variance(tensor),
        *of_gradient,
        float(gradient is not None),
        tensor.numel(),
    ]


def _those_of(of_ranks: torch.Tensor, *, elements: int) -> torch.Tensor:
    """Which ranks have as many elements; all, if none has."""
    has_enough = of_ranks[:, -1] >= elements
    return has_enough if has_enough.any() else ~has_enough


def _gathered(rows: list[list[float]]) -> torch.Tensor:
    """(ranks, entries, numbers), fp64."""
    comm = context().world.comm
    device = wire_device(comm)
    counts = torch.empty(comm.size, dtype=torch.int64, device=device)
    comm.all_gather(counts, torch.tensor([len(rows)], device=device), "get_summary").wait()
    if len(set(counts.tolist())) > 1:
        raise ValueError(
            f"get_summary(): expected as many recorded tensors on all ranks, got {counts.tolist()}"
        )
    mine = torch.tensor(rows, dtype=torch.float64, device=device).reshape(len(rows), 8)
    everyone = torch.empty(comm.size, *mine.shape, dtype=torch.float64, device=device)
    if rows:
        comm.all_gather(everyone.view(-1), mine.view(-1), "get_summary").wait()
    return everyone.cpu()
