"""State of a block call for running its forward a second time, in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from .._base.tree import replace_arguments, replace_tensors, snapshot, tensors_of
from .modes import ModeSnapshot, NoAutocastCache, trainable_as
from .recompute import ModuleState, SavedTensors, StopForward

if TYPE_CHECKING:
    from .host_activations import HostActivations
    from .runtime import BlockRuntime

__all__ = ["Replay"]


class Replay:
    """Arguments and state at the start of a first run, and slots of the tensors it saves for backward.

    Args:
        runtime: runtime of the block.
        modules: the modules that take part.
        args, kwargs: arguments of the inner forward.
        has_state: whether the arguments hold objects that can be written to.
    """

    def __init__(
        self, runtime: BlockRuntime, modules: ModuleState, args: Any, kwargs: dict[str, Any], has_state: bool
    ) -> None:
        self._runtime = runtime
        self._modules = modules
        self._has_state = has_state
        self._arguments = snapshot((args, kwargs)) if has_state else (args, kwargs)
        self._modes = ModeSnapshot(runtime.engine.device)
        self._before = modules.before_forward()
        self._saved = SavedTensors(runtime)
        self._away: list[Any] | None = None  # handles of the offloaded leaves

    def first_run(self, run: Callable[[Any, dict[str, Any]], Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Returns the result of ``run(args, kwargs)``, whose saved tensors are replaced by empty slots."""
        with self._saved.record():
            result = run(args, kwargs)
        self._before.after_forward()
        return result

    def put_away(self, host: HostActivations, inner: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
        """Moves the kept tensors to ``host``; ``leaves`` replace the tensors ``inner`` from then on."""
        self._away = [host.put(tensor) for tensor in inner]
        known = dict(zip(map(id, inner), leaves, strict=True))
        self._arguments = replace_tensors(self._arguments, lambda tensor: known.get(id(tensor), tensor))
        self._saved.put_away(host)

    def leaves_of_second_run(
        self, leaves: list[torch.Tensor], host: HostActivations | None
    ) -> list[torch.Tensor]:
        """Returns new leaves with the values of the first run's leaves."""
        sources = leaves if host is None or self._away is None else map(host.take, self._away)
        return [source.detach().requires_grad_() for source in sources]

    def second_run(
        self,
        run: Callable[[Any, dict[str, Any]], Any],
        trains: list[list[bool]],
        fresh: dict[int, torch.Tensor],
    ) -> tuple[Any, Any, Any]:
        """Runs the forward again until all tensors that the first run saved are computed.

        Args:
            run: the forward.
            trains: ``requires_grad`` of the parameters in the first run.
            fresh: replacements of the first run's leaves, by their identity.

        Returns:
            (arguments, keyword arguments, result); the result is None if the run stopped early.
        """
        args, kwargs = snapshot(self._arguments) if self._has_state else self._arguments
        args, kwargs = replace_arguments(args, kwargs, lambda tensor: fresh.get(id(tensor), tensor))
        with (
            self._runtime.engine.running_again(),
            NoAutocastCache(),
            self._modes.restored(),
            self._before.restored(self._runtime.label),
            trainable_as(self._runtime, trains),
            torch.enable_grad(),
            self._saved.refill(stop_early=not self._modules.has_forward_hooks()),
        ):
            try:
                return args, kwargs, run(args, kwargs)
            except StopForward:
                return args, kwargs, None

    @property
    def is_complete(self) -> bool:
        """Whether the graph of the first run can be differentiated."""
        return self._saved.is_complete

    def kept(self) -> Iterator[torch.Tensor]:
        """The tensors kept for the second run."""
        return chain(tensors_of(self._arguments), self._saved.kept_results())

    def drop(self, *, for_good: bool) -> None:
        """Frees the tensors that the second run has saved; ``for_good`` (no further run) also the tensors kept."""
        self._saved.drop(for_good=for_good)
