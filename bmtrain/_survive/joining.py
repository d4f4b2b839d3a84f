"""Processes that take the places of lost ranks, each at the end of a step.

[Note: Joining]
`bmtrain launch` starts every process with ``BMTRAIN_MEMBERS``, a file in which the first rank keeps the addresses
of the ranks and the job's secret. A process that finds ``BMTRAIN_JOIN`` as well runs the script as the only rank
of its own, up to its loop over `survive.steps`. There it connects to a rank of the job and waits. Each commit
tells all ranks whether a process waits and there is a place for it. Then, at the end of the step, all meet it in
new communicators, parameters and optimizer state are sharded again, and rank 0 sends the rest: options of the
optimizers, schedules, registered state, random generators, and the number of the step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import ipaddress
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from .._base.atomic_file import AtomicFile
from .._base.generators import packed_generators, unpack_generators
from .._base.said import say
from .._engine.engine import Schedule, current_engine
from .._ranks import context as _context
from .._ranks.agree import broadcast_json, largest
from .._ranks.context import Context
from .._ranks.groups import host_comm
from .._ranks.messages import broadcast_bytes
from .._ranks.shm_meeting import place
from ..errors import CommunicationError
from ..optim._sharded import ShardedOptimizer
from ..virtual import VirtualShard, VirtualShards
from .copies import all_parameters
from .members import Address, Line, Lost, Members, Message
from .reconnect import Reconnection
from .reshard import Before, own_shards, parts_of, steps_of
from .shared import kinds_of
from .survival import Survival

#: File with the addresses of the ranks.
MEMBERS = "BMTRAIN_MEMBERS"
_PAUSE_SECONDS = 0.2
#: Time without an answer of any rank after which the job is over.
_GONE_SECONDS = 5.0
_WAITING_SECONDS = 60.0
#: Exit status of a process that no job needed any more.
NOT_NEEDED = 75
_LABEL = "joining"


class Joining(Survival):
    """Survival of a job whose lost ranks are replaced.

    Args:
        members: the ranks of the job; None in a process that waits for a place.
        host: the name of this process's host.
        hosts: the host of each rank.
    """

    def __init__(self, members: Members | None, host: str, hosts: Sequence[str]) -> None:
        super().__init__(members, hosts)
        self._host = host
        self._num_places = len(hosts)
        self._step = 0

    def attend(self, ctx: Context, hosts: Sequence[str]) -> None:
        super().attend(ctx, hosts)
        path = os.environ.get(MEMBERS)
        if path and ctx.world.rank == 0:
            known = {"secret": self._members.secret, "addresses": self._members.addresses}
            with AtomicFile(path) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(json.dumps(known).encode())

    def shards(self, loop: VirtualShards) -> Iterator[VirtualShard]:
        if self._known_members is None:
            raise RuntimeError(
                "survive: a process that takes a lost rank's place enters the loop over the steps at the step of the "
                "others: expected `for step in bmtrain.survive.steps(...)` around the loop over virtual shards"
            )
        return super().shards(loop)

    def steps(self, start: int, stop: int) -> Iterator[int]:
        """Yields the numbers of the steps; between two of them a process may take a lost rank's place."""
        self._step = start
        if self._known_members is None:
            self._join()
        while self._step < stop:
            yield self._step
            self._step += 1
            if self._admits_at and self._place % 2 == 0:  # not before a step that is left out
                self._admit()

    # ---- a rank of the job

    def waiting_at(self, ctx: Context) -> int:
        members = self._members
        if ctx.world.size == self._num_places:
            return 0
        own = digest_of(ctx, self._keeper.optimizers())
        while (newcomer := members.newcomer()) is not None:
            if newcomer[0]["digest"] == own:
                return ctx.world.rank + 1
            why = (
                "survive: expected the parameters and optimizer groups of the job's ranks, got others: start the same "
                "script; it adds groups, and sets options that need arrays (momentum, amsgrad), before survive.steps()"
            )
            newcomer[1].send({"do": "refuse", "why": why})
            members.drop_newcomer()
        return 0

    def _admit(self) -> None:
        """Gives a process the place of a lost rank. Collective."""
        began, ctx, members, keeper = time.monotonic(), _context.context(), self._members, self._keeper
        at, self._admits_at = self._admits_at - 1, 0
        params = all_parameters(ctx, keeper.optimizers())
        rendezvous = Reconnection(ctx)
        try:
            steps = largest(steps_of(keeper.optimizers()), "steps", host_comm(ctx))
            offer = self._offer(ctx, rendezvous) if ctx.world.rank == at else {}
            offer = broadcast_json(offer, at, _LABEL, host_comm(ctx))
        except CommunicationError:
            if not self._lost:
                raise
            self._recover()  # the process is asked again in the next step
            return
        if not offer:
            return
        parts, held = parts_of(params), {ctx.world.rank: own_shards(keeper.optimizers(), params)}
        before = Before(held, range(ctx.world.size), parts, False, steps)
        members.admit(Address(*offer["address"]))
        hosts, places = [*self._hosts, offer["host"]], [*ctx.places, offer["place"]]
        if ctx.world.rank == at:
            told = {"addresses": members.addresses, "epoch": members.epoch, "hosts": hosts, "places": places}
            told |= {"steps": steps, "parts": [parts[p] for p in params], "place": self._place}
            told |= {"trained": [p.requires_grad for p in params], "num_places": self._num_places}
            told |= {"seed": ctx.seed, "backend": ctx.backend}
            members.drop_newcomer({"do": "go", "store": offer["store"], **told})
        self._drop_what_runs(ctx)
        new = rendezvous.connect(ctx, members.rank, offer["store"], hosts, places)
        self._take(new, hosts, before)
        self.times = {"all": time.monotonic() - began}
        self._report("a process has joined; {} ranks continue")

    def _offer(self, ctx: Context, rendezvous: Reconnection) -> Message:
        newcomer = self._members.newcomer()
        if newcomer is None:
            return {}
        known = {name: newcomer[0][name] for name in ("address", "host", "place")}
        return {**known, "store": rendezvous.serve(self._members)}

    def _take(self, new: Context, hosts: Sequence[str], before: Before) -> None:
        """Shards everything over the ranks with the new one. Collective."""
        self._lost = {}
        self.attend(new, hosts)
        current_engine(new).schedule = Schedule()  # gathers ahead are those of a rank that has learnt nothing
        self._keeper.take(new, before)
        self._share(new)
        self._keeper.seal(new)

    def _share(self, ctx: Context) -> None:
        """Gives the last rank what all others know. Collective."""
        manager = self._keeper.manager()
        data = None
        if ctx.world.rank == 0:
            file = io.BytesIO()
            schedules = [None if s is None else s.state_dict() for s in manager.lr_schedulers]
            groups = [
                [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in o.param_groups
                ]
                for o in manager.optimizers
            ]
            state = {"step": self._step, "generators": packed_generators(ctx.device), "groups": groups}
            torch.save({**state, "schedules": schedules, "user": self.get_user_state()}, file)
            data = file.getvalue()
        data = broadcast_bytes(data, 0, host_comm(ctx), _LABEL)
        if data is None or ctx.world.rank < ctx.world.size - 1:
            return
        state = torch.load(io.BytesIO(data), weights_only=False)  # of this job, to which the secret admits
        self._step = state["step"]
        for optimizer, groups in zip(manager.optimizers, state["groups"], strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        for schedule, values in zip(manager.lr_schedulers, state["schedules"], strict=True):
            if schedule is not None:
                schedule.load_state_dict(values)
        unpack_generators(state["generators"])
        self.set_user_state(state["user"])

    # ---- a process that waits

    def _join(self) -> None:
        """Waits for a place, and takes it. Collective with the ranks of the job."""
        ctx, keeper = _context.context(), self._keeper
        if not keeper.optimizers():
            raise RuntimeError(
                "survive: expected an OptimManager with optimizers before bmtrain.survive.steps()"
            )
        params = all_parameters(ctx, keeper.optimizers())
        parts_of(params)  # the shards of one rank, before there are others
        digest = digest_of(ctx, keeper.optimizers())
        members, told = _find_place({"digest": digest, "host": self._host, "place": place()})
        addresses = [Address(*address) for address in told["addresses"]]
        members.rank, members.addresses, members.epoch = len(addresses) - 1, addresses, told["epoch"]
        self._known_members, self._place, self._num_places = members, told["place"], told["num_places"]
        for p, trains in zip(params, told["trained"], strict=True):
            p.requires_grad_(trains)
        before = Before(
            {}, range(members.rank), dict(zip(params, told["parts"], strict=True)), False, told["steps"]
        )
        of_job = dataclasses.replace(ctx, seed=told["seed"], backend=told["backend"])
        new = Reconnection(ctx).connect(of_job, members.rank, told["store"], told["hosts"], told["places"])
        self._take(new, told["hosts"], before)


def digest_of(ctx: Context, optimizers: Sequence[ShardedOptimizer]) -> str:
    """Returns a mark of shapes and dtypes, and of the groups of optimizers."""
    places = {p: place for place, p in enumerate(all_parameters(ctx, optimizers))}
    shapes = [(tuple(p._original_shape), str(p.dtype)) for p in places]
    text = repr((shapes, kinds_of(optimizers, places.get)))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _find_place(about: Message) -> tuple[Members, Message]:
    """Waits for a place in the job; returns this process as a member, and the answer of a rank."""
    path, heard = Path(os.environ[MEMBERS]), time.monotonic()
    members: Members | None = None
    while time.monotonic() < heard + _GONE_SECONDS:
        if not path.exists():  # the job is about to start
            heard = time.monotonic()
        known = json.loads(path.read_text()) if path.exists() else {"addresses": []}
        for address in known["addresses"]:
            try:
                line = Line.to(Address(*address))
                here = line.own_address()
                if members is None:
                    members = Members(-1, here, not ipaddress.ip_address(here).is_loopback, known["secret"])
                line.send({"do": "join", "secret": known["secret"], "address": members.own, **about})
                while (answer := line.receive(_WAITING_SECONDS))["do"] == "wait":
                    heard = time.monotonic()
            except Lost:
                continue
            if answer["do"] == "go":
                line.close()
                return members, answer
            raise CommunicationError(str(answer["why"]))
        time.sleep(_PAUSE_SECONDS)
    say("bmtrain: no rank of the job answers any more: this process was not needed, and ends")
    sys.exit(NOT_NEEDED)
