"""Block policies: sharding, recomputation and communication of one block, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import torch

_NARROW = (torch.float16, torch.bfloat16)


class Recompute(enum.Enum):
    """The part of a forward that backward recomputes."""

    #: Nothing: activations are kept; the inner forward runs once.
    OFF = "off"
    #: All: only the inputs are kept; the inner forward runs again in backward.
    WHOLE = "whole"
    #: All but matrix products and attention, whose results are kept, as the inputs are.
    SELECTIVE = "selective"


class BlockMode(enum.Enum):
    """The ranks that share a block's parameters."""

    BLOCK = "BLOCK"  # all ranks (of a tensor-parallel slot)
    PIPE = "PIPE"  # the ranks of one pipeline stage


class BlockDtypes(NamedTuple):
    """Dtypes of a block's parameters when gathered and in the forward, and of gradients when reduced."""

    gather: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


class _Shares(NamedTuple):
    """Shares of the blocks: on a drive and on the host; the others are on the device."""

    disk: Fraction
    host: Fraction

    @classmethod
    def of(cls, name: str, places: Mapping[str, float]) -> _Shares:
        unknown = [place for place in places if place not in ("device", "host", "disk")]
        if unknown or any(share < 0 for share in places.values()) or abs(sum(places.values()) - 1) > 1e-6:
            raise ValueError(
                f"{name}: expected shares of 'device', 'host' and 'disk' with the sum 1, got {dict(places)!r}"
            )
        disk, host = (Fraction(places.get(place, 0.0)).limit_denominator(1000) for place in ("disk", "host"))
        return cls(disk, host)

    def __repr__(self) -> str:
        shares = {"disk": self.disk, "host": self.host, "device": 1 - self.disk - self.host}
        return repr({place: float(share) for place, share in shares.items() if share})

    def place_of(self, number: int) -> str:
        """Returns the place of the block ``number`` among the blocks in memory."""
        share = self.host / ((1 - self.disk) or 1)
        return "host" if _is_chosen(number, min(share, Fraction(1))) else "device"


def _on_disk(place: str | Mapping[str, float] | _Shares | None) -> Fraction:
    """Returns the share of the blocks that ``place`` puts on a drive."""
    return place.disk if isinstance(place, _Shares) else Fraction(place == "disk")


def _is_chosen(number: int, share: Fraction) -> bool:
    """Whether the block ``number`` is one of an evenly distributed ``share``."""
    return int((number + 1) * share) > int(number * share)


