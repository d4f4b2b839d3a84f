"""Position of a rank: its coordinates in the pipeline, tensor-parallel and sharding groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["GroupKind", "Topology", "equal_runs"]


class GroupKind(str, Enum):
    """The families of groups that the world is cut into; every rank is in one group of each family."""

    ZERO = "zero"  # the whole world
    TP = "tp"  # consecutive ranks that compute one loss together
    PIPE = "pipe"  # one rank of every pipeline stage
    TP_ZERO = "tp_zero"  # ranks with equal tp coordinate: shards of tensor-parallel parameters
    PP_ZERO = "pp_zero"  # ranks of one stage: shards of the stage's ordinary parameters
    PP_TP_ZERO = "pp_tp_zero"  # ranks of one stage with equal tp coordinate
    EP = "ep"  # consecutive ranks that hold the experts of a layer together
    EP_ZERO = "ep_zero"  # ranks with equal ep coordinate: shards of the same experts
    PP_EP_ZERO = "pp_ep_zero"  # ranks of one stage with equal ep coordinate
    SP = "sp"  # ranks that divide the tokens of one batch among themselves


@dataclass(frozen=True)
class Topology:
    """The place of one rank in a world cut into ``pipe_size`` stages of groups of ``tp_size`` ranks.

    With ``S = world_size // pipe_size`` ranks in a stage, rank ``r`` is number ``r % S`` of stage ``r // S``
    and number ``r % tp_size`` of tensor-parallel group ``r // tp_size``; likewise with ``ep_size``, whatever the
    other sizes, as each rank has tokens of its own. ``sp_size`` successive tensor-parallel groups divide the tokens
    of one batch. For every family of groups there is an ``..._idx`` (which group) and a coordinate (the rank inside
    it); see :meth:`get_group_id` and :meth:`get_group_rank`.

    Args:
        rank: this process, ``0 <= rank < world_size``.
        world_size: number of processes.
        pipe_size: number of pipeline stages, at least 1.
        tp_size: ranks in a tensor-parallel group, at least 1.
        ep_size: ranks in an expert-parallel group, at least 1.
        sp_size: ranks that divide the tokens of one batch, at least 1.

    Raises:
        ValueError: sizes that do not factor the world, or a rank outside it.

    Example:
        >>> place = Topology(rank=5, world_size=8, pipe_size=2, tp_size=2)
        >>> place.stage_id, place.tp_id, place.pp_tp_zero_id
        (1, 1, 0)
        >>> place.members("pipe"), place.members("tp")
        ((1, 5), (4, 5))
    """

    rank: int
    world_size: int
    pipe_size: int = 1
    tp_size: int = 1
    ep_size: int = 1
    sp_size: int = 1

    stages: int = field(init=False)
    stage_id: int = field(init=False)
    pipe_idx: int = field(init=False)
    tp_id: int = field(init=False)
    tp_idx: int = field(init=False)
    pp_zero_idx: int = field(init=False)
    pp_zero_id: int = field(init=False)
    tp_zero_idx: int = field(init=False)
    tp_zero_id: int = field(init=False)
    pp_tp_zero_idx: int = field(init=False)
    pp_tp_zero_id: int = field(init=False)
    zero_idx: int = field(init=False)
    zero_id: int = field(init=False)
    ep_idx: int = field(init=False)
    ep_id: int = field(init=False)
    ep_zero_idx: int = field(init=False)
    ep_zero_id: int = field(init=False)
    pp_ep_zero_idx: int = field(init=False)
    pp_ep_zero_id: int = field(init=False)
    sp_idx: int = field(init=False)
    sp_id: int = field(init=False)
    dp_id: int = field(init=False)

    def __post_init__(self) -> None:
        self._validate()
        coordinates = {"stages": self.pipe_size, "dp_id": self.rank // (self.tp_size * self.sp_size)}
        for kind, (run, step) in self._cuts().items():
            number, place = divmod(self.rank, run)
            coordinates[_attribute_of_group(kind)] = number * step + place % step
            coordinates[_attribute_of_rank(kind)] = place // step
        for name, value in coordinates.items():
            object.__setattr__(self, name, value)

    def _cuts(self) -> dict[GroupKind, tuple[int, int]]:
        """Returns how each family cuts the world: into runs of so many ranks, in which a group has every n-th rank."""
        world, stage, tp, ep = self.world_size, self.world_size // self.pipe_size, self.tp_size, self.ep_size
        return {
            GroupKind.ZERO: (world, 1),
            GroupKind.TP: (tp, 1),
            GroupKind.PIPE: (world, stage),
            GroupKind.TP_ZERO: (world, tp),
            GroupKind.PP_ZERO: (stage, 1),
            GroupKind.PP_TP_ZERO: (stage, tp),
            GroupKind.EP: (ep, 1),
            GroupKind.EP_ZERO: (world, ep),
            GroupKind.PP_EP_ZERO: (stage, ep),
            GroupKind.SP: (tp * self.sp_size, tp),
        }

    def _validate(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size: expected at least 1, got {self.world_size}")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank: expected 0 <= rank < world_size {self.world_size}, got {self.rank}")
        sizes = {"pipe_size": self.pipe_size, "tp_size": self.tp_size}
        if self.sp_size != 1:
            sizes["sp_size"] = self.sp_size
        names = list(sizes)
        if min(sizes.values()) < 1:
            given = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"{' and '.join(names)}: expected at least 1, got {given}")
        if self.ep_size < 1:
            raise ValueError(f"ep_size: expected at least 1, got {self.ep_size}")
        factor = math.prod(sizes.values())
        if self.world_size % factor:
            raise ValueError(
                f"world_size {self.world_size} must be divisible by {' * '.join(names)} = "
                f"{' * '.join(map(str, sizes.values()))} = {factor} (remainder {self.world_size % factor}): "
                f"start another number of ranks, or change {' or '.join(names)}"
            )
        stage_size = self.world_size // self.pipe_size
        if stage_size % self.ep_size:
            raise ValueError(
                f"ep_size: expected a divisor of {stage_size} ranks"
                f"{' of a pipeline stage' * (self.pipe_size > 1)}, got {self.ep_size}"
            )

    @property
    def dp_size(self) -> int:
        """Number of different batches of a step: ranks divided by the number of ranks that share a batch."""
        return self.world_size // (self.tp_size * self.sp_size)

    def __str__(self) -> str:
        """The factors, and the ranks of every group that has several; families with the same groups share a line.

        >>> print(Topology(rank=0, world_size=4, sp_size=2))
        4 ranks = 2 batches x 2 sequence parts
          zero, tp_zero, pp_zero, pp_tp_zero, ep_zero, pp_ep_zero: 0,1,2,3
          sp: 0,1 | 2,3
        """
        factors = {
            "stages": self.pipe_size,
            "batches": self.dp_size // self.pipe_size,
            "sequence parts": self.sp_size,
            "tensor slices": self.tp_size,
        }
        product = " x ".join(f"{size} {name}" for name, size in factors.items() if size > 1) or "1 batch"
        lines = [f"{self.world_size} ranks = {product}"]
        families: dict[tuple[tuple[int, ...], ...], list[str]] = {}
        for kind in GroupKind:
            families.setdefault(self.groups(kind), []).append(kind.value)
        for groups, names in families.items():
            if len(groups[0]) > 1:
                lines.append(f"  {', '.join(names)}: " + " | ".join(",".join(map(str, g)) for g in groups))
        return "\n".join(lines)

    def get_group_id(self, name: str) -> int:
        """The number of this rank's group in a family: ``"pipe"``, ``"zero"``, ``"tp_zero"``, ``"tp"``, ...

        Raises:
            ValueError: for a name that is no family of groups.
        """
        return int(getattr(self, _attribute_of_group(_kind(name))))

    def get_group_rank(self, name: str) -> int:
        """This rank's number inside its group of a family; names as in :meth:`get_group_id`.

        Raises:
            ValueError: for a name that is no family of groups.
        """
        return int(getattr(self, _attribute_of_rank(_kind(name))))

    def members(self, name: str) -> tuple[int, ...]:
        """The world ranks of this rank's group of a family, in the order of their ranks inside it."""
        return self.groups(name)[self.get_group_id(name)]

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """The world ranks of every group of a family, in group order."""
        run, step = self._cuts()[_kind(name)]
        return tuple(
            tuple(range(first, begin + run, step))
            for begin in range(0, self.world_size, run)
            for first in range(begin, begin + step)
        )

    # Names of the 0.2.x releases.

    @property
    def next_rank(self) -> int:
        """The following stage, -1 on the last one."""
        return self.stage_id + 1 if self.stage_id + 1 < self.stages else -1

    @property
    def prev_rank(self) -> int:
        """The preceding stage, -1 on the first one."""
        return self.stage_id - 1

    @property
    def pp_group(self) -> list[list[int]]:
        """World ranks of every pipeline, stage by stage."""
        return [list(group) for group in self.groups(GroupKind.PIPE)]

    @property
    def dp_group(self) -> list[list[int]]:
        """World ranks of every stage."""
        return [list(group) for group in self.groups(GroupKind.PP_ZERO)]

    @property
    def heads(self) -> list[int]:
        """World ranks of the first stage."""
        return self.dp_group[0]

    @property
    def tails(self) -> list[int]:
        """World ranks of the last stage."""
        return self.dp_group[-1]


def _attribute_of_group(kind: GroupKind) -> str:
    return f"{kind.value}_idx"


def _attribute_of_rank(kind: GroupKind) -> str:
    return "stage_id" if kind is GroupKind.PIPE else f"{kind.value}_id"


def _kind(name: str) -> GroupKind:
    try:
        return GroupKind(name)
    except ValueError:
        names = ", ".join(repr(kind.value) for kind in GroupKind)
        raise ValueError(f"name: expected one of {names}, got {name!r}") from None


def equal_runs(places: Sequence[str]) -> int:
    """The number of consecutive ranks in each place, if equal for all and no place occurs twice; else 1.

    >>> [equal_runs(places) for places in ("aabb", "aaabbb", "aab", "abab", "ab", "aa")]
    [2, 3, 1, 1, 1, 2]
    """
    number = places.count(places[0])
    runs = [places[first : first + number] for first in range(0, len(places), number)]
    alike = all(len(run) == number and run.count(run[0]) == number for run in runs)
    return number if alike and len({run[0] for run in runs}) == len(runs) else 1
