"""The loss scale, the optimizers that share it, and their schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._base.arguments import require_integer, require_keys, require_number, require_tensor
from .._base.deprecate import warn_once
from .._base.opaque import opaque
from .._engine.engine import current_engine
from .._model.notes import name_unreturned
from .._ranks import context as _context
from .._ranks.survival import Survival
from ..accumulate import no_sync
from ..global_var import context, num_losses, rank
from ..virtual import check_no_loop
from ._early import EarlySteps, refuse_early_steps
from ._grad_stats import (
    check_overflow,
    first_overflow,
    forget_unsent,
    grad_rescale,
    keep_unsent,
    name_in_groups,
    parameters_of,
)
from ._loss_watch import LossWatch
from ._options_watch import OptionsWatch
from ._state import load_optimizer_state, optimizer_state
from ._suitability import (
    adopt_optimizer,
    require_steppable,
    takes_set_to_none,
    warn_of_likely_mistakes,
    warn_of_uninitialised,
    warn_of_unsent_gradients,
)
from .clip_grad import clip_gradients

__all__ = ["OptimManager", "check_overflow", "grad_rescale"]


class OptimManager:
    """Runs the backward pass and the step of one or more optimizers, with or without dynamic loss scaling.

    With a ``loss_scale``, a step in which any gradient of any rank is inf or NaN is skipped by all ranks and
    the scale is divided by ``loss_scale_factor``; after ``loss_scale_steps`` good steps in a row it is
    multiplied by it. The loss is divided by ``grad_scale``, so that the sum of the ranks' gradients is the gradient
    of the mean of their losses.

    Args:
        loss_scale: scale to start from; None for no scaling (bfloat16 and float32 need none).
        loss_scale_factor: factor between successive scales; a value below 1 means its reciprocal. This and the next
            three may be None where there is no loss scale.
        loss_scale_steps: good steps before the scale grows.
        min_loss_scale: the scale does not fall below it.
        max_loss_scale: the scale does not grow above it.
        grad_scale: divisor of the loss; None for the number of ranks with a loss of their own, which is the
            world size divided by the tensor-parallel size, or in a loop over virtual shards their number.
        accumulate: number of backwards whose mean gradient one step uses. The others than the last send nothing (see
            :func:`bmtrain.no_sync`), and until it :meth:`zero_grad` and :meth:`step` do nothing: the loop is the same.
            After a backward that failed, and after :meth:`load_state_dict`, it begins again with :meth:`zero_grad`.
        step_in_backward: update a block inside :meth:`backward`, as soon as its gradient is complete and nothing else
            can change it; :meth:`step` updates the rest. Results are bit-identical to updates within :meth:`step`.
            Each step then has one backward (or use ``accumulate``), gradients cannot be changed between the two, and
            clipping and loss scales are not available: both need all gradients before the first update. Gradients on
            a drive are used in memory and not written: a script cannot read them.

    Raises:
        ValueError: a number is out of range, or ``step_in_backward`` comes with a loss scale or a pipeline.

    Example::

        manager = bmt.optim.OptimManager(loss_scale=2**20)
        manager.add_optimizer(optimizer, lr_scheduler)
        for batch in batches:
            manager.zero_grad()
            manager.backward(model(batch))
            grad_norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
            manager.step()
    """

    def __init__(
        self,
        loss_scale: float | None = None,
        loss_scale_factor: float | None = 2,
        loss_scale_steps: int | None = 1024,
        min_loss_scale: float | None = 1,
        max_loss_scale: float | None = math.inf,
        grad_scale: float | None = None,
        *,
        accumulate: int = 1,
        step_in_backward: bool = False,
    ) -> None:
        for name, value in (("loss_scale", loss_scale), ("grad_scale", grad_scale)):
            if value is not None:
                require_number(name, value)
                if not value > 0:
                    raise ValueError(f"{name}: expected more than 0 or None, got {value}")
        accumulate = require_integer("accumulate", accumulate, 1)
        has_scale = loss_scale is not None
        self.min_loss_scale = _number_of_scale("min_loss_scale", min_loss_scale, 1, has_scale)
        self.max_loss_scale = _number_of_scale("max_loss_scale", max_loss_scale, math.inf, has_scale)
        self.loss_scale_steps = _number_of_scale("loss_scale_steps", loss_scale_steps, 1024, has_scale)
        self.loss_scale_factor = _number_of_scale("loss_scale_factor", loss_scale_factor, 2, has_scale)
        if not 0 < self.min_loss_scale <= self.max_loss_scale:
            raise ValueError(
                f"expected 0 < min_loss_scale <= max_loss_scale, got {min_loss_scale} and {max_loss_scale}"
            )
        if step_in_backward:
            refuse_early_steps(has_scale)
        self._early = EarlySteps() if step_in_backward else None
        self.loss_scale: float = 1 if loss_scale is None else loss_scale
        self.loss_scale_enabled = has_scale
        self.steps_since_last_scale = 0
        self._grad_scale = grad_scale
        self.accumulate = accumulate
        self._num_backwards = 0  # since the last step
        self._watch = LossWatch()
        self._options_watch = OptionsWatch()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.lr_schedulers: list[Any] = []

    @property
    def loss_scale_factor(self) -> float:
        """Factor between successive scales, at least 1."""
        return self._loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, factor: float) -> None:
        require_number("loss_scale_factor", factor)
        if not factor > 0:
            raise ValueError(f"loss_scale_factor: expected more than 0, got {factor}")
        self._loss_scale_factor = 1 / factor if factor < 1 else factor

    @property
    def grad_scale(self) -> float:
        """Divisor of the loss, see the class."""
        if self._grad_scale is not None:
            return self._grad_scale
        context("OptimManager")
        return num_losses()

    @grad_scale.setter
    def grad_scale(self, value: float | None) -> None:
        self._grad_scale = value

    def add_optimizer(self, optimizer: torch.optim.Optimizer, lr_scheduler: Any = None) -> None:
        """Adds an optimizer.

        Args:
            optimizer: one of this library or of ``torch.optim``.
            lr_scheduler: anything with ``step()``, called after each step of ``optimizer``; None for none.

        Raises:
            TypeError: it is no optimizer, or the scheduler cannot step, or not without a number.
            ValueError: the optimizer is of a kind that computes over whole tensors, and has distributed parameters;
                or it has been added before.

        Example:
            >>> optimizer = bmtrain.optim.AdamOptimizer(bmtrain.nn.Linear(2, 2).parameters())
            >>> schedule = bmtrain.lr_scheduler.NoDecay(optimizer, start_lr=1e-3, warmup_iter=100, end_iter=-1)
            >>> bmtrain.optim.OptimManager().add_optimizer(optimizer, schedule)
        """
        require_steppable(optimizer, lr_scheduler)
        if any(optimizer is known for known in self.optimizers):
            raise ValueError("optimizer: this one has been added before, and would step twice in each step()")
        adopt_optimizer(optimizer)
        if getattr(optimizer, "_owned_scale", None) is not None:
            warn_once(
                "OptimManager.owned_scale",
                "the optimizer was made with scale=, but the manager's loss scale is used: leave scale= out",
                category=UserWarning,
            )
        if (survival := _survival()) is not None:
            survival.add(self, optimizer)
        warn_of_likely_mistakes(optimizer)
        self.optimizers.append(optimizer)
        self.lr_schedulers.append(lr_scheduler)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns the loss that :meth:`backward` differentiates: scaled up, divided by ``grad_scale``."""
        self._watch.has_scaled = True
        return loss * (self.loss_scale / (self.grad_scale * self.accumulate))

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Backpropagates the scaled loss; several calls before a step accumulate.

        Args:
            loss: this rank's scalar loss, normally the mean over its own batch.
            retain_graph: keep what another backward through the same forward needs.

        Raises:
            TypeError: ``loss`` is no tensor.
            ValueError: it has several elements, or nothing that it depends on is trained.

        Example:
            >>> model = bmtrain.nn.Linear(2, 1, bias=False)
            >>> bmtrain.optim.OptimManager(loss_scale=4).backward(model(torch.ones(3, 2)).mean())
            >>> next(model.parameters()).grad.tolist()  # scaled; step() and clip_grad_norm() know it
            [4.0, 4.0]
        """
        require_tensor("loss", loss)
        if loss.numel() != 1 or not loss.requires_grad:
            raise ValueError(
                f"loss: expected one number that depends on something that is trained, got shape "
                f"{tuple(loss.shape)} with requires_grad={loss.requires_grad}"
            )
        self._num_backwards += 1
        keep_unsent(self._is_accumulating())
        self._watch.see_loss(loss)
        if (survival := _survival()) is not None:
            survival.note_loss(loss)
        try:
            with self._around_backward():
                self.scale_loss(loss).backward(retain_graph=retain_graph)
        except BaseException as error:
            name_unreturned(error, loss)
            # Of some parameters the gradient is missing: zero_grad() is to drop the others.
            self._num_backwards = 0
            keep_unsent(False)
            raise

    def _around_backward(self) -> AbstractContextManager[None]:
        if self._is_accumulating():
            return no_sync()
        if self._early is None or current_engine(context("OptimManager.backward")).virtual.is_open:
            return nullcontext()
        return self._early.allowed(self.optimizers)

    @property
    def num_blocks_stepped_in_backward(self) -> int:
        """Number of blocks whose update began in the last backward; 0 without ``step_in_backward``."""
        return 0 if self._early is None else self._early.num_blocks

    def _is_accumulating(self) -> bool:
        return 0 < self._num_backwards < self.accumulate

    def zero_grad(self, *, set_to_none: bool = False) -> None:
        """Fills the gradients of all optimizers with zeros, or drops them.

        Args:
            set_to_none: drop them, as optimizers of torch do: their memory is free during the forward, and parameters
                without a new gradient stay as they are; gradients of zeros are followed by momentum and weight decay.
                A wrapper whose ``zero_grad()`` has no such argument decides itself.
        """
        if self._is_accumulating():
            return
        forget_unsent(
            parameters_of(group for optimizer in self.optimizers for group in optimizer.param_groups)
        )
        for optimizer in self.optimizers:
            optimizer.zero_grad(**({"set_to_none": set_to_none} if takes_set_to_none(optimizer) else {}))

    @opaque
    def clip_grad_norm(
        self, param_groups: Iterable[Any], max_norm: float, norm_type: float | str = 2, eps: float = 1e-6
    ) -> Tensor:
        """Clips gradients by their norm over all ranks. Collective.

        See :func:`~bmtrain.optim.clip_grad.clip_gradients`.

        Args:
            param_groups: ``optimizer.param_groups``, or parameters.
            max_norm: largest norm of the mean gradient, without loss scale, that is not clipped.
            norm_type: p of the p-norm, or ``"inf"``.
            eps: added to the norm before dividing by it.

        Returns:
            The unscaled norm before clipping, 0-dim fp32, equal on all ranks.

        Raises:
            ValueError: a number is out of range.
            RuntimeError: the manager was made with ``step_in_backward``.
        """
        if self._early is not None:
            raise RuntimeError(
                "OptimManager.clip_grad_norm: with step_in_backward=True parameters are updated before the norm is "
                "known; leave one of them out"
            )
        if isinstance(param_groups, Iterator):
            param_groups = list(param_groups)  # read again after the loss of a rank
        clip = partial(clip_gradients, param_groups, max_norm, self.loss_scale, norm_type, eps)
        survival = _survival()
        norm = clip() if survival is None else survival.clip(clip)
        self._watch.see_norm(norm)
        return norm

    @opaque
    def step(self) -> None:
        """Steps every optimizer and then its schedule, or skips all if a gradient overflowed.

        Collective over the world with loss scaling, and in few other steps. Warns, once each, if all ranks had the same
        losses; if hyperparameters such as the learning rate, the number of parameters with a gradient, or the weights
        that the wrapper or ``load_state_dict`` got differ between ranks; if the loss stays inf or NaN without a
        loss scale; and if no loss was multiplied by a loss scale.

        Raises:
            RuntimeError: without an optimizer; in a loop over virtual shards, whose gradients are there when it ends;
                or, with a loss scale, before :func:`bmtrain.init_distributed`.
        """
        if not self.optimizers:
            context("OptimManager.step")
            raise RuntimeError(
                "OptimManager.step: expected at least one optimizer, got none, so that nothing would be trained; call "
                "add_optimizer() first"
            )
        if self._is_accumulating():
            return
        self._num_backwards = 0
        check_no_loop("OptimManager.step")
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        warn_of_uninitialised(groups)
        warn_of_unsent_gradients(groups)
        self._watch.end_step(parameters_of(groups), self.loss_scale_enabled)
        self._options_watch.end_step(self.optimizers)
        if self.loss_scale_enabled and self._skip_on_overflow(groups):
            return
        survival = _survival()
        if survival is not None:
            survival.pass_gate()
        optimizer: Any
        for optimizer, lr_scheduler in zip(self.optimizers, self.lr_schedulers, strict=True):
            if getattr(optimizer, "_bmtrain_optimizer", False):
                optimizer.step(scale=self.loss_scale)
                if survival is not None:
                    survival.step_copy(optimizer, self.loss_scale)
            else:
                if self.loss_scale_enabled and self.loss_scale != 1:
                    grad_rescale(optimizer.param_groups, self.loss_scale)
                optimizer.step()
            if lr_scheduler is not None:
                lr_scheduler.step()
        if self._early is not None:
            self._early.finish()
        if self.loss_scale_enabled:
            self._count_good_step()

    def _skip_on_overflow(self, groups: list[dict[str, Any]]) -> bool:
        context("OptimManager.step with a loss scale")  # alone, a rank cannot know what the others skip
        if not check_overflow(groups):
            return False
        old = self.loss_scale
        self.loss_scale = max(old / self.loss_scale_factor, self.min_loss_scale)
        self.steps_since_last_scale = 0
        culprit = first_overflow(list(parameters_of(groups)))
        if rank() == 0:
            print(
                f"Gradient overflow in {name_in_groups(groups, culprit)}: step skipped, "
                f"loss scale {old:.10g} -> {self.loss_scale:.10g}",
                flush=True,
            )
        self.zero_grad()
        return True

    def _count_good_step(self) -> None:
        self.steps_since_last_scale += 1
        if self.steps_since_last_scale >= self.loss_scale_steps and self.loss_scale < self.max_loss_scale:
            self.loss_scale = min(self.loss_scale * self.loss_scale_factor, self.max_loss_scale)
            self.steps_since_last_scale = 0

    def state_dict(self, gather_opt: bool = False) -> dict[str, Any]:
        """Returns the state of the optimizers, the schedules and the loss scale.

        Args:
            gather_opt: gather the optimizers' sharded tensors to full ones, so that the state can be loaded
                on another number of ranks; then collective. Otherwise the state is of this rank alone.

        Returns:
            ``optimizers``, ``lr_schedulers``, ``loss_scale``, ``loss_scale_enabled``, ``steps_since_last_scale``.
        """
        return {
            "optimizers": [optimizer_state(optimizer, gather_opt) for optimizer in self.optimizers],
            "lr_schedulers": [None if s is None else s.state_dict() for s in self.lr_schedulers],
            "loss_scale": self.loss_scale,
            "loss_scale_enabled": self.loss_scale_enabled,
            "steps_since_last_scale": self.steps_since_last_scale,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of :meth:`state_dict`, which is not modified.

        Args:
            state_dict: made with as many optimizers, in the same order; without a loss scale it leaves this one's.

        Raises:
            TypeError: ``state_dict`` is no dict.
            ValueError: something is missing in it, or the number of optimizers or schedules, or the layout of a
                state, does not fit.

        Example:
            >>> manager = bmtrain.optim.OptimManager(loss_scale=1024)
            >>> manager.add_optimizer(bmtrain.optim.AdamOptimizer(bmtrain.nn.Linear(2, 2).parameters()))
            >>> manager.load_state_dict(manager.state_dict(gather_opt=True))
        """
        if isinstance(state_dict, dict) and "param_groups" in state_dict:
            raise ValueError(
                "state_dict: expected the state of an OptimManager, got an optimizer's state; give it to "
                "load_state_dict() of the optimizer"
            )
        require_keys(
            "state_dict", state_dict, ("optimizers", "lr_schedulers", "loss_scale", "loss_scale_enabled")
        )
        for name, own in (("optimizers", self.optimizers), ("lr_schedulers", self.lr_schedulers)):
            if len(state_dict[name]) != len(own):
                raise ValueError(f"expected the state of {len(own)} {name}, got {len(state_dict[name])}")
        self._check_resumable(state_dict)
        loss_scale = state_dict["loss_scale"]
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            load_optimizer_state(optimizer, state, loss_scale)
        for lr_scheduler, state in zip(self.lr_schedulers, state_dict["lr_schedulers"], strict=True):
            if lr_scheduler is not None and state is not None:
                lr_scheduler.load_state_dict(state)
        self._resume(state_dict)

    def _check_resumable(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if ``state`` does not fit."""
        if self._early is not None:
            refuse_early_steps(state["loss_scale_enabled"])

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Restores the numbers of a saved state, at the first backward of a step; optimizers stay unchanged."""
        self._num_backwards = 0
        keep_unsent(False)
        if state["loss_scale_enabled"] or not self.loss_scale_enabled:
            self.loss_scale, self.loss_scale_enabled = state["loss_scale"], state["loss_scale_enabled"]
            self.steps_since_last_scale = state.get("steps_since_last_scale", 0)


def _survival() -> Survival | None:
    current = _context.current()
    return None if current is None else current.survival


def _number_of_scale(name: str, value: float | None, default: float, has_scale: bool) -> float:
    """Returns ``value``, or the default for None, which configuration files use without a loss scale."""
    if value is None and not has_scale:
        return default
    require_number(name, value)
    return value  # type: ignore[return-value]