@dataclass(frozen=True)
class BlockPolicy:
    """Sharding, gathering, recomputation and gradient reduction of one block.

    Results do not depend on the policy, apart from what ``compute_dtype``, ``gather_dtype``, ``reduce_dtype`` and
    ``reduce`` round.

    Args:
        level: ZeRO level. 3 frees the full parameters after forward and gathers them again for backward; 2 keeps
            them from forward to backward; 1 keeps them always, and gathers them again at the first forward after a
            backward that sent gradients, or after a change in place. Gradients and optimizer state are shards at each
            of these. 0 is plain data parallelism: every rank has whole parameters, gradients (summed over the ranks,
            the same bits on all) and optimizer state, and gathers nothing.
        recompute: what backward runs again; a :class:`Recompute` or its value, ``"off"``, ``"whole"`` or
            ``"selective"``.
        keep_gathered: between the forwards and backwards of one :func:`bmtrain.no_sync` keep the full parameters.
        keep_gradients: in :func:`bmtrain.no_sync` keep whole gradients on each rank; otherwise they are sent as usual.

        compute_dtype: ``torch.float16`` or ``torch.bfloat16``: fp32 parameters are gathered in it (half the bytes), and
            the forward sees them and its floating-point arguments in it. Their shards, gradients and optimizer state
            stay fp32, and gradients are summed over the ranks in fp32. None: the parameters' own.
        gather_dtype: ``torch.float16`` or ``torch.bfloat16``: fp32 parameters travel in it (half the bytes) and are
            widened to fp32 on arrival. The forward sees values rounded to this dtype (to nearest, ties to even), on
            every rank, for its own shard too, and also on a single rank. Shards, state dicts and the optimizer keep
            the exact values. None: the dtype that the forward computes in.
        reduce_dtype: dtype in which gradients wait (in ``no_sync()``) and travel: ``torch.float16``, ``torch.bfloat16``
            or ``torch.float32``. None: the dtype that the forward computes in; at level 0, whose sums travel too, the
            parameters' own.
        reduce: how gradients are summed over the ranks that share the block. ``"direct"``: slices go straight to the
            rank that sums them, in rank order and in fp32, rounded once; between hosts that is as many times the bytes
            of a ring as a host has ranks. ``"hosts"``: in two steps, each in rank order and in fp32: over the ranks of
            a host, then over hosts, between which sums travel in ``reduce_dtype``: as few bytes as around a ring, the
            same bits on every run, rounded once more. ``"ring"``: NCCL's reduce-scatter, which adds in
            ``reduce_dtype`` and in an order of its own; on CPU ranks a reduce-scatter in rank order. None: ``"hosts"``
            where the ranks are on several hosts that have equally many, one after the other; else ``"direct"``, and
            with ``zero_size`` and virtual shards. ``"hosts"`` is ``"direct"`` where None would be.

        zero_size: number of consecutive ranks that shard one copy of the block, of which there is one for each such
            group (hybrid sharding). It must divide the number of ranks that would share the block without it; with
            ``survive=`` the next divisor counts. None, or at least that number: all of them.

        offload_activations: what backward needs of the forward waits in pinned memory of the host: with recomputation
            the inputs that require grad, and kept results; without it all activations. On CPU ranks they are there
            already, and nothing is done.

        parameters, gradients: where this rank's shards of them live. ``"device"``. ``"host"``: in page-locked memory of
            the host, and on the device while a few blocks around the running one need them; gradients are where the
            parameters are. ``"disk"``, with ``optimizer="disk"``: in ``init_distributed(tier_directories=...)``, and in
            memory while a few blocks need them. On CPU ranks ``"host"`` is ``"device"``.
        optimizer: ``"disk"``: the state that optimizers of this library keep for the block is in
            ``init_distributed(tier_directories=...)``, and passes through a few buffers in each step. None: where the
            optimizer keeps it. These three also take shares of the blocks, such as ``{"device": 0.6, "disk": 0.4}``,
            with at most as much of the parameters and of the gradients on a drive as of the state: blocks built one
            after the other are on a drive at even distances, two of five here.

    Raises:
        ValueError: naming the field, for a value that is not among these.

    Example:
        >>> from bmtrain import BlockPolicy
        >>> BlockPolicy(level=2, keep_gathered=True).recomputes
        True
    """

    level: int = 3
    recompute: Recompute | Literal["off", "whole", "selective"] = Recompute.WHOLE
    keep_gathered: bool = False
    keep_gradients: bool = True
    compute_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reduce: Literal["direct", "ring", "hosts"] | None = None
    zero_size: int | None = None
    offload_activations: bool = False
    parameters: Literal["device", "host", "disk"] | Mapping[str, float] = "device"
    gradients: Literal["device", "host", "disk"] | Mapping[str, float] = "device"
    optimizer: Literal["disk"] | Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        if self.level not in (0, 1, 2, 3):
            raise ValueError(f"level: expected 0, 1, 2 or 3, got {self.level!r}")
        try:
            object.__setattr__(self, "recompute", Recompute(self.recompute))
        except ValueError:
            values = ", ".join(repr(known.value) for known in Recompute)
            raise ValueError(f"recompute: expected one of {values}, got {self.recompute!r}") from None
        for name in ("parameters", "gradients", "optimizer"):
            place = getattr(self, name)
            if isinstance(place, Mapping):  # hashable, as the other fields are
                object.__setattr__(self, name, _Shares.of(name, place))
        if self.optimizer not in (None, "disk") and not isinstance(self.optimizer, _Shares):
            raise ValueError(
                f"optimizer: expected None or 'disk', got {self.optimizer!r}; for host memory use an optimizer that "
                "offloads, such as AdamOffloadOptimizer"
            )
        self._check_places()
        self._check_dtypes()
        if self.reduce not in (None, "direct", "ring", "hosts"):
            raise ValueError(f"reduce: expected None, 'direct', 'ring' or 'hosts', got {self.reduce!r}")
        if self.zero_size is not None and (type(self.zero_size) is not int or self.zero_size < 2):
            raise ValueError(f"zero_size: expected at least 2 (1 is level 0), got {self.zero_size!r}")
        if self.zero_size is not None and self.level == 0:
            raise ValueError(f"zero_size: at level 0 nothing is sharded, got {self.zero_size}")

    def _check_places(self) -> None:
        for name in ("parameters", "gradients"):
            place = getattr(self, name)
            if place not in ("device", "host", "disk") and not isinstance(place, _Shares):
                raise ValueError(f"{name}: expected 'device', 'host' or 'disk', got {place!r}")
            if _on_disk(place) > _on_disk(self.optimizer):
                raise ValueError(
                    f"{name}={place!r}: expected optimizer='disk' as well, got {self.optimizer!r}: an update passes "
                    "over parameters, gradients and state together; of shares, the state's on a drive is the largest"
                )
        if _on_disk(self.parameters) and self.level < 2:
            raise ValueError(
                f"parameters='disk': expected level 2 or 3, got {self.level}, which keeps all parameters in memory"
            )
        if _on_disk(self.gradients) and self.level == 0:
            raise ValueError("gradients='disk': expected level 1, 2 or 3, got 0, which shards no gradients")

    @property
    def shards_on_disk(self) -> bool:
        """Whether parameters or gradients live on a drive."""
        return "disk" in (self.parameters, self.gradients)

    def of_block(self, number: int) -> BlockPolicy:
        """Returns the policy of block ``number`` of a run, in which every share is a place.

        Example:
            >>> shares = BlockPolicy(optimizer={"device": 0.6, "disk": 0.4})
            >>> [shares.of_block(number).optimizer for number in range(5)]
            [None, None, 'disk', None, 'disk']
        """
        if not any(isinstance(place, _Shares) for place in (self.parameters, self.gradients, self.optimizer)):
            return self
        state = _on_disk(self.optimizer)
        is_on_disk = _is_chosen(number, state)
        places: dict[str, Any] = {"optimizer": "disk" if is_on_disk else None}
        for name in ("parameters", "gradients"):
            place = getattr(self, name)
            # Among the blocks whose state is on a drive, of which this is the one with the number `among`.
            among, share = int(number * state), _on_disk(place) / (state or 1)
            others = place.place_of(number - int(among * share)) if isinstance(place, _Shares) else place
            rest = "device" if place == "disk" else others
            places[name] = "disk" if is_on_disk and _is_chosen(among, share) else rest
        return replace(self, **places)

    def _check_dtypes(self) -> None:
        for name, dtype in (("compute_dtype", self.compute_dtype), ("gather_dtype", self.gather_dtype)):
            if dtype not in (None, *_NARROW):
                raise ValueError(f"{name}: expected None, torch.float16 or torch.bfloat16, got {dtype!r}")
        if self.gather_dtype is not None and self.compute_dtype not in (None, self.gather_dtype):
            raise ValueError(
                f"gather_dtype: expected None or the compute_dtype, {self.compute_dtype}, in which parameters travel "
                f"then, got {self.gather_dtype}"
            )
        if self.gather_dtype is not None and self.level == 0:
            raise ValueError(f"gather_dtype: at level 0 nothing is gathered, got {self.gather_dtype}")
        if self.reduce_dtype not in (None, *_NARROW, torch.float32):
            raise ValueError(
                "reduce_dtype: expected None, torch.float16, torch.bfloat16 or torch.float32, got "
                f"{self.reduce_dtype!r}"
            )

    @property
    def recomputes(self) -> bool:
        return self.recompute is not Recompute.OFF

    def num_sharing(self, num_ranks: int, rounds_up: bool = False) -> int:
        """Returns the number of ranks, of ``num_ranks``, that share the block.

        Args:
            num_ranks: that would share it without ``zero_size``.
            rounds_up: whether ``zero_size`` stands for the next divisor of ``num_ranks``.

        Raises:
            ValueError: if they cannot be divided by ``zero_size``.
        """
        if self.level == 0:
            return 1
        if self.zero_size is None or self.zero_size >= num_ranks:
            return num_ranks
        if rounds_up:
            return next(size for size in range(self.zero_size, num_ranks + 1) if num_ranks % size == 0)
        if num_ranks % self.zero_size:
            raise ValueError(
                f"zero_size: expected a divisor of the {num_ranks} ranks that share the block, got {self.zero_size}"
            )
        return self.zero_size

    def dtypes_of(self, dtype: torch.dtype) -> BlockDtypes:
        """Returns the dtypes of gather, compute and reduction for parameters of ``dtype``."""
        compute = gather = dtype
        if dtype == torch.float32:
            compute = self.compute_dtype or dtype
            gather = self.gather_dtype or compute
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return BlockDtypes(gather, compute, dtype)
        return BlockDtypes(gather, compute, self.reduce_dtype or (dtype if self.level == 0 else compute))
