"""Warning about parameters of new layers, filled with NaN, that are used before initialisation."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping

import torch

from .._base.opaque import opaque
from ..global_var import rank
from ..parameter import DistributedParameter

_NUM_NAMED = 4


class Uninitialised:
    """The parameters made without values, until a forward or an optimizer step uses them."""

    def __init__(self) -> None:
        #: Parameters that no forward has used.
        self.before_forward: list[weakref.ref[DistributedParameter]] = []
        #: Parameters that no step has updated.
        self.before_step: list[weakref.ref[DistributedParameter]] = []

    def add(self, param: DistributedParameter) -> None:
        """Fills a new parameter with NaN, and records it."""
        if param.is_meta or not param.is_floating_point():
            return
        param.detach().fill_(float("nan"))
        self.before_forward.append(weakref.ref(param))
        self.before_step.append(weakref.ref(param))

    @opaque
    def check_forward(self, root: torch.nn.Module) -> None:
        """Warns of parameters below ``root``, before its first forward since parameters were made."""
        waiting, self.before_forward = self.before_forward, []
        names = {id(param): name for name, param in root.named_parameters()}
        self.before_step = [reference for reference in self.before_step if id(reference()) not in names]
        self._warn(waiting, names)

    def check_step(self, params: Iterable[torch.Tensor]) -> None:
        """Warns of parameters among ``params``, before they are updated."""
        waiting, self.before_step = self.before_step, []
        self._warn(waiting, {id(param): f"parameter {index}" for index, param in enumerate(params)})

    def _warn(self, waiting: Iterable[weakref.ref[DistributedParameter]], names: Mapping[int, str]) -> None:
        if rank() != 0:
            return
        params = [param for reference in waiting if (param := reference()) is not None and id(param) in names]
        parts = {id(param): param._own_part().detach() for param in params if not param.is_meta}
        firsts = {number: part[0].float() for number, part in parts.items() if part.numel()}
        if not firsts:
            return
        is_blank = dict(zip(firsts, torch.stack(list(firsts.values())).isnan().tolist(), strict=True))
        if not any(is_blank.values()):
            return
        found = [
            names[number] for number in parts if is_blank.get(number, True)
        ]  # of some parameters this rank has no element
        listed = ", ".join(found[:_NUM_NAMED]) + (", ..." if len(found) > _NUM_NAMED else "")
        warnings.warn(
            f"{len(found)} parameters of bmtrain.nn layers were never initialised and are NaN: {listed}; call "
            "bmtrain.init_parameters(model) once the model is built, or load weights",
            stacklevel=2,
        )
