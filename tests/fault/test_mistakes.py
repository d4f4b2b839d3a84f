"""Common mistakes, by number: what a script prints for each of them, on one rank or on all, and on how many lines.

None is silent, none takes more than `MOST_LINES`, and none ends in advice of torch that is wrong here.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness import Outcome, Status, at_once, free_port, rank_outcomes, run_process, run_ranks
from torch.utils.data import DataLoader, DistributedSampler

import bmtrain as bmt
from bmtrain._base import deprecate as _deprecate
from bmtrain._ranks import context as _context
from bmtrain.distributed import checkpoint

ROOT = Path(__file__).parents[2]
MOST_LINES = 40
#: Texts of torch that advise something that is wrong, or unsafe, in a program of this library.
WRONG_ADVICE = (
    "make sure to call init_process_group",
    "weights_only` set to `False`",
    "add_safe_globals",
    "TORCH_DISTRIBUTED_DEBUG",
    "find_unused_parameters",
    "use_libuv",
)


def check_text(text: str, advice: tuple[str, ...] = WRONG_ADVICE) -> None:
    """Checks that ``text`` is short enough to be read, and advises nothing that is wrong."""
    assert len(text.splitlines()) <= MOST_LINES, text
    assert not any(wrong in text for wrong in advice), text


def linear(*args: int) -> torch.nn.Module:
    return bmt.BMTrainModelWrapper(torch.nn.Linear(*(args or (4, 4))))


def not_initialized() -> None:
    linear()


def wrong_dtype() -> None:
    bmt.Block(bmt.BMTrainModelWrapper(torch.nn.Linear(4, 4).half()))(torch.ones(2, 4))


def wrapped_twice() -> None:
    block = bmt.Block(bmt.Block(bmt.BMTrainModelWrapper(linear())))
    block(torch.ones(2, 4)).sum().backward()


def plain_module_in_a_block() -> None:
    bmt.Block(torch.nn.Linear(4, 4))


def optimizer_before_wrapping() -> None:
    model = torch.nn.Linear(4, 4)
    manager = managed(torch.optim.SGD(model.parameters(), lr=0.1))
    model = bmt.BMTrainModelWrapper(model)
    manager.backward(model(torch.ones(2, 4)).sum())
    manager.step()


def plain_parameter() -> None:
    managed(torch.optim.SGD([*linear().parameters(), torch.nn.Parameter(torch.ones(4))], lr=0.1))


def state_of_other_ranks() -> None:
    weights = torch.nn.ParameterList([linear().weight])
    state = managed(bmt.optim.AdamOptimizer(weights.parameters())).state_dict()
    [saved] = state["optimizers"]
    saved["layout"]["world_size"] = 4
    managed(bmt.optim.AdamOptimizer(weights.parameters())).load_state_dict(state)


def missing_key() -> None:
    linear().load_state_dict({"weight": torch.ones(4, 4)})


def missing_key_in_a_file() -> None:
    name = f"missing-{bmt.rank()}.pt"
    torch.save({"weight": torch.ones(4, 4)}, name)
    bmt.load(linear(), name)


def keys_of_ddp() -> None:
    linear().load_state_dict({"module.weight": torch.ones(4, 4), "module.bias": torch.ones(4)})


def keys_of_compile_in_a_file() -> None:
    name = f"compiled-{bmt.rank()}.pt"
    torch.save(torch.compile(torch.nn.Linear(4, 4)).state_dict(), name)
    bmt.load(linear(), name)


def layer_without_return() -> None:
    class Layer(bmt.DistributedModule):
        def forward(self, x: torch.Tensor) -> None:
            del x

    bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(2)])(torch.ones(2))


def file_of_another_model() -> None:
    if bmt.rank() == 0:
        torch.save({f"h.{i}.weight": torch.ones(4, 4) for i in range(50)}, "other.pt")
    bmt.synchronize()
    bmt.load(linear(), "other.pt")


def loss_of_several_numbers() -> None:
    bmt.optim.OptimManager().backward(linear()(torch.ones(2, 4)))


def sampler_without_rank() -> None:
    sampler = DistributedSampler(range(10))  # type: ignore[arg-type]
    assert (sampler.num_replicas, sampler.rank) == (bmt.world_size(), bmt.rank())


def same_samples() -> None:
    trained(torch.ones(2, 4))


def not_finite() -> None:
    trained(torch.full((2, 4), torch.inf))


def too_big() -> None:
    bmt.nn.Linear(1 << 22, 1 << 22)


def no_process_group() -> None:
    """torch's advice is right here: a group of its own works beside the ranks' (`test_init_ranks.py`)."""
    torch.distributed.all_reduce(torch.ones(1))


class Code:
    """An object that a file of tensors may not hold."""


def full_disk() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    bmt.synchronize()
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (10_000, limits[1])
    )  # writing more is an error, as on a full disk
    try:
        bmt.save(linear(100, 100), "full.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def damaged_checkpoint() -> None:
    model = linear(64, 64)
    checkpoint.save("damaged", 1, model)
    if bmt.rank() == 0:
        shard = next(Path("damaged").glob("step-*/shard-0-*"))
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 4
        shard.write_bytes(content)
    bmt.synchronize()
    checkpoint.load("damaged/step-0000001", model)


def no_checkpoint() -> None:
    name = f"other-{bmt.rank()}.pt"
    torch.save({"weight": Code()}, name)
    bmt.load(linear(), name)


def printed_on_one_rank() -> None:
    model = linear()
    if bmt.rank() == 0:
        assert "Linear" in repr(model)
        print(model.weight.shape, model.weight.dtype, model.weight.device, model.weight.numel())
        print(model.bias is None, hasattr(model, "bias"))
    bmt.synchronize()


def replicated() -> None:
    torch.nn.parallel.DistributedDataParallel(linear())


def clipped_by_torch() -> None:
    model = linear()
    model(torch.ones(2, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def scaled_by_torch() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(bmt.optim.AdamOptimizer(linear().parameters()))


def orthogonalized_by_torch() -> None:
    torch.optim.Muon(linear().parameters())


def loader_with_workers() -> None:
    loader = DataLoader(torch.arange(8.0).view(8, 1), batch_size=2, num_workers=2)  # type: ignore[arg-type]
    assert [batch.shape for batch in loader] == [(2, 1)] * 4
    bmt.synchronize()


def not_drawn() -> None:
    bmt.nn.Linear(4, 4)(torch.ones(2, 4))


def step_without_optimizer() -> None:
    manager = bmt.optim.OptimManager()
    manager.backward(linear()(torch.ones(2, 4)).sum())
    manager.step()


def managed(optimizer: torch.optim.Optimizer) -> bmt.optim.OptimManager:
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    return manager


def trained(x: torch.Tensor, optimizer: torch.optim.Optimizer | None = None, num_steps: int = 4) -> None:
    model = linear()
    manager = managed(optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(num_steps):
        manager.zero_grad()
        manager.backward(model(x).sum())
        manager.step()


def rates_of_ranks() -> None:
    rate = 0.1 * 2 ** -bmt.rank()
    trained(torch.rand(2, 4) + bmt.rank(), bmt.optim.AdamOptimizer(linear().parameters(), lr=rate))


def schedules_of_ranks() -> None:
    """From the third step on a rank has another rate."""
    optimizer = torch.optim.SGD([{"params": [p]} for p in linear().parameters()], lr=torch.tensor(0.5))
    manager = managed(optimizer)
    manager.lr_schedulers[0] = torch.optim.lr_scheduler.StepLR(optimizer, 2 + 4 * bmt.rank(), 0.5)
    manager.add_optimizer(bmt.optim.AdamOptimizer(linear().parameters()))
    for _ in range(8):
        manager.step()


def dropped_gradient() -> None:
    """A rank drops a gradient, of which its share of the parameter gets no update."""
    model = linear()
    manager = managed(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        manager.zero_grad()
        manager.backward(model(torch.ones(2, 4) + bmt.rank()).sum())
        model._parameters["bias"].grad = None if bmt.rank() else model._parameters["bias"].grad
        manager.step()


def same_rates() -> None:
    parameters = list(linear().parameters())
    groups = [{"params": parameters}, {"params": [torch.nn.Parameter(torch.ones(1))], "lr": bmt.rank()}]
    trained(torch.ones(2, 4) * bmt.rank(), bmt.optim.AdamOptimizer(groups), num_steps=9)


class Mistake(NamedTuple):
    """A mistake after which the program could go on, so that many share one launch."""

    number: int
    make: Callable[[], None]
    says: str = ""  # the empty one: it is none any more
    on_rank_0_only: bool = False


RECOVERABLE = [
    Mistake(1, not_initialized, r"bmtrain is not initialized: call bmtrain\.init_distributed\(\)"),
    Mistake(
        2, wrong_dtype, r"in the forward of block .*: parameters in torch\.float16; arguments torch\.float32"
    ),
    Mistake(3, wrapped_twice),
    Mistake(
        4, plain_module_in_a_block, r"parameter 'weight' of shape \(4, 4\) is a Parameter; a Block needs"
    ),
    Mistake(5, optimizer_before_wrapping, r"after the model has been wrapped"),
    Mistake(6, plain_parameter, r"1 of its 3 parameters are plain ones", on_rank_0_only=True),
    Mistake(7, state_of_other_ranks, r"layout"),
    Mistake(8, missing_key, r'Missing key.*"bias"[\s\S]*strict=False'),
    Mistake(4, layer_without_return, r"layer 0: expected 1 results or more \(num_hidden\), got 0"),
    Mistake(8, keys_of_ddp, r"remove it by torch\.\S+if_present\(state, 'module\.'\)"),
    Mistake(8, keys_of_compile_in_a_file, r"remove it by torch\.\S+if_present\(state, '_orig_mod\.'\)"),
    Mistake(8, missing_key_in_a_file, r'Missing key.*"bias"[\s\S]*strict=False'),
    Mistake(
        8, file_of_another_model, r'\A(?![\s\S]*direct cause)[\s\S]*"h\.7\.weight", and 42 more\. \n'
    ),  # one traceback, on all ranks
    Mistake(9, loss_of_several_numbers, r"loss: expected one number .*, got shape \(2, 4\)"),
    Mistake(10, sampler_without_rank),
    Mistake(
        11, same_samples, r"all 2 ranks were equal bit for bit.*bmtrain\.data\.loader", on_rank_0_only=True
    ),
    Mistake(
        12, rates_of_ranks, r"lr of group 0 of AdamOptimizer is 0\.1 on rank 0 and 0\.05 on rank 1", True
    ),
    Mistake(12, schedules_of_ranks, r"lr of group 0 of SGD is 0\.25 on rank 0 and 0\.5 on rank 1", True),
    Mistake(
        12, dropped_gradient, r"number of gradients of group 0 of SGD is 2 on rank 0 and 1 on rank 1", True
    ),
    Mistake(12, same_rates, r"1 of its 3 parameters are plain ones", True),
    Mistake(14, too_big, r"65,536\.0 GiB.*meta.*python -m bmtrain plan"),
    Mistake(15, not_finite, r"the loss was inf or NaN in 3 steps in a row.*loss_scale", on_rank_0_only=True),
    Mistake(25, full_disk, r"File too large: '.*full\.pt"),
    Mistake(26, damaged_checkpoint, r"damaged at tensor "),
    Mistake(27, no_checkpoint, r"not a readable file of tensors: it contains \S*Code"),
    Mistake(31, no_process_group, r"Default process group has not been initialized"),
    Mistake(32, replicated, r"a model of bmtrain, leave it out"),
    Mistake(32, clipped_by_torch, r"OptimManager\.clip_grad_norm"),
    Mistake(32, scaled_by_torch, r"OptimManager"),
    Mistake(32, orthogonalized_by_torch, r"use bmtrain\.optim\.MuonOptimizer"),
    Mistake(33, loader_with_workers),
    Mistake(34, printed_on_one_rank),
    Mistake(
        35,
        not_drawn,
        r"never initialised.*: weight, bias; call bmtrain\.init_parameters",
        on_rank_0_only=True,
    ),
    Mistake(36, step_without_optimizer, r"expected at least one optimizer, got none"),
]


def make_all(folder: str) -> list[tuple[str, float]]:
    """What this rank would print after each, the traceback and the warnings; and how many seconds it took."""
    os.chdir(folder)
    said = []
    for mistake in RECOVERABLE:
        start = time.monotonic()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _deprecate._seen.clear()  # what is said once is said for each of them
            try:
                mistake.make()
                text = ""
            except Exception:
                text = traceback.format_exc()
        text += "".join(f"{w.category.__name__}: {w.message}\n" for w in caught)
        said.append((text, time.monotonic() - start))
        if mistake.number == 1:
            bmt.init_distributed()
    return said


def test_mistakes_that_are_said_at_once(tmp_path: Path) -> None:
    ranks = run_ranks(2, make_all, str(tmp_path), init=False, fresh=True)
    for mistake, *told in zip(RECOVERABLE, *ranks, strict=True):
        print(f"mistake {mistake.number}: told after {max(seconds for _, seconds in told):.1f} s")
        for rank, (text, _) in enumerate(told):
            if mistake.says and not (rank and mistake.on_rank_0_only):
                assert re.search(mistake.says, text), (mistake, text)
            else:
                assert not text, (mistake, text)
            check_text(text, WRONG_ADVICE[1:] if mistake.make is no_process_group else WRONG_ADVICE)


# ---- mistakes that end the job


def batches_apart() -> None:
    """A rank leaves a batch out: the next call is another one than the others'."""
    model, head = bmt.Block(linear()), bmt.Block(linear(4, 8))
    for step in range(3):
        if bmt.rank() == 1 and step == 1:
            continue
        head(model(torch.ones(2, 4)).detach() * (1 if step else 2)).sum().backward()


