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

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.said import write_lines
from .._C import TreeSum
from .._engine.engine import current_engine
from .._ranks import context as _context
from .._ranks.agree import largest
from .._ranks.context import Context
from .._ranks.groups import host_comm
from .._watch.blame import ranks_text
from ..errors import CommunicationError
from ..virtual import VirtualShard, VirtualShards
from .copies import all_parameters
from .keeper import Keeper, check_reads
from .members import Meeting, Members
from .reconnect import Reconnection
from .reshard import Before, parts_of, steps_of
from .ring import Ring

#: Targets of writes, see `Keeper.written`.
_WRITTEN = (
    "",
    "parameters to be changed before a loop over virtual shards or after OptimManager.step(), got a write in between",
    "optimizer state to be changed by OptimManager.step() and load_state_dict() only, got a write to it (change a "
    "state_dict() and load it)",
)


class Survival:
    """State of a process of which others may be lost: `init_distributed(survive=...)`.

    Args:
        members: the ranks of the job; None before this process has met them.
        hosts: the host of each rank.

    Attributes:
        exceptions_are_losses: whether the others continue after an exception of one rank.
        user_state: functions that get and set registered state, by name.
        times: seconds of each part of the last recovery.
        losses: number of ranks lost so far.
    """

    def __init__(self, members: Members | None, hosts: Sequence[str]) -> None:
        self._known_members = members
        self._hosts = list(hosts)
        self._keeper = Keeper(Ring(hosts))
        self._lost: dict[int, bool] = {}  # by the verdict; whether they end by themselves
        self._place = 0
        self._admits_at = 0  # the rank at which a process waits, plus one; 0: none
        self._written = 0  # see `Keeper.written`
        self._clips: list[Callable[[], Any]] = []  # since the commit
        self._own_losses: list[Tensor] = []
        self._all_losses: Tensor | None = None  # of the committed step, by rank
        self.exceptions_are_losses = False
        self.user_state: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self.times: dict[str, float] = {}
        self.losses = 0

    @property
    def _members(self) -> Members:
        assert self._known_members is not None
        return self._known_members

    def attend(self, ctx: Context, hosts: Sequence[str]) -> None:
        """Takes over the verdicts of the watchdog of ranks on these hosts."""
        self._hosts = list(hosts)
        self._keeper.ring = Ring(hosts)
        if ctx.watch is not None:
            ctx.watch.may_survive = partial(self._may_survive, ctx.world.rank, False)

    def _may_survive(self, own: int, recovers: bool, verdict: dict[str, Any]) -> str:
        """Returns the error of operations after a verdict that the job may survive, else nothing; in a thread."""
        culprits = {int(rank) for rank in verdict["culprits"]}
        absent = {int(rank) for rank, why in verdict["absent"].items() if not why.startswith("left")}
        raised = self.exceptions_are_losses and verdict["failure"]["kind"] == "exception"
        # A rank that hears of its own silence was only slow: it meets the others, if they still wait for it.
        survives = own not in culprits if raised else len(culprits) > 0 and culprits <= absent
        survives &= self._keeper.is_whole or recovers
        if not survives:
            return ""
        self.times = {"at": time.monotonic()}
        self._lost = dict.fromkeys(culprits, raised)
        return f"{verdict['text']}; outside of a step that ends the job: {self._again(_context.context())}"

    def add(self, manager: Any, optimizer: Any) -> None:
        """Notes a manager and an optimizer of it, which is to be copied."""
        self._keeper.add(manager, optimizer)

    # ---- the loop

    def shards(self, loop: VirtualShards) -> Iterator[VirtualShard]:
        """Yields the shards of a step, again from the first one if a rank is lost."""
        if self._place % 2:
            if not self._keeper.are_gradients_changed():
                raise RuntimeError(
                    "survive: expected OptimManager.step() after each loop over virtual shards, or zero_grad(), which "
                    "leaves the step out, on all ranks"
                )
            self._pass_gate(is_left_out=True)
        if self._lost:
            self._recover()
        self._written = 2 * self._keeper.is_state_changed()
        if not self._keeper.is_current():
            self._keeper.make(_context.context())
        state = self.get_user_state()
        while True:
            self._own_losses.clear()
            self._keeper.begin()
            try:
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
            except CommunicationError:  # of the sums of replicas
                if not self._lost:
                    raise
            self._recover()
            if self._place % 2:
                return
            self.set_user_state(state)

    def get_user_state(self) -> dict[str, Any]:
        """Returns copies of the registered state."""
        return {name: copy.deepcopy(get()) for name, (get, _) in self.user_state.items()}

    def set_user_state(self, state: dict[str, Any]) -> None:
        """Gives registered state its former values, of which copies are kept."""
        for name, value in state.items():
            self.user_state[name][1](copy.deepcopy(value))

    def _let_be_void(self, allowed: bool) -> None:
        watch = _context.context().watch
        if watch is not None:
            watch.core.let_be_void(allowed)

    def _commit(self) -> bool:
        """Sends the gradients; returns whether the step is committed. Collective."""
        ctx, keeper = _context.context(), self._keeper
        self._clips.clear()
        check_reads(ctx, keeper.optimizers())
        try:
            self._share_losses(ctx)
            with current_engine(ctx).waiting("copies", "copies"):
                keeper.send(ctx, self._place // 2)
            flags = self._agree(ctx, int(bool(keeper.damage)), self.waiting_at(ctx))
        except CommunicationError:
            if not self._lost:
                raise
            return False
        self._place += 1
        keeper.is_stale |= bool(flags[0])
        self._admits_at = flags[1]
        keeper.note_gradients()
        return True

    def _agree(self, ctx: Context, *own: int) -> list[int]:
        """Returns the largest of each number over the ranks, or raises the error that one has found. Collective.

        The device has then done all that it was given: none of it waits for another rank any more.
        """
        _finish_device(ctx)
        self._written = max(self._written, self._keeper.written())
        flags = largest([*own, self._written], "survive", host_comm(ctx))
        if flags[-1]:
            raise RuntimeError(
                f"survive: expected {_WRITTEN[flags[-1]]}: its copies on other ranks would differ"
            )
        return flags

    def waiting_at(self, ctx: Context) -> int:
        """Returns this rank's number plus one if a process waits here for a place that there is; else 0."""
        return 0

    # ---- losses

    def note_loss(self, loss: Tensor) -> None:
        """Notes a loss that is differentiated."""
        self._own_losses.append(loss.detach().to(torch.float32).reshape(()))

    def _share_losses(self, ctx: Context) -> None:
        self._all_losses = None
        own = torch.stack(self._own_losses).cpu() if self._own_losses else torch.empty(0, device="cpu")
        rows = own.new_empty((ctx.world.size, len(own)))
        if len(own):
            host_comm(ctx).all_gather(rows.view(-1), own, "losses").wait()
            self._all_losses = rows

    def mean(self, loop: VirtualShards, values: Sequence[Any]) -> Tensor | None:
        """Returns the mean of the losses of the step, which all ranks know; None if ``values`` are others."""
        known = self._all_losses
        if known is None or len(values) < known.shape[1]:
            return None
        last = [torch.as_tensor(value, dtype=torch.float32).detach().reshape(()) for value in values]
        own = torch.stack(last[-known.shape[1] :]).cpu()
        if not torch.equal(own.view(torch.int32), torch.stack(self._own_losses).cpu().view(torch.int32)):
            return None
        tree = TreeSum(loop.count)
        for value in known.t().reshape(-1, 1):
            tree.push(value)
        return tree.total().squeeze(0).div_(loop.count).to(_context.context().device)

    # ---- after the loop

    def clip(self, clip: Callable[[], Tensor]) -> Tensor:
        """Runs a clipping of the committed gradients, again after a loss."""
        while True:
            try:
                norm = clip()
                _context.require_intact("clip_grad_norm")
            except CommunicationError:
                if not self._lost:
                    raise
                self._recover()
            else:
                self._clips.append(clip)
                self._keeper.note_gradients()
                return norm

    def scale_copies(self, params: Sequence[Tensor], factor: Tensor) -> None:
        """Multiplies the copies of gradients, as the ward multiplies its own."""
        self._keeper.scale_gradients(params, factor.item())

    def pass_gate(self) -> None:
        """Waits until no rank needs another one for the rest of the step. Collective."""
        if not self._place % 2:
            raise RuntimeError("survive: expected a loop over virtual shards before OptimManager.step()")
        if self._keeper.are_gradients_changed():
            raise RuntimeError(
                "survive: expected gradients to be changed by OptimManager.clip_grad_norm() only, got others than the "
                "loop has made: their copies on other ranks would differ"
            )
        self._pass_gate(is_left_out=False)

    def _pass_gate(self, is_left_out: bool) -> None:
        place = self._place
        while self._place == place:
            try:
                if all(self._agree(_context.context(), is_left_out, not is_left_out)[:2]):
                    raise RuntimeError(
                        "survive: expected all ranks to leave a step out, or none, got some of them"
                    )
            except CommunicationError:
                if not self._lost:
                    raise
                self._recover()
            else:
                self._place += 1
        self._clips.clear()  # a process that joins has none
        self._keeper.pass_gate(self._place, is_left_out)

    def step_copy(self, optimizer: Any, scale: float) -> None:
        """Starts the update of the copy as ``optimizer`` has just updated its parameters."""
        self._keeper.step(optimizer, scale)

    # ---- after a loss

    def _recover(self) -> None:
        """Continues without the lost ranks. Collective over the others."""
        began = time.monotonic()
        detected = self.times.pop("at", began)
        ctx, keeper, members = _context.context(), self._keeper, self._members
        self._written = max(self._written, keeper.written())
        self._drop_what_runs(ctx)
        held = keeper.held(ctx, self._place)
        params = all_parameters(ctx, keeper.optimizers())
        steps, parts, ring = steps_of(keeper.optimizers()), parts_of(params), keeper.ring
        report = {"place": self._place, "steps": steps, "damage": keeper.damage, "ward": keeper.ward_place()}
        tried: list[int] = []
        while True:
            rendezvous = Reconnection(ctx)
            sizes = {len(of_ranks) for of_ranks in parts.values()}
            decide = partial(self._decide, ctx, ring, rendezvous, sizes)
            patience = ctx.timeout * (2 if tried else 1)  # a try fails here at once, there after a time-out
            meeting = members.agree(report, self._lost, patience, decide)
            places = _places_of(meeting.reports)
            if _are_beyond_a_gate(places):
                if self._place == min(places):
                    self._place += 1  # the gate; this rank comes back when it has done the rest of the step
                    return
                continue
            agreed, survivors, ranks = time.monotonic(), meeting.survivors, range(ctx.world.size)
            lost = [rank for rank in ranks if rank not in survivors]
            owners = [survivors.index(ring.keeper_of(rank) if rank in lost else rank) for rank in ranks]
            most = [max(own) for own in zip(*(r["steps"] for r in meeting.reports.values()), strict=True)]
            before = Before(held, owners, parts, max(places) % 2 == 1, most, lost)
            try:
                self._go_on(ctx, meeting, rendezvous, before, max(places))
                break
            except (CommunicationError, OSError, dist.DistError) as error:
                if tried == survivors:
                    raise CommunicationError(
                        f"{ranks_text(lost)} lost, and the others cannot connect: {self._again(ctx)} ({error})"
                    ) from error
                tried, self._lost = survivors, {}
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
        self._report(f"{ranks_text(lost) if lost else 'no rank'} lost; {{}} ranks continue")

    def _report(self, what: str) -> None:
        world = _context.context().world
        if world.rank == 0:
            parts = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.times.items())
            write_lines()
            print(f"bmtrain: {what.format(world.size)} ({parts})", flush=True)

    def _go_on(
        self, ctx: Context, meeting: Meeting, rendezvous: Reconnection, before: Before, place: int
    ) -> None:
        """Shards everything over the survivors. Collective.

        Until all of them have done so, each keeps its former shards, and an error may be followed by another try.
        """
        survivors, keeper, members = meeting.survivors, self._keeper, self._members
        started, hosts = time.monotonic(), [self._hosts[rank] for rank in survivors]
        rank, places = survivors.index(members.rank), [ctx.places[rank] for rank in survivors]
        self._lost, keeper.is_whole = {}, False
        may_survive = partial(self._may_survive, rank, True)
        new = rendezvous.connect(ctx, rank, meeting.given, hosts, places, may_survive)
        connected = time.monotonic()
        keeper.ring = Ring(hosts)
        keeper.take(new, before)
        if place % 2:
            keeper.send(new, place // 2)
        keeper.seal(new)
        members.advance(survivors)
        self._place, self._admits_at = place, 0
        keeper.note_gradients()
        self.attend(new, hosts)
        self.times = {"connection": connected - started, "state": time.monotonic() - connected}

    def _decide(
        self,
        ctx: Context,
        ring: Ring,
        rendezvous: Reconnection,
        sizes: set[int],
        reports: dict[int, dict[str, Any]],
    ) -> dict[str, Any]:
        """Returns what the first survivor tells all; ``sizes``: numbers of ranks that share a parameter."""
        if why := ring.why_not(reports, sizes):
            return {"why": f"{why}: {self._again(ctx)}"}
        places = _places_of(reports)
        return {"given": {} if _are_beyond_a_gate(places) else rendezvous.serve(self._members)}

    def _again(self, ctx: Context) -> str:
        saved = "" if ctx.watch is None else ctx.watch.saved
        return f"start the job again from the last checkpoint{saved and f': {saved}'}"

    def _drop_what_runs(self, ctx: Context) -> None:
        """Ends gathers and reductions of the lost step."""
        engine = current_engine(ctx)
        self._let_be_void(True)
        try:
            engine.drop_ahead()
            for block in engine.blocks:
                block.drop_gathered()
            engine.gradients.drop_stale()
            _finish_device(ctx)
        finally:
            self._let_be_void(False)


def _finish_device(ctx: Context) -> None:
    """Waits until the device has done all that it was given."""
    if ctx.device.type == "cuda":
        torch.cuda.synchronize(ctx.device)


def _places_of(reports: dict[int, dict[str, Any]]) -> set[int]:
    """Returns the places of the ranks that report, and of lost ones whose keepers know of a later one."""
    places = {report["place"] for report in reports.values()}
    wards = [(report["place"], *report["ward"]) for report in reports.values()]
    return places | {place for of_keeper, rank, place in wards if rank not in reports and place > of_keeper}


def _are_beyond_a_gate(places: set[int]) -> bool:
    """Whether some ranks have passed a gate, and others have still to do so."""
    return len(places) > 1 and max(places) % 2 == 0
