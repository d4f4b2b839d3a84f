"""Steps that are done again, or to their end, after the loss of a rank.

[Note: Places in a step]
A step has two moments at which the ranks wait for each other. At the end of the loop over virtual shards every rank's
gradients are with the keeper of its copy: the step is *committed*. At the *gate*, in `OptimManager.step`, every rank
has done all that needs another rank. So the survivors of a loss are at one of these places:

- before the commit: the loop runs again, over shards that are divided again;
- between commit and gate: the gradients are sharded again, clipping is repeated, and the step continues;
- some beyond the gate: the others only have local work left. They do it, and are then before the next commit.

The number of a place is twice the number of gates passed, plus one after the commit.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.said import write_lines
from .._base.unseen import gradient_of
from .._C import ReduceOp, TreeSum
from .._engine.engine import current_engine
from .._ranks import context as _context
from .._ranks.context import Context
from .._watch.blame import ranks_text
from ..errors import CommunicationError
from ..optim._sharded import ShardedOptimizer
from ..parameter import DistributedParameter
from ..virtual import VirtualShard, VirtualShards
from .copies import Message, Ward, all_parameters, exchange
from .members import Members
from .reconnect import Reconnection
from .reshard import Before, parts_of, shard_again, steps_of

_AGAIN = "start the job again from the last checkpoint"


class Survival:
    """State of a process of which others may be lost: `init_distributed(survive=...)`.

    Args:
        may_lose: number of ranks that may be lost at once.
        members: the ranks of the job.
        hosts: the host of each rank.

    Attributes:
        times: seconds of each part of the last recovery.
        losses: number of ranks lost so far.
    """

    def __init__(self, may_lose: int, members: Members, hosts: Sequence[str]) -> None:
        self._may_lose = may_lose
        self._members = members
        self._hosts = list(hosts)
        self._managers: list[weakref.ref[Any]] = []
        self._lost: list[int] = []  # by the verdict
        self._place = 0
        self._ward: Ward | None = None
        self._is_whole = False  # each rank's copy is there
        self._messages: tuple[Message, Message] | None = None  # of the committed step
        self._clips: list[Callable[[], Any]] = []  # since the commit
        self._versions = 0, 0
        self._gradients: list[tuple[int, int]] = []
        self._own_losses: list[Tensor] = []
        self._all_losses: Tensor | None = None  # of the committed step, by rank
        self.times: dict[str, float] = {}
        self.losses = 0

    def attend(self, ctx: Context) -> None:
        """Takes over the verdicts of the watchdog."""
        self._lost = []
        if ctx.watch is not None:
            ctx.watch.may_survive = self._may_survive

    def _may_survive(self, verdict: dict[str, Any]) -> bool:
        """Whether the job continues after a verdict; called by the watchdog's thread."""
        culprits = [int(rank) for rank in verdict["culprits"]]
        absent = {int(rank) for rank, why in verdict["absent"].items() if not why.startswith("left")}
        survives = (
            self._is_whole
            and 0 < len(culprits) <= self._may_lose
            and set(culprits) <= absent
            and self._members.rank not in culprits
        )
        if survives:
            self.times = {"at": time.monotonic()}
            self._lost = culprits
        return survives

    # ---- optimizers and copies

    def add(self, manager: Any, optimizer: Any) -> None:
        """Notes a manager and an optimizer of it, which is to be copied."""
        if any(known() not in (None, manager) for known in self._managers):
            raise ValueError("survive: expected one OptimManager, with all optimizers, got a second one")
        if manager.loss_scale_enabled:
            raise ValueError("survive: expected no loss scale: train in bfloat16 or float32")
        _check(optimizer)
        if not any(known() is manager for known in self._managers):
            self._managers.append(weakref.ref(manager))
        optimizer.register_load_state_dict_post_hook(self._forget_copies)
        self._is_whole = False

    def _forget_copies(self, _: Any) -> None:
        self._is_whole = False

    def _optimizers(self) -> list[ShardedOptimizer]:
        managers = [manager for reference in self._managers if (manager := reference()) is not None]
        return [optimizer for manager in managers for optimizer in manager.optimizers]

    def _make_copies(self) -> None:
        """Makes the copy of the ward: before the first step, and after a load. Collective."""
        self._is_whole = False
        ctx = _context.context()
        optimizers = self._optimizers()
        if not optimizers:
            raise RuntimeError(
                "survive: expected an OptimManager with optimizers before the first loop over virtual shards"
            )
        params = all_parameters(ctx, optimizers)
        rank, size = ctx.world.rank, ctx.world.size
        steps = _largest(ctx, steps_of(optimizers, None))
        self._ward = shard_again(
            ctx, optimizers, Before(rank, range(size), None, parts_of(params), None, steps)
        )
        ctx.world.comm.barrier("copies")
        self._is_whole = size > 1
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = self._version()

    def _version(self) -> tuple[int, int]:
        """Changes when parameters were added, or written to."""
        params = list(self._trained())
        return len(params), sum(p._version for p in params)

    def _trained(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _note_gradients(self) -> None:
        self._gradients = self._gradient_mark()

    def _gradient_mark(self) -> list[tuple[int, int]]:
        """Changes when a gradient is replaced, or written to."""
        found = [gradient_of(p) for p in self._trained()]
        return [(0, 0) if grad is None else (grad.data_ptr(), grad._version) for grad in found]

    # ---- the loop

    def shards(self, loop: VirtualShards) -> Iterator[VirtualShard]:
        """Yields the shards of a step, again from the first one if a rank is lost."""
        if self._place % 2:
            raise RuntimeError("survive: expected OptimManager.step() after each loop over virtual shards")
        if self._lost:
            self._recover()
        if not self._is_whole or self._version() != self._versions:
            self._make_copies()
        while True:
            self._begin()
            for shard in loop.micro_steps():
                self._let_be_void(True)
                try:
                    yield shard
                finally:
                    self._let_be_void(False)
                if self._lost:
                    break
            else:
                if self._commit():
                    return
            self._recover()
            if self._place % 2:
                return

    def _begin(self) -> None:
        self._own_losses.clear()
        self._messages = None
        for optimizer in self._optimizers():
            optimizer.zero_grad(set_to_none=True)

    def _let_be_void(self, allowed: bool) -> None:
        watch = _context.context().watch
        if watch is not None:
            watch.core.let_be_void(allowed)

    def _commit(self) -> bool:
        """Sends the gradients; returns whether the step is committed. Collective."""
        ctx = _context.context()
        self._clips.clear()
        params = [p for p in all_parameters(ctx, self._optimizers()) if p.grad is not None]
        rank, size = ctx.world.rank, ctx.world.size
        try:
            self._share_losses(ctx)
            if size > 1 and self._ward is not None:
                own, ward = Message(params, rank), Message(params, self._ward.rank)
                exchange(ctx.world.comm, own, ward, self._place // 2)
                self._messages = own, ward
                self._ward.set_gradients(ward.gradients())
            ctx.world.comm.barrier("commit")
        except CommunicationError:
            if not self._lost:
                raise
            return False
        self._place += 1
        self._note_gradients()
        return True

    # ---- losses

    def note_loss(self, loss: Tensor) -> None:
        """Notes a loss that is differentiated."""
        self._own_losses.append(loss.detach().to(torch.float32).reshape(()))

    def _share_losses(self, ctx: Context) -> None:
        self._all_losses = None
        own = torch.stack(self._own_losses) if self._own_losses else torch.empty(0)
        rows = own.new_empty((ctx.world.size, len(own)))
        if len(own):
            ctx.world.comm.all_gather(rows.view(-1), own, "losses").wait()
            self._all_losses = rows

    def mean(self, loop: VirtualShards, values: Sequence[Any]) -> Tensor | None:
        """Returns the mean of the losses of the step, which all ranks know; None if ``values`` are others."""
        known = self._all_losses
        if known is None or len(values) < known.shape[1]:
            return None
        last = [torch.as_tensor(value, dtype=torch.float32).detach().reshape(()) for value in values]
        own = torch.stack(last[-known.shape[1] :])
        if not torch.equal(own.view(torch.int32), torch.stack(self._own_losses).view(torch.int32)):
            return None
        tree = TreeSum(loop.count)
        for value in known.t().reshape(-1, 1):
            tree.push(value)
        return tree.total().squeeze(0).div_(loop.count)

    # ---- after the loop

    def clip(self, clip: Callable[[], Tensor]) -> Tensor:
        """Runs a clipping of the committed gradients, again after a loss."""
        while True:
            try:
                norm = clip()
            except CommunicationError:
                if not self._lost:
                    raise
                self._recover()
            else:
                self._clips.append(clip)
                self._note_gradients()
                return norm

    def copies_of(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Returns the copies of parameters, whose gradients are scaled alike."""
        if self._ward is None:
            return []
        return [self._ward.params[p] for p in params if isinstance(p, DistributedParameter)]

    def pass_gate(self) -> None:
        """Waits until no rank needs another one for the rest of the step. Collective."""
        if not self._place % 2:
            raise RuntimeError("survive: expected a loop over virtual shards before OptimManager.step()")
        if self._gradient_mark() != self._gradients:
            raise RuntimeError(
                "survive: expected gradients to be changed by OptimManager.clip_grad_norm() only, got others than the "
                "loop has made: their copies on other ranks would differ"
            )
        place = self._place
        while self._place == place:
            try:
                _context.context().world.comm.barrier("step")
            except CommunicationError:
                if not self._lost:
                    raise
                self._recover()
            else:
                self._place += 1

    def step_copy(self, optimizer: Any, scale: float) -> None:
        """Updates the copy as ``optimizer`` has just updated its parameters."""
        optimizers = self._optimizers()
        number = next(number for number, known in enumerate(optimizers) if known is optimizer)
        if self._ward is not None:
            self._ward.step(number, optimizer, scale)
        if number == len(optimizers) - 1:
            self._note_versions()

    # ---- after a loss

    def _recover(self) -> None:
        """Continues without the lost ranks. Collective over the others."""
        began = time.monotonic()
        detected = self.times.pop("at", began)
        ctx = _context.context()
        self._drop_what_runs(ctx)
        optimizers = self._optimizers()
        report = {"place": self._place, "steps": steps_of(optimizers, self._ward)}
        rendezvous = Reconnection(ctx)

        def give(reports: dict[int, dict[str, Any]]) -> dict[str, Any]:
            places = {other["place"] for other in reports.values()}
            return {} if _are_beyond_a_gate(places) else rendezvous.serve(self._members)

        while True:
            meeting = self._members.agree(report, self._lost, self._may_lose, ctx.timeout, give)
            places = {other["place"] for other in meeting.reports.values()}
            if not _are_beyond_a_gate(places):
                break
            if self._place == min(places):
                self._place += 1  # the gate; this rank comes back when it has done the rest of the step
                return
        agreed = time.monotonic()
        lost = sorted(set(range(ctx.world.size)) - set(meeting.survivors))
        try:
            self._go_on(ctx, meeting, rendezvous, optimizers, max(places))
        except (RuntimeError, OSError) as error:
            raise CommunicationError(
                f"a further rank was lost before the copies of {ranks_text(lost)} were shared out: {_AGAIN} ({error})"
            ) from error
        clips, self._clips = self._clips, []
        for clip in clips:  # before the survivors that had not completed it try it again
            self.clip(clip)
        self.losses += len(lost)
        ended = time.monotonic()
        self.times = {
            "micro-step to its end": began - detected,
            "agreement": agreed - began,
            **self.times,
            "all": ended - detected,
        }
        if _context.context().world.rank == 0:
            parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.times.items())
            write_lines()
            print(
                f"bmtrain: {ranks_text(lost)} lost; {_context.context().world.size} ranks continue ({parts})",
                flush=True,
            )

    def _go_on(
        self,
        ctx: Context,
        meeting: Any,
        rendezvous: Reconnection,
        optimizers: list[ShardedOptimizer],
        place: int,
    ) -> None:
        survivors = meeting.survivors
        size = ctx.world.size
        # The keeper of a rank's copy is the next rank.
        keepers = [rank if rank in survivors else (rank + 1) % size for rank in range(size)]
        if not set(keepers) <= set(survivors):
            raise CommunicationError("a rank and the keeper of its copy were lost")
        params = all_parameters(ctx, optimizers)
        gradients = None
        if place % 2:
            assert self._messages is not None
            gradients = self._messages[0].gradients(), self._messages[1].gradients()
        reports = meeting.reports.values()
        before = Before(
            ctx.world.rank,
            [survivors.index(keeper) for keeper in keepers],
            self._ward,
            parts_of(params),
            gradients,
            [max(steps) for steps in zip(*(other["steps"] for other in reports), strict=True)],
        )
        self._is_whole = False
        self._hosts = [self._hosts[rank] for rank in survivors]
        started = time.monotonic()
        new = rendezvous.connect(ctx, self._members, meeting, self._hosts)
        self._members.advance(survivors)
        self.attend(new)
        connected = time.monotonic()
        self._ward = shard_again(new, optimizers, before)
        self._place = place
        if place % 2:
            self._commit_again(new, params)
            self._note_gradients()
        new.world.comm.barrier("copies")
        self._is_whole = new.world.size > 1
        self._note_versions()
        self.times = {"connection": connected - started, "state": time.monotonic() - connected}

    def _commit_again(self, ctx: Context, params: Sequence[DistributedParameter]) -> None:
        """Keeps the gradients of the committed step as they are now sharded."""
        if self._ward is None:
            self._messages = None
            return
        trained = [p for p in params if p.grad is not None]
        own, ward = Message(trained, ctx.world.rank), Message(trained, self._ward.rank)
        exchange(ctx.world.comm, own, ward, self._place // 2)
        self._messages = own, ward

    def _drop_what_runs(self, ctx: Context) -> None:
        """Ends gathers and reductions of the lost step."""
        engine = current_engine(ctx)
        self._let_be_void(True)
        try:
            engine.drop_ahead()
            for block in engine.blocks:
                block.drop_gathered()
            engine.gradients.drop_stale()
        finally:
            self._let_be_void(False)


def _are_beyond_a_gate(places: set[int]) -> bool:
    """Whether some ranks have passed a gate, and others have still to do so."""
    return len(places) > 1 and max(places) % 2 == 0


def _largest(ctx: Context, steps: list[int]) -> list[int]:
    """Returns the largest of each number over the ranks. Collective."""
    numbers = torch.tensor(steps, dtype=torch.int64)
    if len(numbers):
        ctx.world.comm.all_reduce(numbers, ReduceOp.MAX, "steps").wait()
    return [int(number) for number in numbers]


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
