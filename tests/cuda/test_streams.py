"""A training step over a fake device: which stream waits for what, what overlaps, and that the host waits for nothing.

One rank of two runs the library as it is, over the NCCL communicator; the other rank does the same by construction. The
fake device keeps a journal of streams and events, and the model writes into it when it computes.
"""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import bmtrain as bmt
from bmtrain import _C
from bmtrain._model import storage

LAYERS = 4
COMPUTE = "0"  # the caller's stream


class Layer(bmt.DistributedModule):
    def __init__(self, number: int, fake: ctypes.CDLL) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(16, 16) / 8)
        self.number = number
        self.fake = fake

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fake.fake_note(f"compute {self.number}".encode())
        result: torch.Tensor = torch.nn.functional.linear(x, self.weight)
        return result


class WithBuffers(Layer):
    """As layers have them: frequencies of rotary positions, running statistics, masks small and large."""

    def __init__(self, number: int, fake: ctypes.CDLL) -> None:
        super().__init__(number, fake)
        self.norm = torch.nn.BatchNorm1d(16, affine=False)
        self.register_buffer("inv_freq", torch.rand(16))
        self.register_buffer("mask", torch.ones(16, 16).tril())
        self.register_buffer("large_mask", torch.ones(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(super().forward(x * self.inv_freq.cos())) * self.mask[-1]
        return result * self.large_mask[-1, :16]


HOST_WAITS = (
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.cpu,
    torch.Tensor.numpy,
    torch.Tensor.nonzero,
    torch.nonzero,
    torch.equal,
    torch.masked_select,
)


class HostWaits(TorchFunctionMode):
    """Counts calls for which the host would have to wait, if tensors were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOST_WAITS:
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Run:
    """A model, an optimizer and the journal of a step."""

    def __init__(self, fake: ctypes.CDLL, **policy: Any) -> None:
        self.fake = fake
        torch.manual_seed(0)
        self.model = bmt.TransformerBlockList(
            [bmt.Block(Layer(number, fake), **policy) for number in range(LAYERS)]
        )
        self.optimizer = bmt.optim.AdamOptimizer(self.model.parameters(), lr=1e-3)
        self.manager = bmt.optim.OptimManager(loss_scale=None)
        self.manager.add_optimizer(self.optimizer)
        self.x = torch.randn(3, 16)

    def step(self) -> None:
        self.manager.zero_grad()
        loss = self.model(self.x).square().mean()
        self.fake.fake_note(b"backward")
        self.manager.backward(loss)
        self.fake.fake_note(b"step")
        self.manager.clip_grad_norm(self.optimizer.param_groups, max_norm=1.0)
        self.manager.step()

    def journal(self) -> list[str]:
        """Of one step, after those in which the order of calls is learnt."""
        for _ in range(3):
            self.step()
        self.fake.fake_journal()
        self.step()
        text: bytes = self.fake.fake_journal()
        return text.decode().splitlines()


def operations(journal: list[str]) -> list[tuple[int, str, str, int]]:
    """Position, name, stream, and where the caller's stream waits for it, of each operation of NCCL."""
    found = []
    for at, line in enumerate(journal):
        if match := re.fullmatch(r"([A-Z]\w+) on (\d+)", line):
            name, stream = match.groups()
            event = next(
                m[1] for entry in journal[at:] if (m := re.fullmatch(rf"event (\d+) on {stream}", entry))
            )
            waits = [
                n
                for n, entry in enumerate(journal)
                if entry == f"{COMPUTE} waits for event {event}" and n > at
            ]
            assert waits, f"nobody waits for {line} at {at}"
            found.append((at, name, stream, waits[0]))
    return found


def positions(journal: list[str], line: str) -> list[int]:
    return [at for at, entry in enumerate(journal) if entry == line]


@pytest.mark.parametrize(
    "policy",
    [{}, {"recompute": "off"}, {"gather_dtype": torch.bfloat16}],
    ids=["recomputed", "kept", "through bf16"],
)
def test_operations_are_ordered_by_events(one_of_two: ctypes.CDLL, policy: dict[str, Any]) -> None:
    journal = Run(one_of_two, policy=bmt.BlockPolicy(**policy)).journal()
    found = operations(journal)
    gathers = [op for op in found if op[1] == "AllGather"]
    reductions = [op for op in found if op[1] == "Send"]
    assert len(gathers) == 2 * LAYERS - 1
    assert len(reductions) == LAYERS
    streams = {stream for _, _, stream, _ in gathers}, {stream for _, _, stream, _ in reductions}
    assert all(len(of) == 1 and COMPUTE not in of for of in streams)
    assert streams[0] != streams[1]
    for at, name, stream, _ in found:
        # What the caller queued before is waited for, on the device.
        fork = re.fullmatch(rf"{stream} waits for event (\d+)", journal[at - 1])
        assert fork is not None, (name, journal[at - 3 : at + 1])
        assert f"event {fork[1]} on {COMPUTE}" == journal[at - 2]


def test_what_overlaps(one_of_two: ctypes.CDLL) -> None:
    journal = Run(one_of_two, use_checkpoint=True, zero_level=3).journal()
    found = operations(journal)
    gathers = [(at, waited) for at, name, _, waited in found if name == "AllGather"]
    reductions = [(at, waited) for at, name, _, waited in found if name == "Send"]
    computes = [positions(journal, f"compute {number}") for number in range(LAYERS)]
    order = [computes[n][0] for n in range(LAYERS)] + [computes[n][1] for n in reversed(range(LAYERS))]
    assert order == sorted(order)
    # The gather that a block waits for was started before the block in front of it computed.
    ahead = order[: LAYERS - 1] + order[LAYERS:-1]
    for (at, waited), compute in zip(gathers[1:], ahead, strict=True):
        assert at < compute < waited
    # The gradients of a block are waited for when the next block's backward is over, the last when backward ends.
    for (at, waited), compute in zip(reductions[:-1], order[LAYERS + 1 :], strict=True):
        assert at < compute < waited
    assert reductions[-1][1] < positions(journal, "step")[0]


def test_what_overlaps_with_shards_on_the_host(
    one_of_two: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane = _C.HostLane(torch.device("cpu"))
    monkeypatch.setattr(storage, "host_lane_of", lambda *_: lane)
    journal = Run(one_of_two, use_checkpoint=True, zero_level=3).journal()
    works = {line for line in journal if line.startswith("work on ")}
    down, up = sorted(works, key=lambda line: len(positions(journal, line)))
    computes = [positions(journal, f"compute {number}") for number in range(LAYERS)]
    order = [computes[n][0] for n in range(LAYERS)] + [computes[n][1] for n in reversed(range(LAYERS))]
    copies = positions(journal, down)
    assert len(copies) == 2 * LAYERS - 1
    events = [
        re.findall(rf"event (\d+) on {line.split()[-1]}$", "\n".join(journal), re.M) for line in (down, up)
    ]
    # A copy is asked for before the block in front of its own computes, which waits for it when that is over.
    ahead = order[: LAYERS - 1] + order[LAYERS:-1]
    for at, event, compute in zip(copies[1:], events[0][1:], ahead, strict=True):
        assert at < compute < positions(journal, f"{COMPUTE} waits for event {event}")[0]
    # Copies to the host follow the next block's backward, and computation never waits for them.
    sums = positions(journal, up)[1::2]
    assert len(sums) == LAYERS
    assert all(at > compute for at, compute in zip(sums, order[LAYERS + 1 :], strict=False))
    assert not any(f"{COMPUTE} waits for event {event}" in journal for event in events[1])


def test_the_host_waits_for_nothing(one_of_two: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(one_of_two, use_checkpoint=True, zero_level=3)
    run.journal()
    # The CPU's Adam and its factor are read by the host; on a GPU both are kernels.
    with HostWaits() as waits:
        run.step()
    assert waits.seen == []


#: Operators whose result the host reads, whoever calls them: a Python function, autograd, or the core.
READ_BY_THE_HOST = (
    "_local_scalar_dense",
    "is_nonzero",
    "item",
    "nonzero",
    "masked_select",
    "equal",
    "unique_dim",
)


class HostReads(TorchDispatchMode):
    """Notes operators for which the host would wait if tensors were on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in READ_BY_THE_HOST:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "loss_scale", "norm_type", "reads"),
    [
        (torch.float32, None, 2, 0),
        (torch.bfloat16, None, 2, 0),
        (torch.bfloat16, None, "inf", 0),
        (torch.bfloat16, None, None, 0),
        # Whether a gradient overflowed decides about the step and the next scale.
        (torch.float16, 1024.0, 2, 1),
        (torch.float16, 1024.0, None, 1),
    ],
)
def test_what_the_host_reads_in_a_step(
    one_of_two: ctypes.CDLL, dtype: torch.dtype, loss_scale: float | None, norm_type: Any, reads: int
) -> None:
    torch.manual_seed(0)
    model = bmt.TransformerBlockList([bmt.Block(WithBuffers(number, one_of_two)) for number in range(LAYERS)])
    model.to(dtype)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    schedule = bmt.lr_scheduler.Cosine(optimizer, start_lr=1e-3, warmup_iter=2, end_iter=100)
    manager = bmt.optim.OptimManager(loss_scale=loss_scale)
    manager.add_optimizer(optimizer, schedule)
    x = torch.randn(3, 16, dtype=dtype)

    def step() -> None:
        manager.zero_grad()
        manager.backward(model(x).float().square().mean())
        if norm_type is not None:
            manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0, norm_type=norm_type)
        manager.step()

    for _ in range(3):
        step()
    with HostReads() as found:
        step()
    assert len(found.seen) == reads, found.seen
