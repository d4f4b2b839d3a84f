"""Schedules of a pipeline as data: the actions of each stage, in order.

A pass cuts the batch into micro-batches, and each stage runs one or several chunks of layers. Chunk ``c`` of stage
``s`` has place ``c * stages + s`` in the order of the layers. In every schedule a chunk meets the micro-batches in the
same order, forward and backward: so its gradients are sums in one order, and no schedule changes a bit of them.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Kind(enum.Enum):
    """Purpose of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"  # a backward without the products that are gradients of weights
    BACKWARD_WEIGHT = "W"  # these products


class Action(NamedTuple):
    """One micro-batch in one chunk of a stage."""

    kind: Kind
    micro: int
    chunk: int = 0


class Message(NamedTuple):
    """Tensor from an action of one stage to an action of another: an activation, or the gradient of one."""

    sender: int
    receiver: int
    action: Action  # of the receiver


Actions = tuple[tuple[Action, ...], ...]  # by stage

#: Names of schedules.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p")


def check_schedule(name: str, num_stages: int, num_micros: int, num_chunks: int) -> None:
    """Raises ValueError if there is no such schedule."""
    if name not in SCHEDULES:
        raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}, got {name!r}")
    if (num_chunks > 1) != (name == "interleaved"):
        wanted = "at least 2" if name == "interleaved" else "1"
        raise ValueError(f"chunks: expected {wanted} with schedule {name!r}, got {num_chunks}")
    if name == "interleaved" and num_micros % num_stages:
        raise ValueError(
            f"schedule 'interleaved': expected a multiple of the {num_stages} stages as num_micro_batches, got "
            f"{num_micros}"
        )


def actions_of(name: str, num_stages: int, num_micros: int, num_chunks: int = 1) -> Actions:
    """Returns the actions of each stage.

    Sources: ``gpipe``: Y. Huang et al., GPipe, 2019, figure 2c. ``1f1b``: D. Narayanan et al., Memory-Efficient
    Pipeline-Parallel DNN Training, 2021, figure 2 (PipeDream-Flush). ``interleaved``: D. Narayanan et al., Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021, section 2.2. ``zb1p``: P. Qi et al.,
    Zero Bubble Pipeline Parallelism, 2023, section 2.2 (ZB-H1).
    """
    check_schedule(name, num_stages, num_micros, num_chunks)
    return tuple(
        tuple(_actions_of_stage(name, stage, num_stages, num_micros, num_chunks))
        for stage in range(num_stages)
    )


