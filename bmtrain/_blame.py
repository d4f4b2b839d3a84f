"""Who is to blame: from what each rank was doing to one sentence.

[Note: Whom to blame]
The rank that raises first is often a victim. In this order: a rank that said itself what happened to it (an
exception, Ctrl-C); one that is gone without a word; one that does not answer; one that ended while others wait for
it. Where all are alive and the transport raised, the ranks have come with different operations, or its own words tell.
After a time-out the waits are followed from the rank that gave up: a rank waits for those that have not come to its
operation. Whoever is reached and waits for nobody is to blame; where the waits only lead back, the ranks are
in operations that do not fit together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Verdict",
    "is_stuck",
    "judge",
    "mismatch",
    "ranks_text",
    "read_flights",
    "table",
]

_ABSENCES = {
    "gone": "{} died: connections closed without a word",
    "silent": "no answer from {}: stopped, stuck, or out of reach",
    "left": "{} ended while others still wait",
}
_FIELDS = {
    "op": "operation",
    "dtype": "dtype",
    "numel": "size",
    "detail": "root or reduction",
    "label": "order (what it serves)",
}

_OPERATION = re.compile(r'\w+ #\d+.*? on group "[^"]*", rank \d+ of \d+: (the communicator was aborted: )?')

# What a rank tells of itself: {"position": where its main thread is, "groups": what _C.Watchdog.groups returns}.
State = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What is found: one sentence, and the ranks that it accuses."""

    text: str
    culprits: tuple[int, ...]


def judge(failure: Mapping[str, Any], states: Mapping[int, State], absent: Mapping[int, str]) -> Verdict:
    """Find who caused a failure. See [Note: Whom to blame].

    Args:
        failure: what one rank handed in: ``rank, kind, what, group, record``.
        states: what each rank that answered was doing.
        absent: the others: ``"gone"``, ``"silent"`` or ``"left"``.

    Example:
        >>> failure = {"rank": 0, "kind": "failed", "what": "connection lost", "group": "", "record": None}
        >>> judge(failure, {}, {2: "gone"}).text
        'rank 2 died: connections closed without a word'
    """
    reporter, kind, what = failure["rank"], failure["kind"], failure["what"]
    told = {
        "exception": f"rank {reporter} raised {what}",
        "interrupted": f"rank {reporter} was interrupted (Ctrl-C)",
        "aborted": f"rank {reporter} aborted: {what}",
        "mismatch": what,
    }
    if kind in told:
        return Verdict(told[kind], tuple(failure.get("culprits", (reporter,))))
    members = set(_members(failure, states)) or {*states, *absent}
    for absence, words in _ABSENCES.items():
        found = [rank for rank, why in sorted(absent.items()) if why == absence]
        concerned = [rank for rank in found if rank in members]
        if absence != "left":  # who is gone matters to other groups too: they wait for each other
            concerned = concerned or found
        if concerned:
            return Verdict(words.format(ranks_text(concerned)) + _after(failure), tuple(concerned))
    verdict = _difference(failure, states) if kind == "failed" else _follow(failure, states)
    return verdict or Verdict(f"rank {reporter}: {_plain(what)}", (reporter,))


def _plain(what: str) -> str:
    """What a transport says, without the operation, group and rank that each error begins with anyway.

    >>> _plain('barrier #2 (0 bytes) on group "zero", rank 1 of 2: the connection to rank 0 was lost')
    'the connection to rank 0 was lost'
    """
    return _OPERATION.sub("", what)


def is_stuck(failure: Mapping[str, Any], states: Mapping[int, State]) -> bool:
    """Whether the rank that handed this in is still in its operation, to which all who answered have come."""
    group, record = failure["group"], failure["record"]
    if failure["rank"] not in states or _awaited(group, record, states):
        return False
    own = (other for other in states[failure["rank"]]["groups"] if other["group"] == group)
    return any(blocked["id"] == record["id"] for other in own for blocked in other["blocked"])


def _after(failure: Mapping[str, Any]) -> str:
    """How a time-out noticed it; nothing for what was noticed at once."""
    return f" ({failure['what']})" if failure["kind"] == "late" else ""


def _members(failure: Mapping[str, Any], states: Mapping[int, State]) -> list[int]:
    for state in states.values():
        for group in state["groups"]:
            if group["group"] == failure["group"]:
                return list(group["members"])
    return []


def _follow(failure: Mapping[str, Any], states: Mapping[int, State]) -> Verdict | None:
    """Follow the waits from the rank that gave up to the ones that wait for nobody."""
    if failure["record"] is None:
        return None
    reporter = failure["rank"]
    waiting: dict[int, tuple[str, Mapping[str, Any]]] = {reporter: (failure["group"], failure["record"])}
    idle: list[int] = []
    queue = [reporter]
    while queue:
        for rank in _awaited(*waiting[queue.pop(0)], states):
            if rank in waiting or rank in idle:
                continue
            operation = _blocked(states[rank])
            if operation is None:
                idle.append(rank)
            else:
                waiting[rank] = operation
                queue.append(rank)
    if idle:
        doing = "; ".join(f"{ranks_text([rank])}: {_doing(states[rank])}" for rank in sorted(idle)[:4])
        own = failure["record"]["text"]
        return Verdict(
            f'{ranks_text(sorted(idle))} did not come to {own} on group "{_name(failure["group"], states)}"'
            f"{_after(failure)} ({doing})",
            tuple(sorted(idle)),
        )
    return _difference(failure, states) or _circle(waiting)


