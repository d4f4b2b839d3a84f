"""Base class of places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..._base.tensors import gradient_of
from .._arrays import allocate
from .._narrow import dtype_for
from ..formulas import Formula, Part

#: The group dicts of an optimizer.
Groups = Sequence[Mapping[str, Any]]
#: The state of an optimizer, by parameter.
States = dict[Tensor, dict[str, Any]]


class Place:
    """Where the state of an optimizer lies and its updates are computed.

    A subclass defines `apply`, and overrides what differs from state on the device of the parameters.

    Args:
        formula: the formula of the optimizer.
        state_dtype: dtype of the formula's arrays, see `read_state_dtype`.
    """

    #: Arguments of the constructor, kept as attributes, that copies and pickles of an optimizer have.
    settings: ClassVar[tuple[str, ...]] = ("state_dtype",)

    #: Whether fp32 parameters get the bits of torch's own optimizer, also where these differ from the CPU's kernels'.
    as_torch = False
    #: Bytes of memory that state on drives passes through, and the most of whole matrices in the last step.
    disk_buffer_bytes = owner_bytes = 0

    def __init__(self, formula: Formula, *, state_dtype: torch.dtype = torch.float32) -> None:
        self._formula = formula
        self.state_dtype = state_dtype

    # ---- state

    def has_master(self, p: Tensor) -> bool:
        """Whether the state of ``p`` has an fp32 copy of its value."""
        return p.dtype != torch.float32

    def shares_master(self, p: Tensor) -> bool:
        """Whether that copy is the parameter itself."""
        return False

    def device_of(self, p: Tensor) -> torch.device:
        """Returns the device of the state of ``p``."""
        return p.device

    def dtype_of(self, p: Tensor) -> torch.dtype:
        """Returns the dtype of the arrays of ``p``."""
        return dtype_for(p, self.state_dtype)

    def is_on_disk(self, p: Tensor) -> bool:
        """Whether the arrays of ``p`` are in a file."""
        return False

    def reserve(self, parameters: Sequence[Tensor]) -> None:
        """Called with the parameters of a new group; collective where `is_on_disk` may be true."""

    def allocate(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> list[list[Tensor]]:
        """Returns arrays of zeros, one tensor for each parameter, see `_arrays.allocate`."""
        return allocate([p.shape for p in parameters], dtypes, device)

    def note_write(self, p: Tensor) -> None:
        """Called before arrays of ``p`` are written otherwise than by a step."""

    def show_state(self) -> None:
        """Called before the state is handed out, for reading and writing."""
        self.finish()

    def note_new_state(self, parameters: Sequence[Tensor], names: Sequence[str], states: States) -> None:
        """Called for new state entries of parameters, in allocations without other references."""

    def note_new_group(self) -> None:
        """Called when the optimizer has got another group."""

    # ---- a step

    def start_step(self, groups: Groups, states: States) -> None:
        """Called at the start of a step."""

    def begin_updates(self, parameters: Sequence[Tensor], *, is_early: bool) -> None:
        """Called before the updates of `apply` are made: the parameters' versions do not count these yet."""

    def apply(self, parts: list[Part], states: States, *, is_early: bool) -> None:
        """Computes a step (which may have no updates), or its early part.

        The state's ``step`` and the parameters' versions already count it.

        Args:
            parts: the updates.
            states: states of all parameters of the optimizer.
            is_early: more parts of the step follow.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Waits until no update is pending."""

    def zero_grad(self, parameters: Sequence[Tensor], set_to_none: bool) -> bool:
        """Fills gradients with zeros, or sets them to None, if updates are pending; returns whether it did."""
        return False


def zero_gradient(p: Any, set_to_none: bool) -> None:
    """Fills a gradient with zeros, as torch's zero_grad does, or sets it to None."""
    if set_to_none:
        p.grad = None
    elif p.numel() and (gradient := gradient_of(p)) is not None:
        if getattr(p, "_sent", None) is not None:
            p._sent.drop()
        if gradient.grad_fn is not None:
            gradient.detach_()
        else:
            gradient.requires_grad_(False)
        gradient.zero_()
