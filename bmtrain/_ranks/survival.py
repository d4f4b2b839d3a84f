"""Protocol of `_survive`, which is built on optimizers, for the parts of a step that call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch


class Survival(Protocol):
    """Repeats or completes a step after the loss of a rank; see :class:`bmtrain._survive.survival.Survival`."""

    exceptions_are_losses: bool
    user_state: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]]

    def steps(self, start: int, stop: int) -> Iterator[int]: ...

    def shards(self, loop: Any) -> Iterator[Any]: ...

    def mean(self, loop: Any, values: Sequence[Any]) -> torch.Tensor | None: ...

    def add(self, manager: Any, optimizer: Any) -> None: ...

    def note_loss(self, loss: torch.Tensor) -> None: ...

    def clip(self, clip: Callable[[], torch.Tensor]) -> torch.Tensor: ...

    def scale_copies(self, params: Sequence[torch.Tensor], factor: torch.Tensor) -> None: ...

    def pass_gate(self) -> None: ...

    def step_copy(self, optimizer: Any, scale: float) -> None: ...
