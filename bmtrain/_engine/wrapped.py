"""Mistakes in scripts with wrapped models: plain parameters added later, and sums of different shards."""

from __future__ import annotations

import warnings
import weakref

import torch

from .._base.tensors import data_of, gradient_of
from ..global_var import rank, world_size
from ..parameter import DistributedParameter

_NUM_NAMED = 4


class WrappedModels:
    """Wrapped models, and whether parameters were put into modules since the last optimizer step."""

    def __init__(self) -> None:
        #: With the names that were reported.
        self._roots: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()
        self._may_have_grown = False

    def add(self, root: torch.nn.Module) -> None:
        """Records a model, all parameters of which are distributed."""
        self._roots.setdefault(root, set())

    def note_growth(self) -> None:
        """Records that a plain parameter, or a module, was put into some module."""
        self._may_have_grown = True

    def check_step(self) -> None:
        """Warns on rank 0 of plain parameters in the models; looks for them only if there may be new ones."""
        if not self._may_have_grown:
            return
        self._may_have_grown = False
        if rank() != 0 or world_size() == 1:
            return
        for root, known in self._roots.items():
            names = [name for name in _plain_names(root) if name not in known]
            known.update(names)
            if names:
                _warn(names)

    def refuse_shard(self, collective: str, x: torch.Tensor) -> None:
        """Raises RuntimeError if the ``x`` of a collective over elements is a shard of a model, or of its gradient."""
        if len(x.shape) != 1 or world_size() == 1:
            return
        found = (x.data_ptr(), x.numel())
        for root in self._roots:
            for name, param in torch.nn.Module.named_parameters(root):
                if (
                    not isinstance(param, DistributedParameter)
                    or param._spec.group.size == 1
                    or param._is_full()
                ):
                    continue
                gradient = gradient_of(param)
                of_gradient = gradient is not None and found == (gradient.data_ptr(), gradient.numel())
                if of_gradient or found == (data_of(param).data_ptr(), param.numel()):
                    raise RuntimeError(
                        f"{collective} of this rank's shard of {name}{' (its gradient)' * of_gradient}: ranks have "
                        "different parts of a parameter, which would be mixed. Leave it out: backward() sums gradients "
                        "over the ranks (OptimManager.backward averages them), and no rank has other parameters"
                    )


def _plain_names(root: torch.nn.Module) -> list[str]:
    return [
        name
        for name, param in torch.nn.Module.named_parameters(root)
        if param.requires_grad and not isinstance(param, DistributedParameter)
    ]


def _warn(names: list[str]) -> None:
    listed = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
    warnings.warn(
        f"{len(names)} plain parameters were put into the model after it was wrapped: {listed}. Neither their values "
        f"nor their gradients are synchronised: each of the {world_size()} ranks trains a copy of its own. Call "
        "BMTrainModelWrapper(model) again, which makes them distributed, and make the optimizer after that",
        stacklevel=3,
    )
