"""Sharded parameters: initialisation as in one process, grouping by label, and lists of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ._model.state_dict import install_hooks_below
from .global_var import context
from .layer import CONTAINERS, DistributedModule
from .parameter import DistributedParameter, load_full_value

__all__ = ["distinct_parameters", "grouped_parameters", "init_parameters"]


def _roots(modules: torch.nn.Module | Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Returns the given module or modules as a list.

    Raises:
        TypeError: an object is not a module.
    """
    given = (
        modules if isinstance(modules, Iterable) and not isinstance(modules, torch.nn.Module) else [modules]
    )
    roots = list(given)
    for root in roots:
        if not isinstance(root, torch.nn.Module):
            raise TypeError(
                f"module: expected a torch.nn.Module or several, got {root!r:.80} ({type(root).__name__})"
            )
    return roots


def distinct_parameters(
    modules: torch.nn.Module | Iterable[torch.nn.Module],
) -> Iterator[DistributedParameter]:
    """Returns the distributed parameters of modules, each once, in the order of `named_modules()`."""
    seen: set[int] = set()
    for root in _roots(modules):
        for _, module in root.named_modules():
            for param in module._parameters.values():
                if isinstance(param, DistributedParameter) and id(param) not in seen:
                    seen.add(id(param))
                    yield param


def init_parameters(module: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
    """Initialises every distributed parameter that has an ``init_method``, as a single process would.

    Modules are visited as ``named_modules()`` gives them, parameters in order of registration, each once. The
    initialiser runs on a temporary full tensor of which this rank keeps its shard, so random numbers are drawn exactly
    as a single process draws them, and equal seeds give equal weights at any world size. Replicas of a
    Block at level 0 are made equal even if the seeds of their ranks differ. A parameter on the meta device gets its
    shard; without an ``init_method`` it stays there. Plain modules that hold distributed parameters save and load full
    tensors from now on. All ranks call it with the same modules.

    Args:
        module: a module, a Block, a list of either, or an iterable of modules.

    Raises:
        TypeError: something else is among them.
        RuntimeError: before :func:`bmtrain.init_distributed`.

    Example:
        >>> layer = bmtrain.nn.Linear(2, 3)  # xavier_normal_ for the weight, zeros for the bias
        >>> bmtrain.init_parameters(layer)
        >>> layer.bias.tolist()
        [0.0, 0.0, 0.0]
    """
    device = context().device
    roots = _roots(module)
    for root in roots:
        install_hooks_below(root)
    with torch.no_grad():
        for param in distinct_parameters(roots):
            if param._init_method is not None:
                full = torch.empty(param._tp_original_shape, dtype=param.dtype, device=device)
                param._init_method(full)
                load_full_value(param, full)
                param._spec.make_replicas_equal(param, param._label)


def grouped_parameters(
    module: torch.nn.Module | Iterable[torch.nn.Module],
) -> Iterator[tuple[str | None, list[DistributedParameter]]]:
    """Yields ``(group label or None, parameters)`` for the distributed parameters of ``module``.

    Args:
        module: as for :func:`init_parameters`.

    Raises:
        TypeError: something else is among them.

    Example:
        >>> [(group, len(parameters)) for group, parameters in bmtrain.grouped_parameters(bmtrain.nn.Linear(2, 3))]
        [(None, 2)]
    """
    groups: dict[str | None, list[DistributedParameter]] = {}
    for param in distinct_parameters(module):
        groups.setdefault(param.group, []).append(param)
    yield from groups.items()


class DistributedParameterList(DistributedModule, torch.nn.ParameterList):
    """A ``torch.nn.ParameterList`` in a distributed module, whose items read as full tensors."""


class DistributedParameterDict(DistributedModule, torch.nn.ParameterDict):
    """A ``torch.nn.ParameterDict`` in a distributed module, whose items read as full tensors."""


CONTAINERS[torch.nn.ParameterList] = DistributedParameterList
CONTAINERS[torch.nn.ParameterDict] = DistributedParameterDict
