"""The cause of a failure, in one sentence, from each rank's report of its last actions.

[Note: Cause of a failure]
The rank that raises first is often a victim. The cause is, in this order: a rank that reported its own end (an
exception, Ctrl-C); a rank whose process died without a report; a rank that does not answer; a rank that ended while
others wait for it. Where all are alive and the transport raised, either the ranks have started different operations, or
the transport's error names the cause. After a time-out the waits are followed from the rank that timed out: a rank
waits for the ranks that have not started its operation. A rank that is reached and does not wait itself is the cause;
where the waits form a cycle, the ranks are in mismatched operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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

# The remedy for ranks that have made different calls.
SAME_CALLS = (
    "Every rank must make the same calls in the same order: forward, backward, step, save, load, state_dict, gather "
    "and norms, also where one rank alone uses the result. Experts, and other Blocks that some ranks skip, belong in "
    "one Block with what chooses between them, which all ranks call. A rank that continues after an error that it "
    "caught (out of memory) breaks the order: raise the error."
)

# The remedy where they are in the transfer of a pipeline's batches.
ONE_SIZE = (
    "The ranks of a pipeline pass batches of one size: drop an odd last one (drop_last=True), or pad it."
)

# The report of a rank: {"position": where its main thread is, "groups": what _C.Watchdog.groups returns}.
State = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """A diagnosis: one sentence, the ranks at fault, and a remedy for their programs."""

    text: str
    culprits: tuple[int, ...]
    remedy: str = ""


def judge(failure: Mapping[str, Any], states: Mapping[int, State], absent: Mapping[int, str]) -> Verdict:
    """Finds the ranks that caused a failure. See [Note: Cause of a failure].

    Args:
        failure: the report of one rank: ``rank, kind, what, group, record``.
        states: the state of each rank that answered.
        absent: the other ranks: ``"gone"``, ``"silent"`` or ``"left"``, then a blank and the exit status, if known.

    Example:
        >>> failure = {"rank": 0, "kind": "failed", "what": "connection lost", "group": "", "record": None}
        >>> judge(failure, {}, {2: "gone"}).text
        'rank 2 died: connections closed without a word'
    """
    reporter, kind, what = failure["rank"], failure["kind"], failure["what"]
    told = {
        "exception": f"rank {reporter} raised {what}",
        "interrupted": f"rank {reporter} was interrupted (Ctrl-C){_place(states.get(reporter))}",
        "terminated": f"rank {reporter} was ended by {what}{_place(states.get(reporter))}",
        "aborted": f"rank {reporter} aborted: {what}",
        "mismatch": what,
    }
    if kind == "terminated":
        # A launcher has ended this rank; because of another one, if that died or ended with an error.
        absent = {rank: why for rank, why in absent.items() if why.startswith("gone") or _is_bad(why)}
    if kind in told and not (kind == "terminated" and absent):
        remedy = SAME_CALLS if kind == "mismatch" else ""
        return Verdict(told[kind], tuple(failure.get("culprits", (reporter,))), remedy)
    members = set(_members(failure, states)) or {*states, *absent}
    for absence, words in _ABSENCES.items():
        found = [rank for rank, why in sorted(absent.items()) if why.partition(" ")[0] == absence]
        concerned = [rank for rank in found if rank in members]
        if absence != "left":  # an exited rank stalls other groups too: they wait for each other
            concerned = concerned or found
        if concerned:
            how = _how(absent[rank] for rank in concerned)
            in_order = absence == "left" and not any(_is_bad(absent[rank]) for rank in concerned)
            text = words.format(ranks_text(concerned)) + how + _after(failure)
            return Verdict(text, tuple(concerned), SAME_CALLS if in_order else "")
    found_here = _difference(failure, states) if kind == "failed" else _follow(failure, states)
    remedy = SAME_CALLS if " is in another operation" in what else ""  # the other rank has left it by now
    return found_here or Verdict(f"rank {reporter}: {_plain(what)}", (reporter,), remedy)


def verdict(
    failure: Mapping[str, Any], states: Mapping[int, State], absent: Mapping[int, str]
) -> dict[str, Any]:
    """The verdict that is sent to all ranks: `judge`, with the state of each rank."""
    found = judge(failure, states, absent)
    told = found.text + str(failure["record"] if failure["kind"] == "failed" else "")
    return {
        "text": found.text,
        "culprits": found.culprits,
        "table": [*table(states, absent), *(remedies(told) if found.remedy else ())],
        "absent": absent,
        "failure": failure,
    }


def remedies(told: str) -> list[str]:
    """The remedies for ranks that have made different calls, by the description of these."""
    there = re.findall(r"is in another operation: (?:send|all_gather) #", told)
    is_same = told.count('"pipe.collect"') + len(there) > 1
    return [ONE_SIZE, SAME_CALLS] if is_same else [SAME_CALLS]


def _place(state: State | None) -> str:
    return f", at {state['position']}" if state and state.get("position") else ""


def _how(absences: Iterable[str]) -> str:
    """The exit status of processes, if it is known and the same for all."""
    known = {why.partition(" ")[2] for why in absences}
    return f" ({known.pop()})" if len(known) == 1 and known != {""} else ""


def _is_bad(absence: str) -> bool:
    """Whether a rank that ended in good order did so with an error."""
    return absence.startswith("left ") and absence != "left exit code 0"


def _plain(what: str) -> str:
    """A transport's error without its prefix of operation, group and rank.

    >>> _plain('barrier #2 (0 bytes) on group "zero", rank 1 of 2: the connection to rank 0 was lost')
    'the connection to rank 0 was lost'
    """
    return _OPERATION.sub("", what)


def named(what: str) -> set[int]:
    """The ranks that a transport's error names.

    >>> named('barrier #2 (0 bytes) on group "zero", rank 1 of 2: the connection to rank 0 was lost')
    {0}
    """
    return {int(rank) for rank in re.findall(r"\brank (\d+)", _plain(what))}


def is_stuck(failure: Mapping[str, Any], states: Mapping[int, State]) -> bool:
    """Whether the reporting rank is still in its operation, although all ranks that answered have started it."""
    group, record = failure["group"], failure["record"]
    if failure["rank"] not in states or _awaited(group, record, states):
        return False
    own = (other for other in states[failure["rank"]]["groups"] if other["group"] == group)
    return any(blocked["id"] == record["id"] for other in own for blocked in other["blocked"])


def _after(failure: Mapping[str, Any]) -> str:
    """A description of the time-out; empty for failures that were detected at once."""
    return f" ({failure['what']})" if failure["kind"] == "late" else ""


def _members(failure: Mapping[str, Any], states: Mapping[int, State]) -> list[int]:
    for state in states.values():
        for group in state["groups"]:
            if group["group"] == failure["group"]:
                return list(group["members"])
    return []


def _follow(failure: Mapping[str, Any], states: Mapping[int, State]) -> Verdict | None:
    """Follows the waits from the rank that timed out to the ranks that do not wait."""
    if failure["record"] is None:
        return None
    waiting, idle = _waits(failure, states)
    if idle:
        doing = "; ".join(f"{ranks_text([rank])}: {_doing(states[rank])}" for rank in sorted(idle)[:4])
        own = failure["record"]["text"]
        return Verdict(
            f'{ranks_text(sorted(idle))} did not come to {own} on group "{_name(failure["group"], states)}"'
            f"{_after(failure)} ({doing})",
            tuple(sorted(idle)),
            SAME_CALLS,
        )
    return _difference(failure, states) or _circle(waiting)


_Waiting = dict[int, tuple[str, Mapping[str, Any]]]


def _waits(failure: Mapping[str, Any], states: Mapping[int, State]) -> tuple[_Waiting, list[int]]:
    """The waiting ranks reachable from one rank, with group and operation, and the awaited ranks that do not wait."""
    reporter = failure["rank"]
    waiting: _Waiting = {reporter: (failure["group"], failure["record"])}
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
    return waiting, idle


def deadlock(states: Mapping[int, State]) -> tuple[Verdict, bool] | None:
    """A deadlock between ranks that are all blocked, and whether it is certain; None if there is none.

    Messages do not count: a rank that receives and one that sends wait for each other in good order.
    """
    for rank, state in states.items():
        operation = _blocked(state)
        if operation is None or operation[1]["peer"] is not None:
            continue
        failure = {"rank": rank, "group": operation[0], "record": operation[1]}
        different = _difference(failure, states)
        if different is not None:
            return different, True
        waiting, idle = _waits(failure, states)
        circle = _circle(waiting)
        if circle and not idle and all(record["peer"] is None for _, record in waiting.values()):
            return circle, False
    return None


def _awaited(group: str, record: Mapping[str, Any], states: Mapping[int, State]) -> list[int]:
    """The ranks that have not started an operation."""
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
    """Detects ranks that started different operations at the same point of a group."""
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
    """Detects a cycle of waits."""
    if len(waiting) == 1:
        return None
    each = "; ".join(f"rank {rank} in {record['text']}" for rank, (_, record) in sorted(waiting.items())[:4])
    text = f"{ranks_text(sorted(waiting))} wait for each other: {each}"
    return Verdict(text, tuple(sorted(waiting)), SAME_CALLS)


def mismatch(records: Mapping[int, Mapping[str, Any]], group: str) -> Verdict | None:
    """Compares the operations that ranks started at the same point of a group; None if they agree.

    The majority is taken to be right; of equal parties, the party of the lowest rank.
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
                SAME_CALLS,
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
        return f'in {blocked[1]["text"]} on group "{_name(blocked[0], {0: state})}"{_place(state)}'
    last = max(
        (group["last"] for group in state["groups"] if group["last"]), key=lambda r: r["posted"], default=None
    )
    after = f", after {last['text']}" if last else ""
    return f"in no operation{after}, at {state.get('position') or 'an unknown place'}"


def table(states: Mapping[int, State], absent: Mapping[int, str]) -> list[str]:
    """The states of all ranks, one line for each distinct state."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted({*states, *absent}):
        if rank in states:
            text = "{}: " + _doing(states[rank])
        else:
            text = _ABSENCES[absent[rank].partition(" ")[0]] + _how([absent[rank]])
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
    """Finds the cause from flight records alone. A rank without one is taken to have died."""
    world = max(flight["world_size"] for flight in flights.values())
    absent = {rank: "gone" for rank in range(world) if rank not in flights}
    for flight in flights.values():  # recorded at the time of the failure
        absent.update({int(rank): why for rank, why in flight["absent"].items() if int(rank) not in flights})
    failures = [flight["failure"] for flight in flights.values() if flight["failure"] is not None]
    if not failures:
        return Verdict("no rank recorded a failure", ()), table(flights, absent)
    first = min(failures, key=lambda failure: failure["time"])
    return judge(first, flights, absent), table(flights, absent)
