"""Replacement of another rank by this one: a copy, or on one host the memory of that rank (`shared.py`).

[Note: Updates of copies]
A copy is updated in a thread, beside the next forward and backward; nothing else reads it or writes to it until
`Keeper.settle`, which all that needs the copy calls first: the next commit, a recovery, and making copies again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from .._base.said import say
from .._base.tensors import gradient_of
from .._engine.engine import current_engine
from .._ranks.agree import largest
from .._ranks.context import Context, context
from .._ranks.groups import host_comm
from ..optim._sharded import ShardedOptimizer
from ..optim.places import OnDevice
from .copies import Held, Message, Ward, all_parameters, is_copied
from .reshard import Before, own_shards, parts_of, shard_again, steps_of
from .ring import Ring
from .shared import SharedWard, may_share


class Keeper:
    """Keeps the copy of the ward of this rank in step with it.

    Attributes:
        ring: the keeper of each rank's copy.
        ward: the copy, or the ward's own memory; None on a single rank.
        is_whole: whether each rank's copy, or memory, is there.
        is_stale: whether a rank has found damage, so that all copies are to be made again.
        damage: name of what is damaged in the copy on this rank, see [Note: Damaged copies].
        messages: gradients of the committed step: of this rank, of its ward, and of this rank's shards without copy.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.ward: Ward | SharedWard | None = None
        self.is_whole = False
        self.is_stale = False
        self.damage = ""
        self.messages: tuple[Message, Message, Message] | None = None
        self.managers: list[weakref.ref[Any]] = []
        self._can_share = True
        self._versions = 0, 0
        self._writes = 0
        self._gradients: list[tuple[int, int]] = []
        self._room: tuple[Message, Message, Message] | None = None  # of the messages, for the next ones
        self._thread = ThreadPoolExecutor(1, "bmtrain-copies")  # see [Note: Updates of copies]
        self._updates: list[Future[None]] = []  # in the thread

    def add(self, manager: Any, optimizer: Any) -> None:
        """Notes a manager and an optimizer of it, which is to be copied."""
        if any(known() not in (None, manager) for known in self.managers):
            raise ValueError("survive: expected one OptimManager, with all optimizers, got a second one")
        if manager.loss_scale_enabled:
            raise ValueError("survive: expected no loss scale: train in bfloat16 or float32")
        _check(optimizer)
        device, place = context().device, optimizer._place
        if device.type == "cuda" and isinstance(place, OnDevice):
            if not optimizer._formula.has_kernel(device):
                raise ValueError(
                    "survive: expected kernels for GPUs (bmtrain built with CUDA), or AdamOffloadOptimizer, got "
                    f"{type(optimizer).__name__} without a kernel: copies in host memory would have other bits"
                )
            place.as_torch = False  # torch's order of operations differs there from that of copies
        if not any(known() is manager for known in self.managers):
            self.managers.append(weakref.ref(manager))
        optimizer.register_load_state_dict_post_hook(self._forget)
        self.is_whole = False

    def _forget(self, _: Any) -> None:
        self.is_whole = False
        if self.ward is not None:
            self.ward.leave()

    def manager(self) -> Any:
        """Returns the manager of all optimizers."""
        return next(manager for reference in self.managers if (manager := reference()) is not None)

    def optimizers(self) -> list[ShardedOptimizer]:
        managers = [manager for reference in self.managers if (manager := reference()) is not None]
        return [optimizer for manager in managers for optimizer in manager.optimizers]

    # ---- making copies

    def make(self, ctx: Context) -> None:
        """Makes the copies: before the first step, after a load, after damage. Collective."""
        self.is_whole = False
        optimizers = self.optimizers()
        if not optimizers:
            raise RuntimeError(
                "survive: expected an OptimManager with optimizers before the first loop over virtual shards"
            )
        if self._can_share and may_share(ctx, optimizers):
            self.settle()
            self._share(ctx)
        else:
            self._copy(ctx)
        self.seal(ctx)

    def _copy(self, ctx: Context) -> None:
        """Makes copies, from the shards of the ranks that are there. Collective."""
        optimizers = self.optimizers()
        params = all_parameters(ctx, optimizers)
        steps = largest(steps_of(optimizers), "steps", host_comm(ctx))
        held = {ctx.world.rank: own_shards(optimizers, params)}
        self.take(ctx, Before(held, range(ctx.world.size), parts_of(params), False, steps))

    def _share(self, ctx: Context) -> None:
        """Maps the memory of the ward, see [Note: Shared shards]. Collective."""
        is_moved = self.ward is None or not self.ward.is_in_place(self.optimizers())
        if largest([int(is_moved)], "copies", host_comm(ctx))[0]:
            self.leave()
            shared = SharedWard(ctx, self.optimizers(), self.ring)
            if not shared.meet(ctx):
                self._can_share = False
                if ctx.world.rank == 0:
                    say(
                        "bmtrain: survive: ranks cannot map each other's memory here: each keeps a copy of another"
                    )
                self._copy(ctx)
                return
            self.ward, self._room = shared, None
        self.damage, self.is_stale = "", False

    def leave(self) -> None:
        """Ends the use of the copy, or of shared memory."""
        if self.ward is not None:
            self.ward.leave()
            self.ward = None

    def take(self, ctx: Context, before: Before) -> None:
        """Shards everything over the present ranks and takes the copy, or the memory, of the ward. Collective."""
        self.settle()
        self.is_whole, self._room = False, None
        self.leave()
        optimizers = self.optimizers()
        shares = may_share(ctx, optimizers)
        if shares:  # a process that joins has not tried
            self._can_share = shares = not largest([int(not self._can_share)], "copies", host_comm(ctx))[0]
        self.ward = shard_again(ctx, optimizers, before, self.ring, not shares)
        self.damage, self.is_stale = "", False
        if shares:
            self._share(ctx)

    def seal(self, ctx: Context) -> None:
        """Notes that each rank's copy is there. Collective."""
        host_comm(ctx).barrier("copies")
        if self.ward is not None:
            self.ward.seal()
        for block in current_engine(ctx).blocks if ctx.device.type == "cpu" else ():
            for buffer in block.buffers:
                buffer.keep_gradient_memory()
        self.is_whole = ctx.world.size > 1
        self.note_versions()

    def is_current(self) -> bool:
        """Whether all copies are copies of the present parameters; the same on all ranks."""
        if self.ward is not None and not self.ward.is_current():
            return False
        return self.is_whole and not self.is_stale and self._version() == self._versions

    def note_versions(self) -> None:
        """Notes parameters and state as they are."""
        self._versions, self._writes = self._version(), self._state_writes()

    def is_state_changed(self) -> bool:
        """Whether a script has written to optimizer state on this rank, of which its keeper knows nothing."""
        return self.is_whole and self._state_writes() != self._writes

    def written(self) -> int:
        """Returns the target of writes since `note_versions`: 2: optimizer state, 1: parameters, 0: neither."""
        if self.is_state_changed():
            return 2
        return int(self.is_whole and self._version() != self._versions)

    def _state_writes(self) -> int:
        states = [entry for o in self.optimizers() for entry in o.__dict__["state"].values()]
        return sum(x._version for entry in states for x in entry.values() if isinstance(x, Tensor))

    def _version(self) -> tuple[int, int]:
        """Changes when parameters were added, or written to, also through ``.data``."""
        params = list(self._trained())
        owners = {id(owner): owner for p in params if (owner := getattr(p, "_block", None) or p) is not None}
        data = (getattr(owner, "_data_version", None) for owner in owners.values())
        return len(params), sum(p._version for p in params) + sum(d.value for d in data if d is not None)

    def _trained(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]

    # ---- gradients

    def begin(self) -> None:
        """Drops the gradients of an earlier loop; the next ones replace the gradients of the copy."""
        self.messages = None
        for optimizer in self.optimizers():
            optimizer.zero_grad(set_to_none=True)

    def note_gradients(self) -> None:
        """Notes the gradients as they are."""
        self._gradients = self._gradient_mark()

    def are_gradients_changed(self) -> bool:
        """Whether they are others than `note_gradients` has noted."""
        return self._gradient_mark() != self._gradients

    def _gradient_mark(self) -> list[tuple[int, int]]:
        """Changes when a gradient is replaced, or written to."""
        found = [gradient_of(p) for p in self._trained()]
        return [(0, 0) if grad is None else (grad.data_ptr(), grad._version) for grad in found]

    def send(self, ctx: Context, step: int) -> None:
        """Sends this rank's gradients to its keeper, and gives the copy the ward's. Collective."""
        self.messages = None
        if self.ward is None:
            return
        params = [p for p in all_parameters(ctx, self.optimizers()) if p.grad is not None]
        copied, others = ([p for p in params if is_copied(p) is flag] for flag in (True, False))
        self.settle()  # see [Note: Memory of gradients]
        self._writes += self.ward.create_state()
        messages, self._room = self._room, None  # an exchange that fails may write to its memory later
        if messages is None or not (messages[1].fits(copied) and messages[2].fits(others)):
            rank = ctx.world.rank
            messages = *self.ward.messages(copied, rank), Message(others, rank)
        self.ward.exchange(host_comm(ctx), *messages[:2], step, self.ring)
        messages[2].pack(step)
        self.messages = self._room = messages
        found = messages[1].header()[0]
        if found != step:
            self.note_damage(f"a message of step {found} instead of {step}")
        self.ward.take_gradients(messages[1])

    def scale_gradients(self, params: Iterable[Any], factor: float) -> None:
        """Multiplies the copies of gradients between commit and gate, as the ward multiplies its own."""
        if self.ward is not None and self.messages is not None and factor != 1:
            self.ward.scale_gradients(params, factor)

    def held(self, ctx: Context, place: int) -> dict[int, Held]:
        """Returns what this rank has at a place, by rank: its own shards, its ward's, and gradients that were sent.

        Nothing of a ward that is beyond the next gate: if it is lost, this rank passes the gate first.
        """
        self.settle()
        optimizers, ward, own, other = self.optimizers(), self.ward, None, None
        if self.messages is not None:
            self.note_damage(self.messages[1].damage(place // 2))
            own, other, without_copy = (message.copies() for message in self.messages)
            own |= without_copy
        held = {ctx.world.rank: own_shards(optimizers, all_parameters(ctx, optimizers), own)}
        if ward is not None and self.ward_place()[1] <= place:
            held[ward.rank] = ward.held(other)
            self.note_damage(ward.damage())
        return held

    def ward_place(self) -> tuple[int, int]:
        """Returns the rank of the ward, and the number of the last gate that it is known to have passed."""
        return (-1, 0) if self.ward is None else (self.ward.rank, self.ward.place())

    # ---- the step

    def pass_gate(self, place: int, is_left_out: bool) -> None:
        """Notes that no rank needs another one for the rest of the step, which may be left out."""
        self.messages = None  # of a step that is over
        if self.ward is not None:
            self.ward.pass_gate(place, is_left_out)

    def step(self, optimizer: Any, scale: float) -> None:
        """Starts the update of the copy as ``optimizer`` has just updated its parameters."""
        found, ward = self.optimizers(), self.ward
        number = next(number for number, known in enumerate(found) if known is optimizer)
        is_last = number == len(found) - 1
        if ward is not None and (update := ward.note_update(number, optimizer, scale)) is not None:
            self._updates.append(self._thread.submit(self._update, ward, update, is_last))
        if is_last:
            self.note_versions()

    def _update(self, ward: Ward | SharedWard, update: Callable[[], str], is_last: bool) -> None:
        """Updates the copy by one optimizer; in the thread."""
        if not self.damage:
            self.note_damage(update())
        if is_last:
            self.note_damage(ward.damage())  # of what no optimizer has updated

    def settle(self) -> None:
        """Waits for the update of the copy, or raises its error."""
        updates, self._updates = self._updates, []
        for update in updates:
            update.result()

    def note_damage(self, what: str) -> None:
        """Notes damage of the copy on this rank, which is not used any more."""
        if what and not self.damage and self.ward is not None:
            self.damage = f"{what}, in the copy of rank {self.ward.rank}"
            say(f"bmtrain: damaged: {self.damage}; it is not used: all copies are made again")


def check_reads(ctx: Context, optimizers: Sequence[ShardedOptimizer]) -> None:
    """Refuses parameters outside Blocks of which there is no copy."""
    known = {p._number for p in all_parameters(ctx, optimizers)}
    outside = current_engine(ctx).reads.outside
    if not known.issuperset(outside):
        gc.collect()  # of an earlier model of this process
    for number, p in sorted(outside.items()):
        if number not in known:
            raise ValueError(
                f"survive: expected all parameters outside Blocks in an optimizer of the manager, frozen ones "
                f"too, got {p._label} in none: give the optimizer model.parameters()"
            )


def _check(optimizer: Any) -> None:
    """Refuses optimizers that are not copied yet."""
    place = getattr(optimizer, "_place", None)
    if (
        not isinstance(optimizer, ShardedOptimizer)
        or optimizer._formula.is_whole
        or place is None
        or place.state_dtype != torch.float32
        or getattr(optimizer._formula, "record_delta", False)
        or optimizer._owned_scale is not None
    ):
        raise ValueError(
            f"survive: expected AdamOptimizer, AdamOffloadOptimizer or another element-wise optimizer of bmtrain with "
            f"state in fp32, without scale= and record_delta=, got {type(optimizer).__name__}"
        )