def _actions_of_stage(
    name: str, stage: int, num_stages: int, num_micros: int, num_chunks: int
) -> list[Action]:
    if name == "interleaved":
        group = num_stages * num_chunks
        order = [
            (turn // group * num_stages + turn % num_stages, turn % group // num_stages)
            for turn in range(num_micros * num_chunks)
        ]
        ahead = 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages
    else:
        order = [(micro, 0) for micro in range(num_micros)]
        ahead = num_micros if name == "gpipe" else num_stages - stage - 1
    ahead = min(ahead, len(order))
    forwards = [Action(Kind.FORWARD, micro, chunk) for micro, chunk in order]
    kind = Kind.BACKWARD_INPUT if name == "zb1p" else Kind.BACKWARD
    backwards = [Action(kind, micro, num_chunks - 1 - chunk) for micro, chunk in order]
    actions = forwards[:ahead]
    for turn, backward in enumerate(backwards):
        actions += [*forwards[ahead + turn : ahead + turn + 1], backward]
        # Later stages put off more: the first ones wait for their inputs.
        if name == "zb1p" and turn >= stage:
            actions.append(Action(Kind.BACKWARD_WEIGHT, turn - stage))
    if name == "zb1p":
        late = range(max(num_micros - stage, 0), num_micros)
        actions += [Action(Kind.BACKWARD_WEIGHT, micro) for micro in late]
    return actions


def only(kind: Kind, actions: Actions) -> Actions:
    """Returns the actions of one kind alone."""
    return tuple(tuple(action for action in of_stage if action.kind is kind) for of_stage in actions)


def message_of(action: Action, stage: int, num_stages: int, num_chunks: int) -> Message | None:
    """Returns the message of an action to another stage, or None."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    step = 1 if action.kind is Kind.FORWARD else -1
    place = action.chunk * num_stages + stage + step
    if not 0 <= place < num_stages * num_chunks:
        return None
    return Message(stage, place % num_stages, action._replace(chunk=place // num_stages))


def ends_of(
    actions: Actions, num_chunks: int = 1, units: Mapping[Kind, float] | None = None
) -> list[list[float]]:
    """Returns when each action ends if messages take no time and actions last ``units`` (1).

    Raises:
        ValueError: the stages would wait for each other for ever.
    """
    num_stages = len(actions)
    last = num_stages * num_chunks - 1
    arrived: dict[tuple[int, Action], float] = {}
    ends: list[list[float]] = [[] for _ in actions]
    moved = True
    while moved:
        moved = False
        for stage, todo in enumerate(actions):
            while len(ends[stage]) < len(todo):
                action = todo[len(ends[stage])]
                place = action.chunk * num_stages + stage
                is_source = (action.kind is Kind.FORWARD and place == 0) or (
                    action.kind is not Kind.FORWARD and place == last
                )
                if (
                    not is_source
                    and action.kind is not Kind.BACKWARD_WEIGHT
                    and (stage, action) not in arrived
                ):
                    break
                begin = max(arrived.get((stage, action), 0), ends[stage][-1] if ends[stage] else 0)
                end = begin + (1 if units is None else units[action.kind])
                ends[stage].append(end)
                message = message_of(action, stage, num_stages, num_chunks)
                if message is not None:
                    arrived[message.receiver, message.action] = end
                moved = True
    if any(len(done) < len(todo) for done, todo in zip(ends, actions, strict=True)):
        raise ValueError("a stage of the schedule waits for what is never sent")
    return ends


@functools.lru_cache(maxsize=64)
def messages_to(stage: int, actions: Actions, num_chunks: int = 1) -> list[Message]:
    """Returns the messages that a stage receives, in the order in which they are sent."""
    sent = []
    for sender, (todo, ends) in enumerate(zip(actions, ends_of(actions, num_chunks), strict=True)):
        for action, end in zip(todo, ends, strict=True):
            message = message_of(action, sender, len(actions), num_chunks)
            if message is not None and message.receiver == stage:
                sent.append((end, sender, message))
    sent.sort(key=lambda entry: entry[:2])  # of one sender: in its order
    return [message for _, _, message in sent]


def peak_micros(actions: Sequence[Action]) -> int:
    """Returns the largest number of micro-batches, counted for each chunk, whose activations a stage holds."""
    alive = peak = 0
    splits = any(action.kind is Kind.BACKWARD_WEIGHT for action in actions)
    frees = Kind.BACKWARD_WEIGHT if splits else Kind.BACKWARD
    for action in actions:
        alive += (action.kind is Kind.FORWARD) - (action.kind is frees)
        peak = max(peak, alive)
    return peak


def idle_share(num_stages: int, num_micros: int, name: str = "gpipe", num_chunks: int = 1) -> float:
    """Returns the idle share of a pass.

    With *p* stages, *m* micro-batches and *v* chunks: ``(p - 1) / (m + p - 1)`` for ``gpipe`` (Huang et al., section
    2.3) and ``1f1b``, ``(p - 1) / (v m + p - 1)`` for ``interleaved`` (Narayanan et al., section 2.2), and
    ``(p - 1) / (3 m + p - 1)`` for ``zb1p``, whose idle time is ``(p - 1) (F + I - W)`` (Qi et al., table 2), if a
    forward and both halves of a backward take the same time.
    """
    units = {"interleaved": num_chunks, "zb1p": 3}.get(name, 1) * num_micros
    return (num_stages - 1) / (units + num_stages - 1)
