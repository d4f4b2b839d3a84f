"""The choices of a run that the planner weighs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from .._base.arguments import require_integer, require_number
from .._engine.pipe_schedule import actions_of, check_schedule, peak_micros
from .._engine.policy import BlockPolicy, Recompute

__all__ = ["DISK", "TrainingPolicy"]

#: What blocks can keep on drives.
DISK = ("parameters", "gradients", "optimizer")
OPTIMIZERS = ("adam", "muon")


@dataclass(frozen=True)
class TrainingPolicy:
    """The training policy of a model.

    Args:
        micro_batch: samples of one forward of one rank, or of one group of tensor-parallel and sequence ranks.
        level: ZeRO level of every block, 0 to 3.
        recompute: recomputation, as for :class:`bmtrain.BlockPolicy`; True is ``"whole"``, False ``"off"``.
        offload: share of the optimizer's work and state that is on the host, from 0 to 1; True is 1, False 0.
        accumulate: forwards and backwards before one optimizer step.
        tp_size: tensor-parallel ranks.
        pipe_size: pipeline stages.
        sp_size: ranks that divide a sequence, by heads.
        ep_size: ranks that hold the experts of a layer together; each expert is taken to get as many tokens.
        schedule: of the pipeline, as for :class:`bmtrain.PipelineTransformerBlockList`; ``"interleaved"`` has 2 chunks.
        num_micro_batches: of a pass of the pipeline; default: its stages.
        zero_size: ranks that share a block, as for :class:`bmtrain.BlockPolicy`.
        compute_dtype: the dtype in which blocks of fp32 parameters compute, as for :class:`bmtrain.BlockPolicy`.
        gather_dtype: the dtype in which their parameters are gathered, as for :class:`bmtrain.BlockPolicy`.
        reduce: the reduction of gradients, as for :class:`bmtrain.BlockPolicy`.
        state_dtype: of the moments, as for :class:`bmtrain.optim.AdamOptimizer`.
        optimizer: ``"adam"``, or ``"muon"`` for :class:`bmtrain.optim.MuonOptimizer`; with ``offload=1`` for
            :class:`bmtrain.optim.MuonOffloadOptimizer`, which has no part of it.
        survive: copies for the loss of a rank, as for :func:`bmtrain.init_distributed`.
        parameters: ``"host"`` keeps parameters, gradients and state of blocks in memory of the host; of CPU ranks they
            are there.
        host_share: the share of the blocks that ``parameters="host"`` is for.
        disk: what blocks keep on drives: ``"optimizer"``, and with it ``"parameters"``, ``"gradients"`` or both.
        disk_share: the share of the blocks that do.
        vertical: the micro-batches of ``accumulate`` pass each block together
            (:meth:`bmtrain.TransformerBlockList.vertical`).

    Raises:
        ValueError: a number out of its range, a part of Muon offloaded, or a combination that runs refuse.

    Example:
        >>> from bmtrain.plan import TrainingPolicy
        >>> TrainingPolicy(micro_batch=4, level=2, recompute="selective").recomputes
        True
    """

    micro_batch: int = 1
    level: int = 3
    recompute: Recompute | Literal["off", "whole", "selective"] | bool = True
    offload: float | bool = 0.0
    accumulate: int = 1
    tp_size: int = 1
    pipe_size: int = 1
    sp_size: int = 1
    ep_size: int = 1
    schedule: str = "gpipe"
    num_micro_batches: int | None = None
    zero_size: int | None = None
    compute_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    reduce: Literal["direct", "ring", "hosts"] | None = None
    state_dtype: torch.dtype = torch.float32
    optimizer: Literal["adam", "muon"] = "adam"
    survive: bool = False
    parameters: Literal["device", "host"] = "device"
    host_share: float = 1.0
    disk: tuple[str, ...] = ()
    disk_share: float = 1.0
    vertical: bool = False

    def __post_init__(self) -> None:
        for name in ("micro_batch", "accumulate", "tp_size", "pipe_size", "sp_size", "ep_size", "micros"):
            require_integer(name, getattr(self, name), 1)
        if self.vertical and self.pipe_size > 1:
            raise ValueError(f"vertical: expected pipe_size=1, got {self.pipe_size}")
        check_schedule(self.schedule, self.pipe_size, self.micros, self.chunks)
        if isinstance(self.offload, bool):
            object.__setattr__(self, "offload", float(self.offload))
        for name in ("offload", "host_share", "disk_share"):
            require_number(name, getattr(self, name))
        on_host, is_muon, is_whole = self.parameters == "host", self.optimizer == "muon", self.host_share == 1
        disk = self.disk
        for name, fits, expected in (
            ("offload", 0 <= self.offload <= 1, "0 to 1"),
            ("optimizer", self.optimizer in OPTIMIZERS, "'adam' or 'muon'"),
            ("offload", not is_muon or self.offload in (0, 1), "0 or 1 with 'muon'"),
            ("parameters", self.parameters in ("device", "host"), "'device' or 'host'"),
            ("level", not on_host or self.level >= 2, "2 or 3 with parameters='host'"),
            ("host_share", is_whole or on_host, "1 without parameters='host'"),
            ("host_share", is_whole or not disk, "1 with disk"),
            ("disk", set(disk) <= set(DISK), f"some of {', '.join(DISK)}"),
            ("disk_share", disk or self.disk_share == 1, "1 without disk"),
            ("host_share", 0 < self.host_share <= 1, "more than 0, and at most 1"),
            ("disk_share", 0 < self.disk_share <= 1, "more than 0, and at most 1"),
        ):
            if not fits:
                got = ", ".join(disk) if name == "disk" else repr(getattr(self, name))
                raise ValueError(f"{name}: expected {expected}, got {got}")
        if disk and (self.state_dtype is torch.int8 or self.survive):
            raise ValueError("disk: expected float32 or bfloat16 moments, and without survive")
        if isinstance(self.recompute, bool):
            object.__setattr__(self, "recompute", Recompute.WHOLE if self.recompute else Recompute.OFF)
        object.__setattr__(self, "recompute", self.block_policy().recompute)

    @property
    def recomputes(self) -> bool:
        return self.recompute is not Recompute.OFF

    @property
    def micros(self) -> int:
        """Micro-batches of a pass."""
        if self.vertical:
            return self.accumulate
        return self.pipe_size if self.num_micro_batches is None else self.num_micro_batches

    @property
    def passes(self) -> int:
        """Forwards and backwards of a step through all blocks."""
        return 1 if self.vertical else self.accumulate

    @property
    def chunks(self) -> int:
        """Chunks of layers of a stage."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def held_share(self) -> float:
        """Largest share of a pass's samples whose activations the first stage holds at once."""
        actions = actions_of(self.schedule, self.pipe_size, self.micros, self.chunks)
        return peak_micros(actions[0]) / (self.micros * self.chunks)

    def block_policy(self) -> BlockPolicy:
        """The same choices as a Block's policy."""
        recompute: Any = self.recompute
        places: dict[str, Any] = {"parameters": self.parameters}
        if self.host_share < 1:
            places["parameters"] = {"host": self.host_share, "device": 1 - self.host_share}
        for name in self.disk:
            rest = self.parameters if name == "parameters" else "device"
            places[name] = (
                "disk" if self.disk_share == 1 else {"disk": self.disk_share, rest: 1 - self.disk_share}
            )
        return BlockPolicy(
            level=self.level,
            recompute=recompute,
            zero_size=self.zero_size,
            compute_dtype=self.compute_dtype,
            gather_dtype=self.gather_dtype,
            reduce=self.reduce,
            **places,
        )

    def on_disk(self, number: int) -> tuple[str, ...]:
        """Returns the members of ``disk`` for the block ``number``."""
        if self.disk_share == 1:
            return self.disk
        block = self.block_policy().of_block(number)
        return tuple(name for name in self.disk if getattr(block, name) == "disk")

    def is_apart(self, number: int) -> bool:
        """Whether a device has the parameters of the block ``number`` only while they are in use."""
        if self.host_share < 1:
            return self.block_policy().of_block(number).parameters == "host"
        return self.parameters == "host" or "parameters" in self.on_disk(number)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        recompute: Any = self.recompute
        dtypes = {
            name: None if dtype is None else str(dtype).removeprefix("torch.")
            for name, dtype in vars(self).items()
            if name.endswith("_dtype")
        }
        return {**vars(self), "recompute": recompute.value, "disk": list(self.disk), **dtypes}
