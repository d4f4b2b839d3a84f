"""Ranks that are killed while they save: what was saved before is there, what was not finished is not taken for it.

``BMTRAIN_CHECKPOINT_ROUNDS`` sets how often (6 each, blocking and in the background); ``-s`` shows what was struck,
``-o faulthandler_timeout=0`` lets more than five minutes pass.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness import Status, rank_outcomes, run_process, run_ranks
from harness.checkpoint_run import Run

import bmtrain as bmt
from bmtrain.distributed import checkpoint
from bmtrain.errors import UnreadableFileError

ROUNDS = int(os.environ.get("BMTRAIN_CHECKPOINT_ROUNDS", "6"))
WORLD = 2


def at_step(run: Run, step: int) -> None:
    """A state that is told from every other step's: all numbers of it are the step."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.data.fill_(step)
        for entry in run.optimizer.state.values():
            entry["exp_avg"].fill_(step)
            entry["exp_avg_sq"].fill_(step)
    run.position = step


def trained() -> Run:
    run = Run()
    run.train(1)  # there is optimizer state from here on
    return run


def save_until_killed(folder: str, first: int, victims: list[int], delay: float, non_blocking: bool) -> None:
    run = trained()
    bmt.synchronize()
    if bmt.rank() in victims:
        threading.Timer(delay, os.kill, [os.getpid(), signal.SIGKILL]).start()
    for step in range(first, first + 10_000):
        at_step(run, step)
        run.save(folder, non_blocking=non_blocking, keep=3)
        if bmt.rank() == 0:  # a save in the background is over when the next one has been started
            note = Path(folder, "returned.new")
            note.write_text(str(step - non_blocking))
            note.replace(Path(folder, "returned"))


def check_all(folder: str) -> tuple[int, int]:
    """The step of the newest checkpoint, and how many unfinished ones there are; every one is whole or refused."""
    run = trained()
    unfinished = 0
    bmt.synchronize()
    for path in sorted(Path(folder).glob("step-*")):
        try:
            found = checkpoint.load(path, run.model, run.manager)
        except (UnreadableFileError, FileNotFoundError) as error:
            assert path.name in str(error)
            unfinished += 1
        else:
            assert_state(run, int(path.name.removeprefix("step-")), found)
    found = checkpoint.load(folder, run.model, run.manager)
    assert found.step is not None
    assert_state(run, found.step, found)
    return found.step, unfinished


def assert_state(run: Run, step: int, found: checkpoint.Checkpoint) -> None:
    assert found.step == step
    assert found.data == {"position": step, "rank": bmt.rank()}
    for name, parameter in run.model.named_parameters():
        assert parameter.data.eq(step).all(), name
    for entry in run.optimizer.state.values():
        assert entry["exp_avg"].eq(step).all()
        assert entry["exp_avg_sq"].eq(step).all()


@pytest.mark.slow
@pytest.mark.parametrize("non_blocking", [False, True], ids=["blocking", "background"])
def test_killed_at_a_random_instant_of_a_save(non_blocking: bool, tmp_path: Path) -> None:
    folder, generator = str(tmp_path), random.Random(7)
    run_ranks(WORLD, save_first, folder)
    newest, struck = 1, 0
    for _ in range(ROUNDS):
        victims = generator.choice([[0], [1], [0, 1]])
        delay = generator.uniform(0.0, 0.12)
        arguments = (folder, newest + 1, victims, delay, non_blocking)
        outcomes = rank_outcomes(WORLD, save_until_killed, *arguments, fresh=True, grace=3.0)
        assert all(outcomes[victim].status is Status.DIED for victim in victims), outcomes
        results = run_ranks(WORLD, check_all, folder)
        assert len(set(results)) == 1
        latest, unfinished = results[0]
        note = tmp_path / "returned"
        assert latest >= max(newest, int(note.read_text()) if note.exists() else 1)
        newest, struck = latest, struck + (unfinished > 0)
    print(f"{ROUNDS} kills, {struck} of them left a checkpoint unfinished; {newest} steps were saved")


def save_first(folder: str) -> None:
    run = trained()
    at_step(run, 1)
    run.save(folder)


def save_one(folder: str) -> None:
    run = Run()
    run.train(2)
    run.save(folder)


