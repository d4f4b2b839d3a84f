"""Timelines: order of events, shares of time, files that trace viewers read, nothing when off."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain.__main__ import main
from bmtrain._engine.engine import current_engine
from bmtrain._tools.gpt import GPT
from bmtrain.global_var import context
from bmtrain.nn.functional import attention
from bmtrain.timeline import Span, read_traces, summarize, write_trace
from bmtrain.wrapper import BMTrainModelWrapper, model_wrapper_dispatch

LAYERS = 4


def training(**options):
    torch.manual_seed(0)
    model = GPT(LAYERS, 32, 4, 50, 16)
    model.layers = torch.nn.ModuleList(
        [bmt.Block(model_wrapper_dispatch(layer), **options) for layer in model.layers]
    )
    model = BMTrainModelWrapper(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    batch = torch.randint(0, 50, (2, 17))

    def step() -> float:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    step.optimizer = optimizer
    return step


def recorded(directory: str, options: dict) -> dict:
    step = training(**options)
    engine = current_engine(context())
    with bmt.timeline.record(steps=2, skip=3, directory=directory) as timeline:
        with pytest.raises(RuntimeError, match="running already"):  # while it skips steps, too
            bmt.timeline.record().start()
        losses = [step() for _ in range(3)]
        off = engine.observer is None and not timeline.is_running
        losses += [step() for _ in range(5)]
        stopped = engine.observer is None and not timeline.is_running
    plain = training(**options)
    return {
        "same losses": losses == [plain() for _ in range(8)],
        "off": off,
        "stopped": stopped,
        "spans": timeline.spans,
        "exposed": timeline.summary().exposed_communication,
    }


def of(spans: list[Span], kind: str, detail: str = "") -> list[Span]:
    return [span for span in spans if span.kind == kind and detail in ("", span.detail)]


@pytest.mark.parametrize(
    ("options", "gathers"), [({}, 2 * LAYERS - 1), ({"zero_level": 2}, LAYERS)], ids=["level3", "level2"]
)
def test_a_recording_has_every_event_in_order(options, gathers, tmp_path: Path) -> None:
    ranks = run_ranks(2, recorded, str(tmp_path), options)
    for found in ranks:
        spans = found["spans"]
        assert found["same losses"]
        assert found["stopped"]
        assert not found["off"]  # the end of the third step began the recording
        assert len(of(spans, "step")) == len(of(spans, "optimizer")) == 2
        assert len(of(spans, "gather")) == 2 * gathers
        assert len(of(spans, "reduce")) == 2 * LAYERS
        forwards, backwards = of(spans, "compute", "forward"), of(spans, "compute", "backward")
        assert len(forwards) == len(backwards) == 2 * LAYERS
        # The gather of the next block is under way before a block computes.
        for now, following in itertools.pairwise(forwards[:LAYERS]):
            gather = next(span for span in of(spans, "gather") if span.name == following.name)
            assert gather.begin <= now.begin
        # At most one reduction overlaps with the next block's backward: it is waited for after that.
        reductions = of(spans, "reduce")[:LAYERS]
        assert [span.name for span in reductions] == [span.name for span in backwards[:LAYERS]]
        for reduction, following in zip(reductions[:-1], backwards[1:LAYERS], strict=True):
            assert reduction.begin <= following.begin <= following.end <= reduction.end
        assert 0 < found["exposed"] < 1
    summary = summarize(read_traces(tmp_path))
    assert [rank.rank for rank in summary.ranks] == [0, 1]
    exposed = sum(found["exposed"] for found in ranks) / len(ranks)
    assert summary.exposed_communication == pytest.approx(exposed, rel=1e-6)
    assert summary.slowest_block is not None


def check_trace_format(content: dict) -> None:
    """Google's "Trace Event Format", 2016: what each phase of event has to have."""
    assert isinstance(content["traceEvents"], list)
    begun: set[tuple] = set()
    stacks: dict[tuple, list[float]] = {}
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            continue
        assert event["ts"] >= 0
        key = (event["pid"], event["cat"], event.get("id"))
        if event["ph"] == "b":
            assert key not in begun
            begun.add(key)
        elif event["ph"] == "e":
            begun.remove(key)
        else:
            assert event["ph"] == "X"
            assert event["dur"] >= 0
            stacks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
    assert not begun
    for spans in stacks.values():  # on one row, events follow or contain each other
        ends: list[float] = []
        for begin, duration in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= begin + 1e-3:
                ends.pop()
            assert not ends or begin + duration <= ends[-1] + 1e-3
            ends.append(begin + duration)


