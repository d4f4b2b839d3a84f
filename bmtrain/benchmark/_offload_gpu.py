"""Training steps of a GPT whose optimizer is on the host: their time against the lower bound of the machine.

For each number of tokens the same bf16 GPT, with recomputation and clipping, is trained with all of its optimizer on
the host, with the part that the optimizer chooses by itself, with updates inside ``step()``, with everything on the
device, and by DeepSpeed's offload where that is installed. The bound comes from the forward and the backward of the
same model without any update, the card's copies to and from page-locked memory, and a pass of the host that moves an
update's bytes and computes nothing.
"""

from __future__ import annotations

import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .._engine.policy import BlockPolicy
from .._tools.gpt import GPT
from ..block_layer import Block
from ..global_var import context
from ..optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from ..wrapper import model_wrapper_dispatch
from ._offload_bound import Rates, Unit, least_seconds, measure_rates, wait_for
from ._training import sharded

_GIB = 1 << 30
_VOCAB = 50304
_CLIP = 1.0


class Shape(NamedTuple):
    """Sizes of the model and of its batches."""

    layers: int
    dim: int
    heads: int
    seq: int
    tokens: tuple[int, ...]  # of a step
    repeat: int  # steps that are timed
    vocab: int = _VOCAB


class _Training:
    """A model of this library, with its optimizer and manager."""

    def __init__(self, shape: Shape, optimizer_of: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        device = context("bench gpu").device
        with torch.device(device):
            model: Any = GPT(shape.layers, shape.dim, shape.heads, shape.vocab, shape.seq).bfloat16()
        # Blocks too, so that a forward does not begin by waiting for all of them.
        plain = BlockPolicy(level=3, recompute="off")
        for name in ("token", "position", "head"):
            setattr(model, name, Block(model_wrapper_dispatch(getattr(model, name)), policy=plain))
        self.model: Any = sharded(model, BlockPolicy(level=3, recompute="whole"))
        self.device = device
        self.optimizer = optimizer_of(self.model.parameters())
        self.manager = OptimManager()
        self.manager.add_optimizer(self.optimizer)

    def forward(self, batch: Tensor) -> Tensor:
        self.manager.zero_grad()
        loss: Tensor = self.model(batch)
        return loss

    def backward(self, loss: Tensor) -> None:
        self.manager.backward(loss)
        self.manager.clip_grad_norm(self.optimizer.param_groups, max_norm=_CLIP)

    def step(self, batch: Tensor) -> Tensor:
        loss = self.forward(batch)
        self.backward(loss)
        self.manager.step()
        return loss.detach()

    def finish(self) -> None:
        """Waits for the updates in flight."""
        len(self.optimizer.state)
        wait_for(self.device)

    def units(self) -> list[Unit]:
        """The units that the host updates; the time of a block is taken as proportional to its products per token."""
        blocks: dict[int, list[Any]] = {}
        for p in self.model.parameters():
            block = p._block() if p._block is not None else None
            blocks.setdefault(id(p) if block is None else id(block), []).append(p)
        tables = {id(p) for name in ("token", "position") for p in getattr(self.model, name).parameters()}
        sizes = [
            0 if id(members[0]) in tables else sum(p.numel() for p in members) for members in blocks.values()
        ]
        on_host = [
            sum(p.numel() for p in members if _is_on_host(self.optimizer, p)) for members in blocks.values()
        ]
        return [Unit(numel, size / sum(sizes)) for numel, size in zip(on_host, sizes, strict=True)]


def _is_on_host(optimizer: Any, p: Tensor) -> bool:
    residents = getattr(optimizer, "_residents", None)
    return isinstance(optimizer, AdamOffloadOptimizer) and not (residents and id(p) in residents)


#: Name -> the optimizer of a variant of ours.
_OURS: dict[str, Callable[[Any], Any]] = {
    "fraction 0": lambda parameters: AdamOffloadOptimizer(parameters, lr=1e-4, fraction=0),
    "chosen fraction": lambda parameters: AdamOffloadOptimizer(parameters, lr=1e-4),
    "inside step": lambda parameters: AdamOffloadOptimizer(parameters, lr=1e-4, fraction=0, overlap=False),
    "on the device": lambda parameters: AdamOptimizer(parameters, lr=1e-4),
}
#: The variants that are bit-identical.
_SAME = ("fraction 0", "chosen fraction", "inside step")
_Result: TypeAlias = dict[str, Any]


def measure_offload(shape: Shape) -> _Result:
    """Times of all variants, the most tokens first: the chosen fraction is one for the largest step.

    Returns:
        ``rates`` in GB/s; ``results``, a row for each number of tokens and variant: milliseconds of a step, forward,
        backward and the bound, the ratio, the fraction on the device, the peak of the device's memory, losses; or the
        error. ``same bits`` says whether the weights of variants that must agree do.
    """
    device = context("bench gpu").device
    rates = measure_rates(device, min(12 * shape.dim * shape.dim, 1 << 27), 5)
    rows: list[_Result] = []
    parameters = 0
    times: dict[int, tuple[float, float]] = {}
    for name, optimizer_of in _OURS.items():
        found, parameters = _measure_ours(shape, name, optimizer_of, rates, times)
        rows += found
        _free(device)
    rows += _measure_deepspeed(shape, device)
    return {
        "parameters": parameters,
        "threads": torch.get_num_threads(),
        "rates": {name: rate / 1e9 for name, rate in rates._asdict().items()},
        "same bits": _have_same_bits(shape),
        "results": rows,
    }


def _measure_ours(
    shape: Shape,
    name: str,
    optimizer_of: Callable[[Any], Any],
    rates: Rates,
    times: dict[int, tuple[float, float]],
) -> tuple[list[_Result], int]:
    """``times`` of forward and backward, by tokens, come from the first variant."""
    rows: list[_Result] = []
    training: _Training | None = None
    numel = 0
    for tokens in sorted(shape.tokens, reverse=True):
        row: _Result = {"tokens": tokens, "variant": name}
        rows.append(row)
        try:
            if training is None:
                training = _Training(shape, optimizer_of)
                numel = sum(p.numel() for p in training.model.parameters())
            batches = _batches(shape, tokens, training.device)
            row.update(_timed_steps(training.step, training.finish, batches, training.device))
            if tokens not in times:
                times[tokens] = _passes(training, batches)
            row.update(_against_bound(training, times[tokens], rates, row["ms"]))
        except torch.OutOfMemoryError:
            row["error"] = "does not fit into the device's memory"
            training = None
            _free(context("bench gpu").device)
    return rows, numel


def _against_bound(
    training: _Training, passes: tuple[float, float], rates: Rates, taken: float
) -> dict[str, float]:
    forward, backward = passes
    bound = 1e3 * least_seconds(training.units(), forward, backward, rates)
    found = {
        "forward ms": 1e3 * forward,
        "backward ms": 1e3 * backward,
        "bound ms": bound,
        "of bound": taken / bound,
        "staging GiB": getattr(training.optimizer, "staging_bytes", 0) / _GIB,
    }
    if isinstance(training.optimizer, AdamOffloadOptimizer):
        found["fraction"] = training.optimizer.resident_fraction
    return found


def _batches(shape: Shape, tokens: int, device: torch.device) -> list[Tensor]:
    if tokens % shape.seq:
        raise ValueError(f"tokens: expected multiples of the sequence length {shape.seq}, got {tokens}")
    generator = torch.Generator().manual_seed(tokens)
    size = (tokens // shape.seq, shape.seq + 1)
    return [torch.randint(shape.vocab, size, generator=generator).to(device) for _ in range(shape.repeat + 2)]


def _timed_steps(
    step: Callable[[Tensor], Tensor],
    finish: Callable[[], None],
    batches: Sequence[Tensor],
    device: torch.device,
) -> _Result:
    """Milliseconds of a step after another one: includes the remaining updates of that step, but not its own."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses = [step(batch) for batch in batches[:2]]
    wait_for(device)
    begin = time.perf_counter()
    losses += [step(batch) for batch in batches[2:]]
    wait_for(device)
    taken = (time.perf_counter() - begin) / len(batches[2:])
    finish()
    peak = torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else 0.0
    return {"ms": 1e3 * taken, "peak GiB": peak, "losses": [float(loss) for loss in losses]}


def _passes(training: _Training, batches: Sequence[Tensor]) -> tuple[float, float]:
    """Median seconds of a forward and of a backward with clipping, with no update in flight."""
    forwards, backwards = [], []
    for batch in batches:
        times = [time.perf_counter()]
        loss = training.forward(batch)
        wait_for(training.device)
        times.append(time.perf_counter())
        training.backward(loss)
        wait_for(training.device)
        times.append(time.perf_counter())
        forwards.append(times[1] - times[0])
        backwards.append(times[2] - times[1])
    training.manager.zero_grad()
    return statistics.median(forwards), statistics.median(backwards)


def _have_same_bits(shape: Shape) -> bool:
    """Whether variants that must agree have the same weights after a few steps of two layers.

    By the plain attention: the backward of fused ones adds in another order in each run.
    """
    small = shape._replace(layers=2, tokens=(shape.seq,))
    found: list[list[Tensor]] = []
    for name in _SAME:
        training = _Training(small, _OURS[name])
        with sdpa_kernel(SDPBackend.MATH):
            for batch in _batches(small, shape.seq, training.device):
                training.step(batch)
        training.finish()
        found.append([value.cpu() for value in training.model.state_dict().values()])
        del training
        _free(context("bench gpu").device)
    return all(all(map(torch.equal, values, found[0])) for values in found)


def _measure_deepspeed(shape: Shape, device: torch.device) -> list[_Result]:
    """ZeRO-2 with ``offload_optimizer``, which is how DeepSpeed offloads where parameters fit."""
    row: _Result = {"variant": "deepspeed"}
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError:
        return [{**row, "error": "deepspeed is not installed"}]
    try:
        with _launched_alone():
            return _measure_engine(shape, device, deepspeed)
    except Exception as error:  # an error of another library: the other results remain
        return [{**row, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}]


@contextmanager
def _launched_alone() -> Iterator[None]:
    """Sets up what DeepSpeed requires: a process group, and a launcher's variable."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    known = os.environ.get("LOCAL_RANK")
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        yield
    finally:
        if known is None:
            del os.environ["LOCAL_RANK"]


def _measure_engine(shape: Shape, device: torch.device, deepspeed: Any) -> list[_Result]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    rows = []
    for tokens in sorted(shape.tokens, reverse=True):
        torch.manual_seed(0)
        with torch.device(device):
            model: Any = GPT(shape.layers, shape.dim, shape.heads, shape.vocab, shape.seq)
        model.layers = nn.ModuleList([checkpoint_wrapper(layer) for layer in model.layers])
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config={
                "train_micro_batch_size_per_gpu": tokens // shape.seq,
                "bf16": {"enabled": True},
                "gradient_clipping": _CLIP,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "zero_optimization": {
                    "stage": 2,
                    "overlap_comm": True,
                    "offload_optimizer": {"device": "cpu", "pin_memory": True},
                },
            },
        )

        def step(batch: Tensor, engine: Any = engine) -> Tensor:
            loss: Tensor = engine(batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        batches = _batches(shape, tokens, device)
        rows.append(
            {
                "tokens": tokens,
                "variant": "deepspeed",
                **_timed_steps(step, lambda: wait_for(device), batches, device),
            }
        )
        del engine, model, step
        _free(device)
    return rows


def _free(device: torch.device) -> None:
    gc.collect()  # models are in cycles, and the next one needs the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()


_COLUMNS = ("ms", "bound ms", "of bound", "forward ms", "backward ms", "fraction", "peak GiB", "staging GiB")


def print_offload(found: _Result) -> None:
    """A table of the result of `measure_offload`."""
    from .._tools.table import print_table

    rates = ", ".join(f"{name.replace('_', ' ')} {rate:.1f}" for name, rate in found["rates"].items())
    print(f"  {found['parameters'] / 1e6:.1f} million parameters; GB/s: {rates}; {found['threads']} threads")
    rows = []
    for row in sorted(found["results"], key=lambda row: row.get("tokens", 0)):
        figures = [f"{row[name]:.2f}" if name in row else "-" for name in _COLUMNS]
        rows.append([f"{row.get('tokens', '')} {row['variant']}".strip(), *figures])
    print_table(["tokens, variant", *_COLUMNS], rows)
    for row in found["results"]:
        if "error" in row:
            print(f"  {row.get('tokens', '')} {row['variant']}: {row['error']}")
    agree = "the same, bit for bit" if found["same bits"] else "NOT THE SAME"
    print(f"  weights of {', '.join(_SAME)}: {agree}", flush=True)
