"""Layers divided over pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ._base.arguments import require_integer, require_module
from ._base.deprecate import warn_once
from ._base.layers import LayerSequence, run_layers
from ._base.opaque import opaque
from ._engine.pipe_arguments import PipeArguments, alias
from ._engine.pipe_loss import Memory, run_forward, run_loss
from ._engine.pipe_pass import Plan
from ._engine.pipe_schedule import actions_of, idle_share
from ._engine.pipeline import PipelineCall, run_pipeline
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

    A call returns the outputs, so that backward starts when all forwards are over (GPipe). :meth:`loss` computes the
    loss as well, at the last stage, and follows ``schedule``; no schedule changes a bit of the gradients.

    Args:
        modules: plain modules, or Blocks made with ``mode="PIPE"``.
        num_hidden: only 1.
        schedule: of :meth:`loss`. ``"1f1b"``: a stage alternates between forwards and backwards, so that stage ``s``
            holds the activations of at most ``stages - s`` micro-batches. ``"interleaved"``: the same, with several
            chunks of layers on a stage, which wait for each other less. ``"zb1p"``: as ``"1f1b"``, with the matrix
            products that are gradients of weights postponed to where a stage would wait; it holds up to ``stages``
            micro-batches. ``"gpipe"``: all forwards first.
        chunks: chunks of layers on each stage, at least 2 with ``"interleaved"``, else 1. Chunk ``c`` of stage ``s`` is
            part ``c * stages + s`` of the layers.
        part_lens: number of layers of each of the ``stages * chunks`` parts, in the order of the layers; None: equal
            parts, and one more layer in the first ones if they do not divide.

    Raises:
        ValueError: for a Block that was made for other use, if there is no pipeline; for a schedule that does not fit.
        NotImplementedError: if ``num_hidden`` is not 1.

    Example:
        >>> blocks = [bmtrain.Block(bmtrain.nn.Linear(4, 4), mode="PIPE") for _ in range(3)]
        >>> layers = bmtrain.PipelineTransformerBlockList(blocks)  # here of one stage
        >>> layers(torch.ones(2, 4)).shape, layers.stages
        (torch.Size([2, 4]), 1)
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        num_hidden: int = 1,
        *,
        schedule: str = "1f1b",
        chunks: int = 1,
        part_lens: Sequence[int] | None = None,
    ) -> None:
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
        self._set_schedule(schedule, require_integer("chunks", chunks, 1), part_lens)
        self.layer_ids = [index for part in self._parts_of_stage(self.stage_id) for index in part]
        for index, block in enumerate(self):
            leave_to_stage(block, self._pipe, self.get_stage_by_layer_id(index))

    def _set_schedule(self, schedule: str, chunks: int, part_lens: Sequence[int] | None) -> None:
        self.schedule = schedule
        self.chunks = chunks
        self._actions = actions_of(schedule, self.stages, config["micros"], chunks)
        self._ends = _ends_of_parts(part_lens, len(self), self.stages * chunks)
        self._memory = Memory()

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
        if "_ends" not in state:  # written before there were schedules
            self._set_schedule("1f1b", 1, None)

    def _parts_of_stage(self, stage_id: int) -> list[range]:
        """Numbers of the layers of a stage, by chunk."""
        return [
            range(self._ends[part - 1] if part else 0, self._ends[part])
            for part in range(stage_id, len(self._ends), self.stages)
        ]

    def get_part_len_by_stage_id(self, stage_id: int) -> int:
        """Number of layers of a stage."""
        return sum(map(len, self._parts_of_stage(stage_id)))

    def get_range_by_stage_id(self, stage_id: int) -> Sequence[int]:
        """Numbers of the layers of a stage: a range, or a list if it has several chunks."""
        parts = self._parts_of_stage(stage_id)
        return parts[0] if len(parts) == 1 else [index for part in parts for index in part]

    def get_stage_by_layer_id(self, layer_id: int) -> int:
        """The stage that runs a layer."""
        return next(stage for stage in range(self.stages) if layer_id in self.get_range_by_stage_id(stage))

    @property
    def idle_share(self) -> float:
        """The share of a pass in which a stage is idle: (stages - 1) / (n * micro-batches + stages - 1).

        *n* is the number of chunks, and 3 with ``"zb1p"``, if a forward and both halves of a backward last equally
        long.
        """
        return idle_share(self.stages, config["micros"], self.schedule, self.chunks)

    @opaque
    def forward(
        self,
        hidden: torch.Tensor,
        *args: Any,
        batch_related: Sequence[int | str] = (),
        return_hidden_states: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs all layers on this rank's own batch, together with the batches of the other stages' ranks.

        Args:
            hidden: ``(batch, ...)``; the batches of all stages together must divide by the number of micro-batches.
            args: arguments of every layer. Tensors with a batch dimension, in tuples, lists, dicts and dataclasses
                too, are split like it; for others the first stage's are used.
            batch_related: positions in ``args`` of the tensors with a batch dimension; none: tensors with the rank and
                dim-0 size of ``hidden``. Names of keywords to split as well.
            return_hidden_states: also return the inputs of all layers, ``(num_layers, batch, ...)``.

        Raises:
            TypeError: an object of another kind among ``args`` holds tensors.
            ValueError: if the batches do not divide, or ``batch_related`` names no argument.
            RuntimeError: if a distributed parameter was put into a layer after its Block was built.
        """
        if self.stages == 1:
            inputs: list[tuple[torch.Tensor, ...]] | None = [] if return_hidden_states else None
            result = self._run_alone(hidden, args, kwargs, inputs)
            return result if inputs is None else (result, torch.stack([state[0] for state in inputs]))
        num_micros = config["micros"]
        total = hidden.shape[0] * self.stages
        if self.chunks > 1 and (torch.is_grad_enabled() or return_hidden_states):
            raise RuntimeError(
                f"a pipeline with {self.chunks} chunks on a stage trains by loss(); its outputs are for "
                "torch.no_grad(), and there are no hidden states"
            )
        if self.chunks == 1 and total % num_micros:
            raise ValueError(
                f"hidden: expected a batch of which {self.stages} (one per stage) divide into {num_micros} "
                f"micro-batches, got {hidden.shape[0]} rows ({total} together)"
            )
        self._refuse_late_parameters()
        if self.chunks > 1:
            self._require_rows(hidden)
        plan = self._plan()
        arguments = PipeArguments(self._pipe, hidden, args, kwargs, batch_related, num_micros)
        if self.chunks > 1:
            return run_forward(plan, hidden, arguments)
        if torch.is_grad_enabled():
            self._memory.begin_call(plan)
        counts = [self.get_part_len_by_stage_id(stage) for stage in range(self.stages)]
        call = PipelineCall(plan, counts, hidden, arguments, return_hidden_states)
        results = run_pipeline(call, hidden, arguments)
        return results if return_hidden_states else results[0]

    @opaque
    def loss(
        self,
        hidden: torch.Tensor,
        *args: Any,
        head: torch.nn.Module,
        labels: Any = (),
        batch_related: Sequence[int | str] = (),
        **kwargs: Any,
    ) -> torch.Tensor:
        """Runs all layers and ``head`` by the list's schedule, and returns the mean loss over the stages' ranks.

        With gradients enabled this runs the backwards too, each as soon as the schedule allows; ``backward`` of the
        result sends the gradients. If it brings another gradient of the loss than the last backward did (a new loss
        scale), everything runs again with this one.

        Args:
            hidden: ``(batch, ...)``; the rows of all stages together make micro-batches of sizes that differ by one
                at most, weighted by their sizes.
            args: arguments of every layer, as in a call.
            head: module that returns the mean loss of a micro-batch, one number, given the last layer's output and
                ``labels``. The last stage runs it; all ranks gather its parameters, which lie outside Blocks.
            labels: a tensor or several arguments of ``head``. Tensors with dimensions are split like ``hidden``.
            batch_related: as in a call.
            kwargs: arguments of every layer.

        Raises:
            TypeError: ``head`` is no module, or an object in ``args`` or ``labels`` holds tensors.
            ValueError: there are fewer rows than micro-batches, ``head`` has parameters in Blocks or that are not
                distributed, or it returns something else.
            RuntimeError: in backward: after a later call of this list with gradients, or a second time.

        Example:
            >>> class MeanSquare(torch.nn.Module):
            ...     def forward(self, out, wanted):
            ...         return (out - wanted).square().mean()
            >>> layers = bmtrain.PipelineTransformerBlockList([torch.nn.Tanh()])
            >>> layers.loss(torch.zeros(2, 4), head=MeanSquare(), labels=torch.ones(2, 4))
            tensor(1.)
        """
        require_module("head", head)
        labels = tuple(labels) if isinstance(labels, (tuple, list)) else (labels,)
        if self.stages == 1:
            loss: torch.Tensor = head(self._run_alone(hidden, args, kwargs), *labels)
            return loss
        self._refuse_late_parameters()
        num_micros = self._require_rows(hidden)
        return run_loss(
            self._plan(),
            self._memory,
            hidden,
            PipeArguments(self._pipe, hidden, args, kwargs, batch_related, num_micros),
            head,
            PipeArguments(self._pipe, hidden, labels, {}, range(len(labels)), num_micros, "labels"),
        )

    def _require_rows(self, hidden: torch.Tensor) -> int:
        """Returns the number of micro-batches; raises ValueError if there are fewer rows."""
        num_micros: int = config["micros"]
        total = hidden.shape[0] * self.stages
        if total < num_micros:
            raise ValueError(
                f"hidden: expected at least one row for each of the {num_micros} micro-batches, got {hidden.shape[0]} "
                f"rows ({total} together)"
            )
        return num_micros

    def _run_alone(
        self,
        hidden: torch.Tensor,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[Any] | None = None,
    ) -> torch.Tensor:
        """Runs all layers on the only stage."""
        if (
            context().engine.is_summing_virtual_shards
        ):  # gradients of arguments are summed as on several stages
            args, kwargs = tuple(map(alias, args)), {name: alias(value) for name, value in kwargs.items()}
        return run_layers(self._modules, (hidden,), args, kwargs, 1, inputs)[0]

    def _plan(self) -> Plan:
        chunks = [[self[index] for index in part] for part in self._parts_of_stage(self.stage_id)]
        return Plan(self._pipe, chunks, self._actions, config["micros"])

    def _refuse_late_parameters(self) -> None:
        """Refuses parameters outside Blocks' storage: all ranks share them, and one stage alone would gather them."""
        for name, param in self.named_parameters():
            if isinstance(param, DistributedParameter) and not param._in_block:
                raise RuntimeError(
                    f"parameter {name!r} was put into a layer of a pipeline after the layer's Block was built, which "
                    "does not have it; put it in (an adapter, say) before that"
                )


def _ends_of_parts(part_lens: Sequence[int] | None, num_layers: int, num_parts: int) -> list[int]:
    """Returns, for each part of the layers, the number of layers in it and before it."""
    if part_lens is None:
        part_lens = [num_layers // num_parts + (part < num_layers % num_parts) for part in range(num_parts)]
    lens = [require_integer("part_lens", length, 0) for length in part_lens]
    if len(lens) != num_parts or sum(lens) != num_layers:
        raise ValueError(
            f"part_lens: expected {num_parts} numbers with the sum {num_layers}, one for each chunk of each stage, got "
            f"{lens}"
        )
    return list(accumulate(lens))


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
