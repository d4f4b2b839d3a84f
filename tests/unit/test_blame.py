"""Who is blamed, from made-up records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bmtrain.__main__ import main
from bmtrain._watch import blame

ZERO, TP = "zero/0/gather", "tp/0/gather"


def record(op: str = "all_gather", sequence: int = 3, **changes: Any) -> dict[str, Any]:
    made = {
        "id": sequence,
        "op": op,
        "sequence": sequence,
        "label": "block 1",
        "dtype": "Float",
        "numel": 10,
        "detail": "",
    }
    made |= {"peer": None, "state": "started", "posted": 1.0, "started": 1.0, "ended": None, **changes}
    return {
        **made,
        "text": f'{made["op"]} #{made["sequence"]} for "{made["label"]}" ({made["numel"]} x Float)',
    }


def state(posted: int = 4, *blocked: dict[str, Any], group: str = ZERO, members: int = 4) -> dict[str, Any]:
    last = {**record(sequence=posted - 1), "state": "done"} if posted else None
    name = group.split("/")[0]
    entry = {"group": group, "name": name, "members": list(range(members)), "posted": posted}
    return {"position": "train.py:7 in main", "groups": [{**entry, "blocked": list(blocked), "last": last}]}


def failure(kind: str = "late", rank: int = 0, **changes: Any) -> dict[str, Any]:
    made = {"rank": rank, "kind": kind, "what": "timed out after 5 s", "group": ZERO, "record": record()}
    return {**made, "time": 100.0, **changes}


WAITS = state(4, record())


@pytest.mark.parametrize(
    ("failed", "states", "absent", "culprits", "words"),
    [
        # one rank said itself what happened
        (
            failure("exception", 2, what="ValueError: no"),
            {0: WAITS},
            {1: "gone"},
            (2,),
            "rank 2 raised ValueError: no",
        ),
        (failure("interrupted", 1), {}, {}, (1,), "rank 1 was interrupted"),
        (failure("aborted", 0, what="enough"), {}, {}, (0,), "rank 0 aborted: enough"),
        # a survivor lost another survivor, but somebody is gone
        (
            failure("failed", 0, what="lost rank 1"),
            {0: WAITS, 1: WAITS, 2: WAITS},
            {3: "gone"},
            (3,),
            "rank 3 died",
        ),
        (failure(), {0: WAITS, 1: WAITS}, {2: "silent", 3: "silent"}, (2, 3), "no answer from ranks 2-3"),
        (failure(), {0: WAITS, 1: WAITS, 2: WAITS}, {3: "left"}, (3,), "rank 3 ended while others"),
        # gone comes before silent, silent before left
        (failure(), {0: WAITS}, {1: "left", 2: "silent", 3: "gone"}, (3,), "rank 3 died"),
        (failure(), {0: WAITS, 3: WAITS}, {1: "left", 2: "silent"}, (2,), "no answer from rank 2"),
        # all alive: one has not come
        (
            failure(),
            {0: WAITS, 1: state(3), 2: WAITS, 3: WAITS},
            {},
            (1,),
            "rank 1 did not come to all_gather #3",
        ),
        # all came, with other operations
        (
            failure(),
            {0: WAITS, 1: WAITS, 2: state(4, record("broadcast")), 3: WAITS},
            {},
            (2,),
            'operation differs on group "zero": ranks 0-1, 3 called all_gather #3 for "block 1" (10 x Float), rank 2',
        ),
        # the transport raised and says what it met, whatever the others do meanwhile
        (
            failure("failed", what="rank 1 is in another operation", record=record("recv", peer=1)),
            {0: WAITS, 1: state(3), 2: WAITS, 3: WAITS},
            {},
            (0,),
            "rank 0: rank 1 is in another operation",
        ),
        (
            failure("failed", what="rank 2 is in another operation"),
            {0: WAITS, 1: state(3), 2: state(4, record("broadcast")), 3: WAITS},
            {},
            (2,),
            'operation differs on group "zero": ranks 0, 3 called all_gather #3',
        ),
        # the transport raised, and nothing else tells why
        (failure("failed", 2, what="lost rank 1"), {}, {}, (2,), "rank 2: lost rank 1"),
    ],
)
def test_judge(
    failed: dict[str, Any],
    states: dict[int, Any],
    absent: dict[int, str],
    culprits: tuple[int, ...],
    words: str,
) -> None:
    verdict = blame.judge(failed, states, absent)
    assert verdict.culprits == culprits
    assert verdict.text.startswith(words)


def test_the_operation_is_named_once() -> None:
    """What the transport told, and what its peer had told it: the error that is raised begins with it anyway."""
    inner = 'all_gather #3 for "block: 1" (40 bytes) on group "zero", rank {} of 2: the connection to rank {} was lost'
    failed = failure("failed", what=f"{inner.format(0, 1)} (see its output): {inner.format(1, 0)}")
    text = blame.judge(failed, {0: WAITS}, {}).text
    assert (
        text
        == "rank 0: the connection to rank 1 was lost (see its output): the connection to rank 0 was lost"
    )


def test_the_chain_of_waits_is_followed() -> None:
    """Rank 0 waits for rank 1, which waits in another group for rank 2, which computes."""
    one = state(3)
    one["groups"] += state(6, record("all_reduce", 5), group=TP)["groups"]
    two = state(3)
    two["groups"] += state(5, group=TP)["groups"]
    zero = state(4, record())
    zero["groups"] += state(6, group=TP)["groups"]
    verdict = blame.judge(failure(), {0: zero, 1: one, 2: two, 3: zero}, {})
    assert verdict.culprits == (2,)
    assert "train.py:7 in main" in verdict.text


def test_ranks_that_wait_for_each_other() -> None:
    zero = state(4, record())
    zero["groups"] += state(5, group=TP)["groups"]
    one = state(3)
    one["groups"] += state(6, record("all_reduce", 5), group=TP)["groups"]
    verdict = blame.judge(failure(), {0: zero, 1: one}, {})
    assert verdict.culprits == (0, 1)
    assert "wait for each other" in verdict.text


@pytest.mark.parametrize(
    ("field", "value", "noun"),
    [
        ("op", "all_reduce", "operation"),
        ("dtype", "Half", "dtype"),
        ("numel", 20, "size"),
        ("detail", "root 1", "root or reduction"),
        ("label", "block 2", "order"),
    ],
)
def test_mismatch_names_both_and_the_difference(field: str, value: Any, noun: str) -> None:
    verdict = blame.mismatch({0: record(), 1: record(), 2: record(**{field: value})}, "zero")
    assert verdict is not None
    assert verdict.culprits == (2,)
    assert verdict.text.startswith(f"{noun}")
    assert "ranks 0-1 called" in verdict.text
    assert "rank 2 called" in verdict.text
    assert blame.mismatch({0: record(), 1: record()}, "zero") is None


@pytest.mark.parametrize(("label", "is_named"), [("pipe.collect", True), ("block 1", False)])
def test_batches_of_other_sizes_in_a_pipeline_are_named(label: str, is_named: bool) -> None:
    """Ranks that wait for each other, one that has found another size, and one whose peer is elsewhere."""
    sends, receives = (record(op, 0, label=label, peer=peer) for op, peer in (("send", 0), ("recv", 1)))
    other = failure("failed", what="rank 1 is in another operation: send #0 (64 bytes)", record=receives)
    late = failure(record=receives)
    for failed, peer in ((late, sends), (other, None)):
        states = {0: state(1, receives, members=2), 1: state(1, *([peer] if peer else []), members=2)}
        assert (blame.ONE_SIZE in blame.verdict(failed, states, {})["table"]) == is_named
    elsewhere = {0: state(1, receives, members=2), 1: state(1, record(sequence=0), members=2)}
    assert blame.ONE_SIZE not in blame.verdict(late, elsewhere, {})["table"]


def test_table_merges_equal_ranks() -> None:
    lines = blame.table({0: WAITS, 1: state(3), 2: WAITS}, {3: "silent"})
    assert lines[0].startswith("ranks 0, 2: in all_gather #3")
    assert lines[1].startswith("rank 1: in no operation, after all_gather #2")
    assert lines[2].startswith("no answer from rank 3")


def write(folder: Path, rank: int, failed: dict[str, Any] | None, what: dict[str, Any]) -> None:
    flight = {"rank": rank, "world_size": 4, "failure": failed, "absent": {}, **what}
    (folder / f"flight-rank{rank}.json").write_text(json.dumps(flight))


def test_blame_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first failure counts, and who left no record has died."""
    write(tmp_path, 0, failure("failed", 0, what="lost rank 1"), WAITS)
    write(tmp_path, 1, failure("failed", 1, what="lost rank 3", time=99.0), WAITS)
    write(tmp_path, 2, None, WAITS)
    assert main(["blame", str(tmp_path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("rank 3 died")
    assert told[1].startswith("  ranks 0-2: in all_gather #3")


def test_blame_refuses_what_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["blame", str(tmp_path)]) == 2
    (tmp_path / "flight-rank0.json").write_text("[]")
    assert main(["blame", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "found none" in told
    assert "flight-rank0.json is no flight record" in told


@pytest.mark.parametrize(
    ("states", "stuck"),
    [
        (
            {0: WAITS, 2: WAITS, 3: WAITS},
            True,
        ),  # all who are left have come: they wait for rank 1, which is gone
        ({0: WAITS, 2: WAITS, 3: state(3)}, False),  # rank 3 has not: it may be what they wait for
        ({0: state(4), 2: WAITS, 3: WAITS}, False),  # over by now
        ({0: state(5, record(sequence=4)), 2: WAITS, 3: WAITS}, False),  # in the next one
        ({2: WAITS, 3: WAITS}, False),
    ],
)
def test_a_suspicion_is_checked(states: dict[int, Any], stuck: bool) -> None:
    assert blame.is_stuck(failure("suspicion"), states) is stuck


def test_a_transport_that_meets_another_operation_names_the_remedy() -> None:
    """Also where the other rank has left its operation by then."""
    states = {0: WAITS, 1: state(3)}
    for what, remedy in (("rank 1 is in another operation", blame.SAME_CALLS), ("connection reset", "")):
        found = blame.judge(failure("failed", what=what, record=record("recv", peer=1)), states, {})
        assert found.remedy == remedy