def check_damage(folder: str, cuts: int, flips: int) -> tuple[int, int]:
    """Damages one place after the other; every load has to refuse, and to change nothing."""
    good = Path(folder) / "step-0000002"
    run, generator = Run(seed=5), random.Random(3)
    files = [*sorted(good.glob("shard-*")), good / "manifest.json"]
    contents = {file: file.read_bytes() for file in files}
    versions = [(p.data_ptr(), p._version, float(p.detach().sum())) for p in run.model.parameters()]

    def refused(file: Path) -> None:
        with pytest.raises((UnreadableFileError, FileNotFoundError), match=file.name):
            checkpoint.load(good, run.model, run.manager)
        assert versions == [
            (p.data_ptr(), p._version, float(p.detach().sum())) for p in run.model.parameters()
        ]
        assert not run.optimizer.state

    for number in range(cuts):
        file = files[number % len(files)]
        os.truncate(file, len(contents[file]) * (number // len(files)) * len(files) // cuts)
        refused(file)
        file.write_bytes(contents[file])
    for _ in range(flips):
        [file] = generator.choices(files, weights=[len(contents[file]) for file in files])
        bit = generator.randrange(8 * len(contents[file]))
        data = bytearray(contents[file])
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        refused(file)
        file.write_bytes(contents[file])
    assert checkpoint.load(good, run.model, run.manager).step == 2
    return cuts, flips


def test_64_cuts_and_1000_flipped_bits_are_noticed(tmp_path: Path) -> None:
    run_ranks(WORLD, save_one, str(tmp_path))
    assert run_ranks(1, check_damage, str(tmp_path), 64, 1000) == [(64, 1000)]


STEPS = 12

SCRIPT = """
import os, signal, sys
from pathlib import Path
import bmtrain as bmt
from bmtrain.distributed import checkpoint
from harness.checkpoint_run import Run

folder, steps, kills = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(",")
bmt.init_distributed(timeout=60)
run = Run()
if checkpoint.latest(folder):
    run.load(folder)
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(folder / f"restarts{bmt.rank()}", "a") as file:
    file.write(f"{restart}\\n")
kill = kills[restart].split(":")
while run.position < steps:
    [loss] = run.train(1)
    if [str(run.position), str(bmt.rank())] == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(folder / f"losses{bmt.rank()}", "a") as file:
        file.write(f"{run.position} {loss.hex()}\\n")
    run.save(folder, keep=2, non_blocking=True)
"""


def losses_of(steps: int) -> list[str]:
    return [loss.hex() for loss in Run().train(steps)]


def train_under_torchrun(folder: Path, kills: list[str]) -> dict[int, list[tuple[int, str]]]:
    """What each rank saw: step and loss, those of repeated steps too."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    root = Path(bmt.__file__).parents[1]
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", "--max-restarts=2"]
    run_process(
        [sys.executable, *launch, str(script), str(folder), str(STEPS), ",".join([*kills, "0:0"])],
        environment={"PYTHONPATH": f"{root}:{root / 'tests'}"},
        timeout=240,
    )
    seen = {}
    for rank in range(WORLD):
        lines = [line.split() for line in (folder / f"losses{rank}").read_text().splitlines()]
        seen[rank] = [(int(step), loss) for step, loss in lines]
    return seen


@pytest.mark.slow
def test_killed_and_restarted_by_torchrun(tmp_path: Path) -> None:
    """Kills at three random steps of random ranks, one in one run and two in another; every loss as without them."""
    generator = random.Random(11)
    kills = [f"{step}:{generator.randrange(WORLD)}" for step in generator.sample(range(2, STEPS), 3)]
    once, twice = kills[:1], sorted(kills[1:], key=lambda kill: int(kill.split(":")[0]))
    expected = run_ranks(WORLD, losses_of, STEPS, fresh=True)
    folders = [tmp_path / "once", tmp_path / "twice"]
    with ThreadPoolExecutor() as launchers:  # at the same time: each waits a lot
        runs = list(launchers.map(train_under_torchrun, folders, [once, twice]))
    for folder, chosen, run in zip(folders, [once, twice], runs, strict=True):
        for rank, seen in run.items():
            assert {step for step, _ in seen} == set(range(1, STEPS + 1))
            assert all(loss == expected[rank][step - 1] for step, loss in seen)
            restarts = (folder / f"restarts{rank}").read_text().split()
            assert restarts == [str(number) for number in range(len(chosen) + 1)]
