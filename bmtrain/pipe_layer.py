"""Layers divided over pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ._base.arguments import require_module
from ._base.deprecate import warn_once
from ._base.layers import LayerSequence, run_layers
from ._base.opaque import opaque
from ._engine.pipe_arguments import PipeArguments
from ._engine.pipeline import PipelineCall, idle_share, run_pipeline
from ._engine.policy import BlockMode
from ._model.block_build import leave_to_stage
from .block_layer import Block
from .errors import PipelineModeError
from .global_var import config, context
from .parameter import DistributedParameter

__all__ = ["PipelineTransformerBlockList"]


class PipelineTransformerBlockList(LayerSequence):
    """A :class:`bmtrain.TransformerBlockList` whose layers are divided over the stages of a pipeline.

    Every rank passes its own batch and gets its own outputs; inside, the batches of a pipe group run together, cut into
    ``init_distributed(num_micro_batches=)`` micro-batches. Stage ``s`` runs ``len // stages`` layers, and one more if
    ``s < len % stages``. All layers are there on every stage; only the stage that runs a layer holds its shards.

    Args:
        modules: plain modules, or Blocks made with ``mode="PIPE"``.
        num_hidden: only 1.

    Raises:
        ValueError: for a Block that was made for other use, if there is no pipeline.
        NotImplementedError: if ``num_hidden`` is not 1.

    Example:
        >>> blocks = [bmtrain.Block(bmtrain.nn.Linear(4, 4), mode="PIPE") for _ in range(3)]
        >>> layers = bmtrain.PipelineTransformerBlockList(blocks)  # here of one stage
        >>> layers(torch.ones(2, 4)).shape, layers.stages
        (torch.Size([2, 4]), 1)
    """

    def __init__(self, modules: Iterable[torch.nn.Module], num_hidden: int = 1) -> None:
        super().__init__()
        if num_hidden != 1:
            raise NotImplementedError(f"num_hidden: a pipeline passes one hidden state, got {num_hidden}")
        if not isinstance(modules, Iterable):
            raise TypeError(f"modules: expected several, such as a list, got {type(modules).__name__}")
        ctx = context()
        self._pipe = ctx.groups["pipe"]
        self.stages = self._pipe.size
        self.stage_id = self._pipe.rank
        self.pipe_idx = ctx.topology.pipe_idx
        self.num_hidden = num_hidden
        for index, module in enumerate(modules):
            self.add_module(str(index), _as_pipe_block(module, index))
        self.layer_ids = list(self.get_range_by_stage_id(self.stage_id))
        for index, block in enumerate(self):
            leave_to_stage(block, self._pipe, self.get_stage_by_layer_id(index))

    def __getstate__(self) -> dict[str, Any]:
        if self.stages > 1:
            raise TypeError(
                f"a pipeline list of {self.stages} stages cannot be copied or pickled: build another model of the same "
                "class and give it state_dict()"
            )
        return {name: value for name, value in self.__dict__.items() if name != "_pipe"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pipe = context().groups["pipe"]

    def get_part_len_by_stage_id(self, stage_id: int) -> int:
        """Number of layers of a stage."""
        return len(self) // self.stages + (1 if stage_id < len(self) % self.stages else 0)

    def get_range_by_stage_id(self, stage_id: int) -> range:
        """Numbers of the layers of a stage."""
        begin = sum(self.get_part_len_by_stage_id(stage) for stage in range(stage_id))
        return range(begin, begin + self.get_part_len_by_stage_id(stage_id))

    def get_stage_by_layer_id(self, layer_id: int) -> int:
        """The stage that runs a layer."""
        return next(stage for stage in range(self.stages) if layer_id in self.get_range_by_stage_id(stage))

    @property
    def idle_share(self) -> float:
        """The share of a pass in which a stage is idle: (stages - 1) / (micro-batches + stages - 1)."""
        return idle_share(self.stages, config["micros"])

    @opaque
    def forward(
        self,
        hidden: torch.Tensor,
        *args: Any,
        batch_related: Sequence[int] = (),
        return_hidden_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs all layers on this rank's own batch, together with the batches of the other stages' ranks.

        Args:
            hidden: ``(batch, ...)``; the batches of all stages together must divide by the number of micro-batches.
            args: arguments of every layer. Tensors with a batch dimension are split like it; for others the first
                stage's are used.
            batch_related: positions in ``args`` of the tensors with a batch dimension; empty: tensors with the rank and
                dim-0 size of ``hidden``.
            return_hidden_states: also return the inputs of all layers, ``(num_layers, batch, ...)``.

        Raises:
            ValueError: if the batches do not divide.
            RuntimeError: if a distributed parameter was put into a layer after its Block was built.
        """
        if self.stages == 1:
            inputs: list[tuple[torch.Tensor, ...]] | None = [] if return_hidden_states else None
            (result,) = run_layers(self._modules, (hidden,), args, kwargs, 1, inputs)
            return result if inputs is None else (result, torch.stack([state[0] for state in inputs]))
        num_micros = config["micros"]
        total = hidden.shape[0] * self.stages
        if total % num_micros:
            raise ValueError(
                f"hidden: expected a batch of which {self.stages} (one per stage) divide into {num_micros} "
                f"micro-batches, got {hidden.shape[0]} rows ({total} together)"
            )
        self._refuse_late_parameters()
        counts = [self.get_part_len_by_stage_id(stage) for stage in range(self.stages)]
        call = PipelineCall(
            [self[index] for index in self.layer_ids], counts, self._pipe, num_micros, return_hidden_states
        )
        results = run_pipeline(
            call, hidden, PipeArguments(self._pipe, hidden, args, kwargs, batch_related, num_micros)
        )
        return results if return_hidden_states else results[0]

    def _refuse_late_parameters(self) -> None:
        """Refuses parameters outside Blocks' storage: all ranks share them, and one stage alone would gather them."""
        for name, param in self.named_parameters():
            if isinstance(param, DistributedParameter) and not param._in_block:
                raise RuntimeError(
                    f"parameter {name!r} was put into a layer of a pipeline after the layer's Block was built, which "
                    "does not have it; put it in (an adapter, say) before that"
                )


def _as_pipe_block(module: torch.nn.Module, index: int) -> Block:
    require_module(f"modules[{index}]", module)
    if type(module) is not Block:
        return Block(module, mode="PIPE")
    if module._mode is BlockMode.PIPE:
        return module
    if not config["pipe_enabled"]:
        raise PipelineModeError(
            f'modules[{index}]: expected a Block made with mode="PIPE", got mode="BLOCK" (and there is no pipeline: '
            "init_distributed(pipe_size=...) turns it on)"
        )
    warn_once(
        "PipelineTransformerBlockList.mode",
        'give Block(mode="PIPE") to a PipelineTransformerBlockList',
        stacklevel=4,
    )
    return Block(module, mode="PIPE", policy=module._policy)
