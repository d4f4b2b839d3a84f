"""Recording of tensors inside a pipeline.

Each stage computes some layers on all ranks' batches; each rank records all layers for its own batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .._ranks.agree import broadcast_json
from .._ranks.context import Group
from .._shards.stage import collect_batches
from .engine import Engine
from .recording import Recorder, TotalGradient, place_outside

#: Distributes a stage's tensor for all ranks of the pipe group; arguments: (whole or None, stage).
_OwnPart = Callable[[torch.Tensor | None, int], torch.Tensor]


class _Spec(NamedTuple):
    """Description of one recorded tensor of a pipeline call, known to all stages."""

    stage: int
    number: int  # among those of its stage
    name: str
    group: str | None
    requires_grad: bool
    is_scalar: bool


class StageRecordings:
    """The tensors recorded in one pipeline call.

    A tensor of a layer is the concatenation over its micro-batches. For a tensor without a batch dimension (its dim 0
    does not divide, or it has none) the value of the first micro-batch is used, without gradient.
    """

    def __init__(self, pipe: Group, recorder: Recorder) -> None:
        self._pipe = pipe
        self._recorder = recorder
        self._micros: list[list[dict[str, Any]]] = []  # this stage's entries
        self._totals: list[TotalGradient | None] = []
        self.specs: list[_Spec] = []

    def add(self, tensor: torch.Tensor, name: str, group: str | None) -> dict[str, Any]:
        """Adds an entry to the running micro-batch."""
        entry = {"name": name, "group": group, "tensor": tensor}
        self._micros[-1].append(entry)
        return entry

    def begin_micro(self) -> None:
        """Starts the entries of the next micro-batch."""
        self._micros.append([])

    # ---- forward

    def hand_out(self, own_part: _OwnPart) -> list[torch.Tensor]:
        """Returns this rank's part of all recorded tensors, in layer order. Collective over the pipe group."""
        for stage in range(self._pipe.size):
            told = broadcast_json(self._describe(), stage, "pipe.record", self._pipe.comm)
            if told is None:
                raise ValueError(
                    f"stage {stage} of the pipeline recorded other tensors in some micro-batches"
                )
            self.specs += [_Spec(stage, number, *fields) for number, fields in enumerate(told)]
        parts = []
        for spec in self.specs:
            part = own_part(self._whole(spec) if spec.stage == self._pipe.rank else None, spec.stage)
            parts.append(part.reshape(()) if spec.is_scalar else part)
        return parts

    def _describe(self) -> list[Any] | None:
        if len({len(entries) for entries in self._micros}) > 1:
            return None
        fields = []
        for number, entry in enumerate(self._micros[0]):
            tensor = entry["tensor"]
            trained = tensor.requires_grad and self._goes_with_batch(number)
            fields.append((entry["name"], entry["group"], trained, tensor.dim() == 0))
        return fields

    def _tensors(self, number: int) -> list[torch.Tensor]:
        return [entries[number]["tensor"] for entries in self._micros]

    def _goes_with_batch(self, number: int) -> bool:
        tensors = self._tensors(number)
        return tensors[0].dim() > 0 and sum(len(tensor) for tensor in tensors) % self._pipe.size == 0

    def _whole(self, spec: _Spec) -> torch.Tensor:
        tensors = [tensor.detach() for tensor in self._tensors(spec.number)]
        if self._goes_with_batch(spec.number):
            return torch.cat(tensors)
        first = tensors[0].reshape(1) if spec.is_scalar else tensors[0]
        return torch.cat([first] * self._pipe.size)

    def deliver(self, parts: Sequence[torch.Tensor], engine: Engine) -> None:
        """Adds the parts, which are attached to the caller's graph, to the recorder."""
        for spec, part in zip(self.specs, parts, strict=True):
            self._totals.append(TotalGradient(part) if part.requires_grad else None)
            place_outside(self._recorder.add(part, spec.name, spec.group), part, engine)

    # ---- backward

    def take_gradients(self, gradients: Sequence[torch.Tensor | None]) -> int:
        """Sends the gradients from outside to the stages of their tensors. Collective.

        Args:
            gradients: the outer gradients; None for the same tensors on all ranks.

        Returns:
            The last stage that received one, or -1.
        """
        self._roots: list[tuple[int, Sequence[torch.Tensor]]] = []
        reached = -1
        for spec, gradient in zip(self.specs, gradients, strict=True):
            if spec.requires_grad and gradient is not None:
                reached = max(reached, spec.stage)
                whole = collect_batches(self._pipe, gradient, target=spec.stage)
                if whole is not None:
                    sizes = [len(tensor) for tensor in self._tensors(spec.number)]
                    self._roots.append((spec.number, whole.split(sizes)))
        return reached

    def roots(self, micro: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns tensors of a micro-batch, and their gradients from outside."""
        tensors = [self._micros[micro][number]["tensor"] for number, _ in self._roots]
        return tensors, [pieces[micro] for _, pieces in self._roots]

    def hand_over_gradients(self, own_part: _OwnPart) -> None:
        """Adds the total gradients to the tensors outside. Collective over the pipe group."""
        mine = [
            any(tensor.grad is not None for tensor in self._tensors(number))
            for number in range(len(self._micros[0]))
        ]
        known = [
            broadcast_json(mine, stage, "pipe.record", self._pipe.comm) for stage in range(self._pipe.size)
        ]
        for spec, total in zip(self.specs, self._totals, strict=True):
            if spec.requires_grad and known[spec.stage][spec.number]:
                whole = self._whole_gradient(spec) if spec.stage == self._pipe.rank else None
                part = own_part(whole, spec.stage)
                if total is not None:
                    total.add(part)
        for entries in self._micros:
            for entry in entries:  # one tensor may be in several: cleared when all have been given
                if entry["tensor"].requires_grad:
                    entry["tensor"].grad = None

    def _whole_gradient(self, spec: _Spec) -> torch.Tensor:
        tensors = self._tensors(spec.number)
        return torch.cat([torch.zeros_like(t) if t.grad is None else t.grad for t in tensors])
