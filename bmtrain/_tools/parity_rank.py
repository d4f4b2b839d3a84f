"""One rank of `bmtrain parity`: runs the script, and records its steps."""

from __future__ import annotations

import ast
import contextlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .. import init
from .._ranks.agree import largest
from .._shards.full_values import full_value, gather_flat
from ..distributed import all_gather
from ..global_var import config, rank
from ..optim import OptimManager
from ..parameter import DistributedParameter


class Done(Exception):
    """Enough steps have been recorded."""


class Recorder:
    """Records the losses, gradients, norms and weights of the steps of every `OptimManager`."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.step = 0
        self.found: list[tuple[str, torch.Tensor]] = []

    def keep(self, what: str, value: torch.Tensor) -> None:
        """Keeps a copy of a tensor, under its step."""
        self.found.append((f"step {self.step}: {what}", value.detach().to("cpu", copy=True)))

    def see_loss(self, loss: torch.Tensor) -> None:
        """Keeps the mean of the losses of groups; tensor-parallel ranks have all of one, or shares that add up."""
        by_group = all_gather(loss.detach().float()).view(-1, config["tp_size"])
        has_shares = bool((by_group != by_group[:, :1]).any())
        self.keep("loss", by_group.mean() * (config["tp_size"] if has_shares else 1))

    def before_step(self, manager: OptimManager) -> None:
        """Keeps the gradients."""
        for name, param in _parameters(manager):
            whole = param.grad
            if isinstance(param, DistributedParameter):
                whole = _whole_gradient(param)
            if whole is not None:
                self.keep(f"gradient of {name}", whole.reshape(-1))

    def after_step(self, manager: OptimManager) -> None:
        """Keeps the weights; raises `Done` after the last step."""
        for name, param in _parameters(manager):
            whole = full_value(param) if isinstance(param, DistributedParameter) else param
            self.keep(f"weight of {name}", whole.reshape(-1))
        self.step += 1
        if self.step == self.steps:
            raise Done


def _whole_gradient(param: DistributedParameter) -> torch.Tensor | None:
    """Returns the gradient with slices merged; None if no rank has any, as other stages of a pipeline have none."""
    own = param.grad
    if not any(largest([own is not None], "gradient")):
        return None
    return gather_flat(param, param.new_zeros(param._spec.local_part[1]) if own is None else own)


def _parameters(manager: OptimManager) -> Iterator[tuple[str, Any]]:
    number = 0
    for optimizer in manager.optimizers:
        for group in optimizer.param_groups:
            names = group.get("param_names", ())
            for position, param in enumerate(group["params"]):
                yield names[position] if names else f"parameter {number}", param
                number += 1


def watch(recorder: Recorder, options: dict[str, int]) -> None:
    """Has `init_distributed` use ``options``, and every `OptimManager` report to the recorder."""
    plain_init, backward, clip, step = (
        init.init_distributed,
        OptimManager.backward,
        OptimManager.clip_grad_norm,
        OptimManager.step,
    )

    def init_distributed(*args: Any, **kwargs: Any) -> None:
        # One stage, where there is a pipeline: its layers are built for one.
        sizes = {"sp_size": 1, "ep_size": 1, "tp_size": 1, "pipe_size": int(kwargs.get("pipe_size", 0) > 0)}
        plain_init(*args, **{**kwargs, **sizes, **options})

    def watched_backward(self: OptimManager, loss: torch.Tensor, **options: Any) -> None:
        recorder.see_loss(loss)
        backward(self, loss, **options)

    def watched_clip(self: OptimManager, *args: Any, **kwargs: Any) -> torch.Tensor:
        recorder.before_step(self)
        norm = clip(self, *args, **kwargs)
        recorder.keep("norm of gradients", norm)
        return norm

    def watched_step(self: OptimManager) -> None:
        recorder.before_step(self)
        step(self)
        recorder.after_step(self)

    for module in (init, sys.modules["bmtrain"]):
        vars(module)["init_distributed"] = init_distributed
    OptimManager.backward = watched_backward  # type: ignore[method-assign]
    OptimManager.clip_grad_norm = watched_clip  # type: ignore[method-assign]
    OptimManager.step = watched_step  # type: ignore[method-assign]


def main() -> None:
    """Runs the script of the command line until enough steps are recorded; rank 0 writes them."""
    settings, script, *arguments = sys.argv[1:]
    given = ast.literal_eval(settings)
    recorder = Recorder(given["steps"])
    watch(recorder, given["options"])
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with contextlib.suppress(Done):
        runpy.run_path(script, run_name="__main__")
    if rank() == 0:
        torch.save(recorder.found, given["path"])


if __name__ == "__main__":
    main()
