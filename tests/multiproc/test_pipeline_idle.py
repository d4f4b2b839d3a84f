"""How long the stages of a pipeline wait: counted from what they did, not computed from a formula.

Every rank notes what it does, in order: a unit of work for each micro-batch, each message it sends, each it waits for.
From these notes alone a logical clock (L. Lamport, Time, Clocks, and the Ordering of Events, 1978) follows: a unit is
one tick, and a message is there when the clock of its sender had reached the time of sending.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from fractions import Fraction

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.global_var import context

DIM = 4
NOTES: list[tuple[str, str, int]] = []  # (what, direction, rank in the pipe group)


class NotedWork:
    def __init__(self, work, note) -> None:
        self.work, self.note = work, note

    def wait(self) -> None:
        NOTES.append(self.note)
        self.work.wait()


class NotedCommunicator:
    """A communicator whose messages between stages are noted."""

    def __init__(self, comm) -> None:
        self.comm = comm

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def send(self, tensor, peer, label):
        if label in ("pipe.forward", "pipe.backward"):
            NOTES.append(("send", label, peer))
        return self.comm.send(tensor, peer, label)

    def recv(self, tensor, peer, label):
        work = self.comm.recv(tensor, peer, label)
        return NotedWork(work, ("wait", label, peer)) if label in ("pipe.forward", "pipe.backward") else work


class Layer(bmt.DistributedModule):
    def __init__(self, is_first_of_stage: bool) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.eye(DIM))
        self.is_first_of_stage = is_first_of_stage

    def forward(self, x):
        if self.is_first_of_stage:  # runs again in backward
            again = context().engine.recomputing > 0
            NOTES.append(("work", "pipe.backward" if again else "pipe.forward", -1))
        return x @ self.weight


def noted_pass(layers_per_stage: int) -> list[tuple[str, str, int]]:
    stages = bmt.config["pipe_size"]
    pipeline = bmt.PipelineTransformerBlockList(
        [
            bmt.Block(Layer(index % layers_per_stage == 0), mode="PIPE")
            for index in range(stages * layers_per_stage)
        ]
    )
    pipeline._pipe = dataclasses.replace(pipeline._pipe, comm=NotedCommunicator(pipeline._pipe.comm))
    x = torch.randn(2 * bmt.config["micros"], DIM)
    NOTES.clear()
    pipeline(x).sum().backward()
    return list(NOTES)


def clocks(notes: list[list[tuple[str, str, int]]], direction: str) -> list[tuple[int, int]]:
    """(clock at the end, units of work) of each rank."""
    waiting = [[note for note in of_rank if note[1] == direction] for of_rank in notes]
    now, work = [0] * len(notes), [0] * len(notes)
    sent: dict[tuple[int, int], list[int]] = {}  # (from, to): times, in order
    taken: Counter[tuple[int, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(waiting):
            while todo:
                what, _, peer = todo[0]
                if what == "wait":
                    times = sent.get((peer, rank), [])
                    if len(times) <= taken[peer, rank]:
                        break  # its sender has not come that far
                    now[rank] = max(now[rank], times[taken[peer, rank]])
                    taken[peer, rank] += 1
                elif what == "send":
                    sent.setdefault((rank, peer), []).append(now[rank])
                else:
                    now[rank] += 1
                    work[rank] += 1
                todo.pop(0)
                moved = True
    assert not any(waiting), "a stage waits for what is never sent"
    return list(zip(now, work, strict=True))


@pytest.mark.parametrize(("stages", "micros"), [(2, 2), (2, 6), (4, 4)])
def test_counted_idle_share_is_the_formula(stages, micros):
    notes = run_ranks(stages, noted_pass, 2, init={"pipe_size": stages, "num_micro_batches": micros})
    for direction in ("pipe.forward", "pipe.backward"):
        ended = clocks(notes, direction)
        length = max(end for end, _ in ended)
        assert all(units == micros for _, units in ended)
        assert length == micros + stages - 1
        idle = Fraction(sum(length - units for _, units in ended), length * stages)
        assert idle == Fraction(stages - 1, micros + stages - 1)