def one_batch_less() -> None:
    model = bmt.Block(linear())
    for _ in range(3 - bmt.rank()):
        model(torch.ones(2, 4)).sum().backward()


def killed() -> None:
    if bmt.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    bmt.synchronize()


def raised() -> None:
    if bmt.rank() == 1:
        raise ValueError("bad sample")
    bmt.synchronize()


def interrupted() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the harness ignores it
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    time.sleep(5)


def forward_on_one_rank() -> None:
    model = bmt.Block(linear())
    if bmt.rank() == 0:
        model(torch.ones(2, 4))
    bmt.synchronize()


def state_on_one_rank() -> None:
    model = bmt.Block(linear())
    if bmt.rank() == 0:
        model.state_dict()


def too_big_for_torch() -> None:
    torch.nn.Linear(1 << 22, 1 << 22)


def base_class_of_torch() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = bmt.DistributedParameter(torch.ones(4, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight)

    Layer()(torch.ones(4, 8))


def as_script(name: str, *arguments: int) -> None:
    """To the end of a program: with what the interpreter prints of an exception."""
    try:
        globals()[name](*arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(1)
    _context.uninstall()  # as at the end of a script
    os._exit(0)


LEFT = r"rank 1 ended while others still wait|connection to rank 1 was lost"
ENDING: list[tuple[int, Callable[[], None], str]] = [
    (12, batches_apart, LEFT),
    (13, one_batch_less, LEFT),
    (14, too_big_for_torch, r"bmtrain: out of memory.*meta.*python -m bmtrain plan"),
    (16, killed, r"rank 1 died"),
    (17, raised, r"gives up: rank 1 raised ValueError: bad sample"),
    (24, interrupted, r"KeyboardInterrupt|interrupted"),
    (
        29,
        forward_on_one_rank,
        r"rank 0 called all_gather .* rank 1 called barrier|rank [01] is in another operation: |only rank 0",
    ),
    (30, state_on_one_rank, LEFT),
    (37, base_class_of_torch, r"bmtrain: Layer computes with shards.*: derive the class"),
]


@pytest.mark.parametrize(("number", "mistake", "says"), ENDING, ids=[str(case[0]) for case in ENDING])
def test_mistakes_that_end_the_job(number: int, mistake: Callable[[], None], says: str) -> None:
    start = time.monotonic()
    outcomes = rank_outcomes(2, as_script, mistake.__name__, init={"timeout": 30}, fresh=True, timeout=60)
    print(f"mistake {number}: ended after {time.monotonic() - start:.1f} s, start included")
    assert all(outcome.status is Status.DIED for outcome in outcomes), outcomes
    assert any(outcome.exitcode for outcome in outcomes)
    # Mistakes of both ranks: the first one to raise tells its own.
    output = outcomes[0].output + (outcomes[1].output if number in (14, 24, 37) else "")
    assert re.search(says, output), output
    for outcome in outcomes:
        check_text(outcome.output)


def mistyped() -> None:
    import runpy

    sys.path.insert(0, str(ROOT / "example"))
    sys.argv = ["train.py", "--stepps", "3"]
    runpy.run_path(str(ROOT / "example" / "train.py"), run_name="__main__")


def test_a_mistyped_option_is_said_in_one_line_by_one_rank() -> None:  # 28
    outcomes = rank_outcomes(2, mistyped, init=False, fresh=True)
    assert outcomes[0].output.splitlines() == [
        "train.py: error: unrecognized arguments: --stepps 3 (--help lists all options)"
    ]
    assert not outcomes[1].output
    assert all(outcome.error == "SystemExit" and outcome.message == "2" for outcome in outcomes), outcomes


# ---- mistakes before the ranks have met


def rank_missing(port: int) -> None:
    os.environ.update(WORLD_SIZE="3", LOCAL_WORLD_SIZE="3", MASTER_PORT=str(port))
    bmt.init_distributed(timeout=6)


def port_in_use(port: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    bmt.init_distributed(timeout=6)


AT_THE_START = {
    port_in_use: [r"expected port \d+ to be free .*set MASTER_PORT to a free port", r"accepts connections"],
    rank_missing: [r"expected 3 ranks within 6 s, got 2; missing rank 2"] * 2,
}


@pytest.fixture(scope="module")
def waiting() -> dict[Callable[[int], None], list[Outcome]]:
    """Outcomes of jobs that end at their time-out, at the same time."""
    run = partial(rank_outcomes, 2, as_script, init=False, fresh=True, timeout=60)
    with socket.create_server(("", 0)) as other:
        ports = {port_in_use: other.getsockname()[1], rank_missing: free_port()}
        calls = [partial(run, mistake.__name__, port) for mistake, port in ports.items()]
        return dict(zip(ports, at_once(calls), strict=True))


@pytest.mark.parametrize("mistake", AT_THE_START, ids=["18", "19"])
def test_mistakes_at_the_start(
    mistake: Callable[[int], None], waiting: dict[Callable[[int], None], list[Outcome]]
) -> None:
    for outcome, pattern in zip(waiting[mistake], AT_THE_START[mistake], strict=True):
        assert re.search(pattern, outcome.output), outcome.output
        check_text(outcome.output)


# ---- mistakes of a set-up

PIP = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", str(ROOT)]
HIDDEN_TORCH = ("sitecustomize.py", "import sys; sys.modules['torch'] = None\n")
OLD_TORCH = ("torch-2.5.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
OLD_PYTHON = ("python3.9", "#!/bin/sh\nexit 1\n")  # its answer to the question for its version
SET_UP: list[tuple[int, list[str], str, tuple[str, str], str]] = [
    (20, PIP, "PYTHONPATH=.", HIDDEN_TORCH, r"has none\.\s+First run\s+\S* -m pip install torch==\d"),
    (21, PIP, "PYTHONPATH=.", OLD_TORCH, r"needs torch >= 2\.11, .* has 2\.5\.1"),
    (
        22,
        ["bash", "-c", f". {ROOT}/tests/env.sh"],
        "BMTRAIN_PYTHON=./python3.9",
        OLD_PYTHON,
        r"python3\.9 is not a Python >= 3\.10; name one in BMTRAIN_PYTHON",
    ),
    (
        23,
        PIP,
        "CXX=nope-g++ -O2",
        ("unused", ""),
        r"needs a C\+\+20 compiler, and there is no nope-g\+\+ \(Debian",
    ),
]


@pytest.mark.parametrize(
    ("number", "command", "setting", "file", "says"), SET_UP, ids=[str(c[0]) for c in SET_UP]
)
def test_mistakes_of_a_set_up(
    number: int, command: list[str], setting: str, file: tuple[str, str], says: str, tmp_path: Path
) -> None:
    place = tmp_path / file[0]
    place.parent.mkdir(exist_ok=True)
    place.write_text(file[1], encoding="utf-8")
    place.chmod(0o755)
    name, value = setting.split("=")
    value = str(tmp_path) if value == "." else value  # pip changes the directory
    done = run_process(command, environment={name: value}, directory=tmp_path, check=False)
    assert done.returncode != 0
    assert re.search(says, done.stdout), done.stdout
    check_text(done.stdout)


def test_every_mistake_is_in_a_table() -> None:
    tabled = [mistake.number for mistake in RECOVERABLE], [case[0] for case in (*ENDING, *SET_UP)]
    assert {18, 19, 28}.union(*tabled) == set(range(1, 38))
