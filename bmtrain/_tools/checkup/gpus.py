"""The proof of ``bmtrain doctor --gpus``: on these GPUs, together, the library computes correct results.

Every check also runs on CPU ranks, where tests try it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ... import _ops
from ..._C import ReduceOp
from ..._ranks.agree import largest
from ..._ranks.context import Context
from ...optim.formulas import Adam
from ..started import run_forked
from .findings import Check
from .ranks import meet

_REPORT = "report this, with the line above and the output of nvidia-smi"
_LARGE = 1 << 22  # elements of the largest exchange, per rank
_STEPS = 10


def run_on_all_gpus(timeout: float) -> int:
    """Starts one rank for each GPU of this host, which prove and report; returns the exit status."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        print("PROBLEM devices        no usable GPU, so nothing can be proven", flush=True)
        return 1
    return run_forked(count, ["-m", "bmtrain", "doctor", "--gpus", "--timeout", str(timeout)], {})


def prove(timeout: float) -> Iterator[Check]:
    """Lets the ranks meet and runs all checks. Collective; every rank makes the same checks."""
    try:
        context = meet(timeout)
    except Exception as error:  # of the library, or of torch about the device
        yield Check("ranks", _described(error), "run bmtrain doctor for what is wrong")
        return
    world = context.world.size
    yield Check("ranks", f"rank {context.topology.rank} of {world}, {context.backend}, {context.device}")
    checks: list[tuple[str, Callable[[Context], str]]] = [
        ("kernels", _kernels),
        ("exchanges", _exchanges),
        ("training", _training),
    ]
    for name, check in checks:
        result = _shared(context, _tried(name, check, context))
        yield result
        if result.is_problem:
            return  # what comes next would hang, or fail for the same reason


def _tried(name: str, check: Callable[[Context], str], context: Context) -> Check:
    try:
        return Check(name, check(context))
    except Exception as error:  # whatever it is: it is what the user has to see
        return Check(name, _described(error), _REPORT)


def _shared(context: Context, own: Check) -> Check:
    """The same, or that another rank has found a problem. After an error of the device even asking can fail."""
    try:
        if any(largest([own.is_problem], "doctor", context.world.comm)) and not own.is_problem:
            return Check(
                own.name, f"{own.found}, but it failed on another rank", "look at what the others report"
            )
    except Exception as error:
        if not own.is_problem:
            return Check(own.name, f"{own.found}, then {_described(error)}", _REPORT)
    return own


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _require(problems: list[str]) -> None:
    """Raises for a wrong result; called when no exchange is left that other ranks wait for."""
    if problems:
        raise AssertionError("; ".join(problems[:3]))


def _kernels(context: Context) -> str:
    """Kernels of the device against the CPU's, bit for bit."""
    device = context.device
    if not _ops.has_steps(device.type):
        return "the core was built without CUDA: torch's kernels are used"
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(100_003, generator=generator) for _ in range(2))
    results = []
    for place in (torch.device("cpu"), device):
        w, g = weight.to(place, copy=True), grad.bfloat16().to(place)
        moments = [torch.zeros_like(w) for _ in range(2)]
        rounded = w.bfloat16()
        options = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
        group = Adam().numbers_of(options, is_low=True, scale=1024.0)
        _ops.step_of_groups("adam", [[w], [rounded], [g], *([m] for m in moments), [3]], [1], [group])
        total = _ops.ordered_sum_(torch.empty_like(g), [g, rounded, g])
        results.append([x.cpu() for x in (w, rounded, *moments, total)])
    equal = all(torch.equal(mine, reference) for mine, reference in zip(*results, strict=True))
    _require([] if equal else ["Adam or a sum differs from the CPU's"])
    return "Adam and sums have the bits of the CPU's"


def _exchanges(context: Context) -> str:
    """Collectives of every size and dtype with known answers, and how fast the largest was."""
    group, device = context.world, context.device
    size, rank = group.size, group.rank
    seconds = 0.0
    problems: list[str] = []

    def check(right: Tensor, what: str) -> None:
        if not right.all():
            problems.append(f"{what} of {numel} x {dtype} is wrong")

    for numel in (1, 1000, _LARGE):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            own = torch.full((numel,), rank + 1, dtype=dtype, device=device)
            whole = own.new_empty(numel * size)
            _wait(context)
            begin = time.perf_counter()
            group.comm.all_gather(whole, own, "doctor").wait()
            _wait(context)
            seconds = time.perf_counter() - begin
            expected = torch.arange(1, size + 1, device=device).repeat_interleave(numel).to(dtype)
            check(whole == expected, "all_gather")
            part = torch.empty_like(own)
            group.reduce_comm.reduce_scatter(part, whole, ReduceOp.SUM, "doctor").wait()
            check(part == size * (rank + 1), "reduce_scatter")
            group.comm.all_reduce(own, ReduceOp.SUM, "doctor").wait()
            check(own == size * (size + 1) // 2, "all_reduce")
    _require(problems)
    rate = (size - 1) * _LARGE * 2 / seconds / 1e9
    speed = f"; {rate:.1f} GB/s into each rank" if size > 1 else ""
    return f"gathers and sums over {size} ranks are right{speed}"


def _wait(context: Context) -> None:
    if context.device.type == "cuda":
        torch.cuda.synchronize(context.device)


def _training(context: Context) -> str:
    """A sharded GPT on the ranks' parts of a batch against the plain one on the whole batch, in fp32."""
    from ...block_layer import Block
    from ...optim import AdamOptimizer, OptimManager
    from ...wrapper import BMTrainModelWrapper, model_wrapper_dispatch
    from ..gpt import GPT

    group, device = context.world, context.device
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(64, (2 * group.size, 17), generator=generator).to(device)
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        torch.manual_seed(0)
        plain: Any = GPT(num_layers=3, dim=32, num_heads=4, vocab=64, seq=16)
        torch.manual_seed(0)
        sharded: Any = GPT(num_layers=3, dim=32, num_heads=4, vocab=64, seq=16)
        blocks = [Block(model_wrapper_dispatch(layer)) for layer in sharded.layers]
        sharded.layers = torch.nn.ModuleList(blocks)
        model = BMTrainModelWrapper(sharded)
        manager = OptimManager()
        manager.add_optimizer(AdamOptimizer(model.parameters(), lr=1e-3))
        plain.to(device)
        reference = torch.optim.Adam(plain.parameters(), lr=1e-3)
        worst = 0.0
        for _ in range(_STEPS):
            reference.zero_grad()
            expected: Tensor = plain(batch)
            expected.backward()
            reference.step()
            manager.zero_grad()
            loss = model(batch.chunk(group.size)[group.rank])
            manager.backward(loss)
            manager.step()
            mean = loss.detach().clone()
            group.comm.all_reduce(mean.view(1), ReduceOp.AVG, "doctor").wait()
            worst = max(worst, float((mean - expected.detach()).abs().nan_to_num(torch.inf)))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    right = worst < 1e-4
    _require([] if right else [f"the losses differ from unsharded training by {worst:.2g}"])
    return f"{_STEPS} steps of a sharded GPT agree with plain torch to {worst:.1g}"
