"""What a block call keeps to run its forward a second time, in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from .modes import ModeSnapshot, NoAutocastCache, trainable_as
from .recompute import ModuleState, SavedTensors, StopForward
from .tree import replace_arguments, replace_tensors, snapshot, tensors_of

if TYPE_CHECKING:
    from .host_activations import HostActivations
    from .runtime import BlockRuntime

__all__ = ["Replay"]


class Replay:
    """The arguments and the state that a first run finds, and the places of what it saves for backward.

    Args:
        runtime: the block's.
        modules: those that take part.
        args, kwargs: of the inner forward.
        has_state: whether they hold something that can be written to.
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
        self._away: list[Any] | None = None  # what stands for the leaves on the host

    def first_run(self, run: Callable[[Any, dict[str, Any]], Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of ``run(args, kwargs)``, whose saved tensors leave empty slots."""
        with self._saved.record():
            result = run(args, kwargs)
        self._before.after_forward()
        return result

    def put_away(self, host: HostActivations, inner: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
        """Leaves what is kept to ``host``; ``leaves`` stand for the tensors ``inner`` from now on."""
        self._away = [host.put(tensor) for tensor in inner]
        known = dict(zip(map(id, inner), leaves, strict=True))
        self._arguments = replace_tensors(self._arguments, lambda tensor: known.get(id(tensor), tensor))
        self._saved.put_away(host)

    def leaves_of_second_run(
        self, leaves: list[torch.Tensor], host: HostActivations | None
    ) -> list[torch.Tensor]:
        """New leaves with the values of those of the first run."""
        sources = leaves if host is None or self._away is None else map(host.take, self._away)
        return [source.detach().requires_grad_() for source in sources]

    def second_run(
        self,
        run: Callable[[Any, dict[str, Any]], Any],
        trains: list[list[bool]],
        fresh: dict[int, torch.Tensor],
    ) -> tuple[Any, Any, Any]:
        """Runs the forward again until everything that the first run saved is there.

        Args:
            run: the forward.
            trains: which parameters required grad in the first run.
            fresh: by identity of a leaf of the first run, what takes its place.

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
        """The tensors that wait for the second run."""
        return chain(tensors_of(self._arguments), self._saved.kept_results())

    def drop(self, *, for_good: bool) -> None:
        """Frees what the second run has saved; ``for_good``, if there will be no other, also what was kept for it."""
        self._saved.drop(for_good=for_good)