def _awaited(group: str, record: Mapping[str, Any], states: Mapping[int, State]) -> list[int]:
    """The ranks that have not come to an operation."""
    found = []
    for rank, state in states.items():
        for other in state["groups"]:
            if other["group"] != group:
                continue
            if record["peer"] is not None:
                if other["members"][record["peer"]] == rank:
                    found.append(rank)
            elif other["posted"] <= record["sequence"]:
                found.append(rank)
    return found


def _difference(failure: Mapping[str, Any], states: Mapping[int, State]) -> Verdict | None:
    """Ranks that came to the same point of a group with different operations."""
    if failure["record"] is None or failure["record"]["peer"] is not None:
        return None
    here = {}
    sequence, group = failure["record"]["sequence"], failure["group"]
    for rank, state in states.items():
        for own in (own for own in state["groups"] if own["group"] == group):
            for record in own["blocked"]:
                if record["sequence"] == sequence and record["peer"] is None:
                    here[rank] = record
    here.setdefault(failure["rank"], failure["record"])
    return mismatch(here, _name(group, states))


def _circle(waiting: Mapping[int, tuple[str, Mapping[str, Any]]]) -> Verdict | None:
    """Ranks of which each waits for another one."""
    if len(waiting) == 1:
        return None
    each = "; ".join(f"rank {rank} in {record['text']}" for rank, (_, record) in sorted(waiting.items())[:4])
    return Verdict(f"{ranks_text(sorted(waiting))} wait for each other: {each}", tuple(sorted(waiting)))


def mismatch(records: Mapping[int, Mapping[str, Any]], group: str) -> Verdict | None:
    """Compare the operations with which ranks came to the same point of a group; None if they agree.

    The larger party is taken to be right, of equal ones that of the lowest rank.
    """
    for field, noun in _FIELDS.items():
        parties: dict[Any, list[int]] = {}
        for rank, record in sorted(records.items()):
            parties.setdefault(record[field], []).append(rank)
        if len(parties) > 1:
            usual = max(parties.values(), key=len)
            odd = sorted(rank for ranks in parties.values() if ranks is not usual for rank in ranks)
            return Verdict(
                f'{noun} differs on group "{group}": {ranks_text(usual)} called {records[usual[0]]["text"]}, '
                f"{ranks_text(odd[:1])} called {records[odd[0]]['text']}",
                tuple(odd),
            )
    return None


def _name(key: str, states: Mapping[int, State]) -> str:
    for state in states.values():
        for group in state["groups"]:
            if group["group"] == key:
                return str(group["name"])
    return key


def _blocked(state: State) -> tuple[str, Mapping[str, Any]] | None:
    """The operation that a rank has waited in for longest, with its group."""
    found = [(group["group"], record) for group in state["groups"] for record in group["blocked"]]
    return min(found, key=lambda entry: entry[1]["started"] or 0.0) if found else None


def _doing(state: State) -> str:
    blocked = _blocked(state)
    if blocked is not None:
        return f'in {blocked[1]["text"]} on group "{_name(blocked[0], {0: state})}"'
    last = max(
        (group["last"] for group in state["groups"] if group["last"]), key=lambda r: r["posted"], default=None
    )
    after = f", after {last['text']}" if last else ""
    return f"in no operation{after}, at {state.get('position') or 'an unknown place'}"


def table(states: Mapping[int, State], absent: Mapping[int, str]) -> list[str]:
    """What each rank was doing, one line for all ranks that did the same."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted({*states, *absent}):
        text = "{}: " + _doing(states[rank]) if rank in states else _ABSENCES[absent[rank]]
        by_text.setdefault(text, []).append(rank)
    return [text.replace("{}", ranks_text(ranks), 1) for text, ranks in by_text.items()]


def ranks_text(ranks: Iterable[int]) -> str:
    """For example ``rank 3`` or ``ranks 1, 4-7``.

    >>> ranks_text([3]), ranks_text([1, 4, 5, 6, 7])
    ('rank 3', 'ranks 1, 4-7')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(spans) == 1 and spans[0][0] == spans[0][1] else f"ranks {text}"


def read_flights(flights: Mapping[int, Mapping[str, Any]]) -> tuple[Verdict, list[str]]:
    """Judge from flight records alone. A rank without one is taken to have died."""
    world = max(flight["world_size"] for flight in flights.values())
    absent = {rank: "gone" for rank in range(world) if rank not in flights}
    for flight in flights.values():  # what was known when it happened
        absent.update({int(rank): why for rank, why in flight["absent"].items() if int(rank) not in flights})
    failures = [flight["failure"] for flight in flights.values() if flight["failure"] is not None]
    if not failures:
        return Verdict("no rank recorded a failure", ()), table(flights, absent)
    first = min(failures, key=lambda failure: failure["time"])
    return judge(first, flights, absent), table(flights, absent)
