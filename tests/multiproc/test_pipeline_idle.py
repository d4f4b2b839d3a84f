"""How long the stages of a pipeline wait: counted from what they did, not computed from a formula.

Every rank notes what it does, in order: a unit of work for each micro-batch, each message it sends, each receive that
it posts, and each that it waits for. From these notes alone a logical clock (L. Lamport, Time, Clocks, and the Ordering
of Events, 1978) follows: a unit is one tick, and a message takes none. Messages go as NCCL sends them: the operations
that a rank has posted on one communicator follow each other, whatever the program waits for.

``BMTRAIN_PIPELINE_UNIT=0.1`` measures the share as well, on ranks that sleep so many seconds for each unit of work.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from fractions import Fraction

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain._engine.pipe_schedule import idle_share

DIM = 4
UNIT = float(os.environ.get("BMTRAIN_PIPELINE_UNIT", "0"))  # seconds
MESSAGES = ("pipe.forward", "pipe.backward")
#: (what, direction, rank in the pipe group, communicator, number of the receive)
NOTES: list[tuple[str, str, int, int, int]] = []


def work(kind: str) -> None:
    NOTES.append(("work", kind, -1, -1, -1))
    time.sleep(UNIT)


class NotedWork:
    def __init__(self, work, note) -> None:
        self.work, self.note = work, note

    def __getattr__(self, name):
        return getattr(self.work, name)

    def wait(self) -> None:
        NOTES.append(self.note)
        self.work.wait()


class NotedCommunicator:
    """A communicator whose messages between stages are noted."""

    def __init__(self, comm, number: int) -> None:
        self.comm, self.number = comm, number

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def send(self, tensor, peer, label):
        if label in MESSAGES:
            NOTES.append(("send", label, peer, self.number, -1))
        return self.comm.send(tensor, peer, label)

    def recv(self, tensor, peer, label):
        work = self.comm.recv(tensor, peer, label)
        if label not in MESSAGES:
            return work
        number = len(NOTES)
        NOTES.append(("recv", label, peer, self.number, number))
        return NotedWork(work, ("wait", label, peer, self.number, number))


class Layer(bmt.DistributedModule):
    def __init__(self, is_first_of_stage: bool) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.eye(DIM))
        self.is_first_of_stage = is_first_of_stage

    def forward(self, x):
        if self.is_first_of_stage:  # runs again in backward
            again = torch._C._current_graph_task_id() != -1  # in a backward
            work("pipe.backward" if again else "pipe.forward")
        return x @ self.weight


class MeanHead(torch.nn.Module):
    def forward(self, out):
        return out.mean()


def make_pipeline(
    layers_per_part: int, schedule: str | None, chunks: int
) -> bmt.PipelineTransformerBlockList:
    pipeline = bmt.PipelineTransformerBlockList(
        [
            bmt.Block(Layer(index % layers_per_part == 0), mode="PIPE")
            for index in range(bmt.config["pipe_size"] * chunks * layers_per_part)
        ],
        schedule=schedule or "1f1b",
        chunks=chunks,
    )
    if schedule == "zb1p":
        for block in list(pipeline)[::layers_per_part]:
            block._module.weight.register_hook(lambda _: work("pipe.weight"))  # with the product
    return pipeline


def noted_pass(layers_per_part: int, schedule: str | None = None, chunks: int = 1) -> list[tuple]:
    """Notes of a pass: with ``schedule`` of a loss, else of a call and its backward."""
    pipeline = make_pipeline(layers_per_part, schedule, chunks)
    pipe = pipeline._pipe
    noted = [NotedCommunicator(comm, number) for number, comm in enumerate((pipe.comm, pipe.reduce_comm))]
    pipeline._pipe = dataclasses.replace(pipe, comm=noted[0], reduce_comm=noted[1])
    x = torch.randn(2 * bmt.config["micros"], DIM)
    NOTES.clear()
    if schedule is None:
        pipeline(x).sum().backward()
    else:
        pipeline.loss(x, head=MeanHead())
    return list(NOTES)


def seconds_of_pass(schedule: str, chunks: int) -> float:
    pipeline = make_pipeline(1, schedule, chunks)
    x = torch.randn(2 * bmt.config["micros"], DIM)
    pipeline.loss(x, head=MeanHead())  # the first pass learns shapes and the order of gathers
    bmt.synchronize()
    start = time.perf_counter()
    pipeline.loss(x, head=MeanHead())
    return time.perf_counter() - start


@dataclasses.dataclass
class Operation:
    what: str
    rank: int
    peer: int
    posted: int
    done: int | None = None


class Streams:
    """The operations of each rank on each communicator: one begins when those before it are over, and both sides of a
    message end when both have begun."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], list[Operation]] = defaultdict(list)
        self.free: dict[tuple[int, int], int] = defaultdict(int)  # when the last operation was over

    def post(self, what: str, rank: int, peer: int, comm: int, now: int) -> Operation:
        operation = Operation(what, rank, peer, now)
        self.queues[rank, comm].append(operation)
        return operation

    def advance(self) -> bool:
        """Ends messages that both sides have begun; whether there was one."""
        moved = False
        for (rank, comm), queue in list(self.queues.items()):
            while queue and queue[0].what == "send":
                others = self.queues[queue[0].peer, comm]
                if not others or (others[0].what, others[0].peer) != ("recv", rank):
                    break
                places = (rank, comm), (others[0].rank, comm)
                done = max(queue[0].posted, others[0].posted, *(self.free[place] for place in places))
                for place in places:
                    self.queues[place].pop(0).done = self.free[place] = done
                moved = True
        return moved


