"""An ``Accelerator`` for sharded models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import accelerate
import torch

from .._engine.policy import Recompute
from ..optim._state import load_optimizer_state, optimizer_state
from ..optim._suitability import adopt_optimizer
from ..optim.clip_grad import clip_gradients
from ..wrapper import BMTrainModelWrapper
from .loss_scale import SharedScaler
from .sharding import plain_tensors, shard_model

__all__ = ["Accelerator"]


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` whose models are sharded by this library.

    ``prepare`` shards a model, and gives the shards to the optimizers in the same call; a model that is wrapped before
    its optimizer is made stays as it is. Gradients are of the mean of the ranks' losses, as with
    DistributedDataParallel. They are reduced in every backward, also inside ``accumulate()``, as whole gradients are
    what does not fit.

    Raises:
        ValueError: for DeepSpeed, FSDP and Megatron plugins, and for optimizers that compute over whole tensors.

    Example:
        >>> from bmtrain.integrations.accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> accelerator.backward(model(torch.ones(2, 3)).sum())
        >>> accelerator.clip_grad_norm_(model.parameters(), 1.0) > 0
        tensor(True)
        >>> optimizer.step()
    """

    scaler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adopt()

    def adopt(self) -> None:
        """Refuses what two libraries would do at once, and makes all ranks share the loss scale of fp16.

        Raises:
            ValueError: see the class.
        """
        kind = self.distributed_type
        if kind not in _DATA_PARALLEL:
            raise ValueError(
                f"Accelerator: expected plain data parallelism, got {kind.value}; leave its plugin out"
            )
        if self.scaler is not None and self.scaler.is_enabled():
            self.scaler = SharedScaler(self.scaler)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Shards models that are not, with the values of rank 0; optimizers of them get the shards. Collective."""
        optimizers = [made for made in args if isinstance(made, torch.optim.Optimizer)]
        for model in args:
            if isinstance(model, torch.nn.Module) and plain_tensors(model):
                shard_model(model, optimizers, recompute=Recompute.WHOLE)
        return super().prepare(*args, **kwargs)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Adds autocast and compilation; the model has its shards already."""
        return super().prepare_model(BMTrainModelWrapper(model), device_placement=False, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if type(optimizer) is accelerate.optimizer.AcceleratedOptimizer:  # whose scaler is of this rank alone
            optimizer = optimizer.optimizer
        if not isinstance(optimizer, _WithWholeState):
            adopt_optimizer(optimizer)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.__class__ = _WithWholeState
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Backpropagates the mean of the ranks' losses."""
        super().backward(loss / self.num_processes, **kwargs)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Changes nothing: gradients are reduced in every backward."""
        return nullcontext()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float | str = 2) -> torch.Tensor:
        """Clips by the norm over all ranks, and returns it. Collective."""
        self.unscale_gradients()
        return clip_gradients(parameters, max_norm, norm_type=norm_type)


class _WithWholeState(accelerate.optimizer.AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer whose state dicts are of whole parameters, for any number of ranks. Collective."""

    def state_dict(self) -> dict[str, Any]:
        return optimizer_state(self.optimizer, gather=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load_optimizer_state(self.optimizer, state_dict, 1.0)


_DATA_PARALLEL = tuple(
    kind for kind in accelerate.DistributedType if kind.value in ("NO", "MULTI_CPU", "MULTI_GPU")
)