def test_command_prints_draws_and_writes_what_viewers_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, recorded, str(tmp_path), {})
    assert main(["timeline", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "exposed communication: " in output
    assert "slowest block: " in output
    assert max(len(line) for line in output.splitlines() if not line.startswith("written")) <= 80
    check_trace_format(json.loads((tmp_path / "trace.json").read_text()))
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def recorded_with_copies() -> tuple[bool, float, int]:
    model, manager = bmt.BMTrainModelWrapper(torch.nn.Linear(8, 4)), bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
    with bmt.timeline.record(steps=2, skip=1) as recording:
        for step in range(3):
            for shard in bmt.virtual_shards(step):
                manager.backward(model(shard.of(torch.ones(4, 8))).sum())
            manager.step()
    summary = recording.summary()
    return "copies for" in str(summary), summary.ranks[0].copies, len(of(recording.spans, "optimizer"))


def test_copies_for_the_loss_of_a_rank_are_a_wait_of_their_own() -> None:
    init = {"virtual_shards": 2, "survive": 1}
    for is_shown, share, updates in run_ranks(2, recorded_with_copies, init=init, fresh=True):
        assert is_shown
        assert 0 < share < 1
        assert updates == 2  # those of the copies are not among them


def recorded_by_environment() -> None:
    step = training()
    for _ in range(6):
        step()


def test_the_environment_starts_a_recording(tmp_path: Path) -> None:
    environment = {"BMTRAIN_TIMELINE": str(tmp_path), "BMTRAIN_TIMELINE_STEPS": "2"}
    run_ranks(2, recorded_by_environment, environment=environment, fresh=True)
    spans = read_traces(tmp_path)
    assert sorted(spans) == [0, 1]
    assert len(of(spans[1], "step")) == 2


def init_with_a_file_as_the_directory() -> str:
    with pytest.raises(ValueError) as caught:
        bmt.init_distributed()
    return str(caught.value)


def test_a_file_is_no_directory_for_recordings(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = {"BMTRAIN_TIMELINE": str(tmp_path / "file" / "out")}
    for said in run_ranks(
        2, init_with_a_file_as_the_directory, environment=environment, fresh=True, init=False
    ):
        assert "BMTRAIN_TIMELINE: expected a folder to write to" in said and "Not a directory" in said


def test_the_summary_needs_no_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trace(tmp_path, [Span("step", "step", 0.0, 1.0)], rank=0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["timeline", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "slowest rank: 0" in said.out
    assert said.err == (
        "bmtrain timeline: no picture: drawing needs matplotlib: pip install matplotlib, or pass --no-png\n"
    )


def keep_a_recording() -> bool:
    model = bmt.nn.Linear(4, 4)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    with bmt.timeline.record() as recording:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    return bool(recording.spans) and seen() is None


def test_who_keeps_a_recording_does_not_keep_the_optimizer() -> None:
    assert run_ranks(1, keep_a_recording) == [True]


def test_summary_adds_up() -> None:
    spans = [
        Span("step", "step", 0.0, 10.0),
        Span("compute", "a", 0.0, 4.0, "forward"),
        Span("compute", "inner", 1.0, 2.0, "forward"),
        Span("wait", "inner", 1.5, 1.75, "gather"),
        Span("wait", "a", 4.0, 5.0, "gather"),
        Span("wait", "a", 5.0, 5.5, "reduce"),
        Span("optimizer", "optimizer", 6.0, 8.0, "Adam"),
        Span("compute", "late", 11.0, 12.0, "forward"),
    ]
    summary = summarize({0: spans, 1: [Span("step", "step", 0.0, 10.0)]})
    assert summary.exposed_communication == pytest.approx(0.0875)
    assert summary.ranks[0].other == pytest.approx(2.5)
    assert summary.slowest_rank == 1
    assert summary.ranks[0].compute == pytest.approx(3.75)
    assert {block.name: block.compute for block in summary.blocks} == pytest.approx(
        {"a": 1.5, "inner": 0.375}
    )
    with pytest.raises(ValueError, match="at least one optimizer step"):
        summarize({0: spans[1:]})


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [("other.json", "{}", "expected files rank"), ("rank0.json", "{}", "is not a timeline of bmtrain")],
)
def test_a_wrong_directory_gets_one_sentence(
    name: str, content: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["timeline", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert len(told.splitlines()) == 1


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    spans = [Span("gather", "a", 0.5, 1.0), Span("compute", "a", 1.0, 2.5, "forward")]
    write_trace(tmp_path, spans, 3, began=100.0)
    write_trace(tmp_path, spans, 1, began=102.0)  # that clock was started later
    found = read_traces(tmp_path)
    assert found[3] == spans
    assert [(span.begin, span.end) for span in found[1]] == [(2.5, 3.0), (3.0, 4.5)]


def recorded_stages() -> list[Span]:
    layers = [model_wrapper_dispatch(torch.nn.Linear(8, 8)) for _ in range(4)]
    model = bmt.PipelineTransformerBlockList(layers)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    with bmt.timeline.record() as timeline:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    return timeline.spans


def test_waits_between_pipeline_stages_are_told_apart() -> None:
    for spans in run_ranks(2, recorded_stages, init={"pipe_size": 2}):
        # 2 micro-batches: sent or received forward, received or sent backward
        assert len(of(spans, "wait", "stage")) == 2 * 2
        assert {span.name for span in of(spans, "wait", "stage")} == {"pipeline"}


def recorded_owners() -> list[Span]:
    model = bmt.Block(bmt.nn.Linear(16, 16, bias=False))
    optimizer = bmt.optim.MuonOptimizer(model.parameters())
    with bmt.timeline.record() as timeline:
        for _ in range(2):
            model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
    assert timeline.summary().ranks[0].gather_wait > 0
    return timeline.spans


def test_waits_for_whole_matrices_are_told_apart() -> None:
    owner, other = run_ranks(2, recorded_owners)
    # Before the matrix is transformed, and until the result has left; of the other rank for the result.
    assert [len(of(spans, "wait", "owner")) for spans in (owner, other)] == [2 * 2, 2]


class Mixture(bmt.DistributedModule):
    """Attention over divided sequences, and divided experts."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.moe = bmt.nn.Linear(8, 8), bmt.nn.MoE(8, 8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(-1, (4, 2)).transpose(1, 2)
        return self.moe(attention(heads, heads, heads).transpose(1, 2).flatten(2))[0]


def recorded_tokens(method: str) -> list[Span]:
    model = bmt.Block(Mixture(), policy=bmt.BlockPolicy(recompute="off"))
    bmt.init_parameters(model)
    optimizer = bmt.optim.AdamOptimizer(model.parameters())
    part = bmt.shard_sequence({"inputs_embeds": torch.randn(2, 8, 8)}, method=method)
    model(part["inputs_embeds"])  # the first call is checked by small ones
    with bmt.timeline.record() as timeline:
        for _ in range(2):
            model(part["inputs_embeds"]).sum().backward()
            optimizer.step()
    assert timeline.summary().ranks[0].peer_wait > 0
    return timeline.spans


@pytest.mark.parametrize(("method", "waits"), [("heads", 2 + 2), ("ring", 2 + 4)])
def test_waits_for_tokens_of_other_ranks_are_told_apart(method: str, waits: int) -> None:
    for spans in run_ranks(2, recorded_tokens, method, init={"sp_size": 2, "ep_size": 2}):
        names = [span.name for span in of(spans, "wait", "tokens")]
        # There and back, and their gradients; before that the experts' counts.
        assert [names.count("sequences"), names.count("experts")] == [2 * waits, 2 * 5]


def recorded_drives(directory: str) -> list[Span]:
    everything = dict.fromkeys(("parameters", "gradients", "optimizer"), "disk")
    step = training(policy=bmt.BlockPolicy(**everything))
    for _ in range(4):
        step()
    step.optimizer._place.finish()  # its update would go on in the next step
    with bmt.timeline.record(directory=directory) as timeline:
        step()
        step.optimizer._place.finish()
    return timeline.spans


def test_what_drives_read_and_write_has_rows(tmp_path: Path) -> None:
    for spans in run_ranks(2, recorded_drives, str(tmp_path), init={"tier_directories": [str(tmp_path)]}):
        (step,) = of(spans, "step")
        for kind, counts in {
            # The last block stays from its forward to its backward.
            "read": {"parameters": 2 * LAYERS - 1, "gradients": 0, "state": LAYERS},
            "write": {"parameters": 0, "gradients": LAYERS, "state": LAYERS},
        }.items():
            moved = of(spans, kind)
            assert {what: sum(span.name.startswith(what) for span in moved) for what in counts} == counts
            assert all(step.begin <= span.begin <= span.end for span in moved)
    assert main(["timeline", str(tmp_path)]) == 0
    check_trace_format(json.loads((tmp_path / "trace.json").read_text()))