def clocks(notes: list[list[tuple]], directions: tuple[str, ...]) -> list[tuple[int, int]]:
    """(clock at the end, units of work) of each rank."""
    waiting = [[note for note in of_rank if note[1] in directions] for of_rank in notes]
    now, work = [0] * len(notes), [0] * len(notes)
    streams = Streams()
    received: list[dict[int, Operation]] = [{} for _ in notes]  # not waited for yet
    moved = True
    while moved:
        moved = False
        for rank, todo in enumerate(waiting):
            while todo:
                what, _, peer, comm, number = todo[0]
                if what == "wait":
                    done = received[rank][number].done
                    if done is None:
                        break
                    now[rank] = max(now[rank], done)
                elif what == "work":
                    now[rank] += 1
                    work[rank] += 1
                else:
                    operation = streams.post(what, rank, peer, comm, now[rank])
                    received[rank][number] = operation
                todo.pop(0)
                moved = True
        moved = streams.advance() or moved
    assert not any(waiting), "a stage waits for what is never sent"
    return list(zip(now, work, strict=True))


@pytest.mark.parametrize(("stages", "micros"), [(2, 6), (3, 8), (4, 4), (4, 8)])
def test_counted_idle_share_is_the_formula(stages, micros):
    notes = run_ranks(stages, noted_pass, 2, init={"pipe_size": stages, "num_micro_batches": micros})
    for direction in ("pipe.forward", "pipe.backward"):
        ended = clocks(notes, (direction,))
        length = max(end for end, _ in ended)
        assert all(units == micros for _, units in ended)
        assert length == micros + stages - 1
        idle = Fraction(sum(length - units for _, units in ended), length * stages)
        assert idle == Fraction(stages - 1, micros + stages - 1)


@pytest.mark.parametrize(
    ("stages", "micros", "schedule", "chunks"),
    [
        (4, 8, "gpipe", 1),
        (2, 6, "1f1b", 1),
        (3, 8, "1f1b", 1),
        (4, 8, "1f1b", 1),
        (2, 4, "interleaved", 2),
        (4, 8, "interleaved", 2),
        (3, 9, "zb1p", 1),
        (4, 8, "zb1p", 1),
    ],
)
def test_counted_idle_share_of_a_loss_is_the_formula(stages, micros, schedule, chunks):
    """Units: forwards and backwards, and with zb1p products, all of which last equally long here."""
    per_micro = 3 if schedule == "zb1p" else 2 * chunks
    init = {"pipe_size": stages, "num_micro_batches": micros}
    notes = run_ranks(stages, noted_pass, 2, schedule, chunks, init=init)
    ended = clocks(notes, (*MESSAGES, "pipe.weight"))
    assert all(units == per_micro * micros for _, units in ended)
    length = max(end for end, _ in ended)
    assert length == per_micro * micros + (1 if schedule == "zb1p" else 2) * (stages - 1)
    idle = 1 - per_micro * micros / length
    assert idle == pytest.approx(idle_share(stages, micros, schedule, chunks))


@pytest.mark.skipif(not UNIT, reason="long: set BMTRAIN_PIPELINE_UNIT to the seconds of a unit of work")
@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb1p", 1)])
def test_measured_idle_share_is_the_formula(schedule, chunks):
    stages, micros = 4, 8
    init = {"pipe_size": stages, "num_micro_batches": micros}
    seconds = run_ranks(stages, seconds_of_pass, schedule, chunks, init=init)
    units = micros * (3 if schedule == "zb1p" else 2 * chunks)
    idle = 1 - units * UNIT / max(seconds)
    expected = idle_share(stages, micros, schedule, chunks)
    print(f"{schedule}: {idle:.1%} measured, {expected:.1%} by the formula, {max(seconds) / UNIT:.1f} units")
    assert idle == pytest.approx(expected, abs=0.02)
