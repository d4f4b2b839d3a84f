"""Activations that wait on the host: what is moved, how often, and that it changes nothing else.

On CPU ranks there is no other memory to move to: a mover that copies within the host stands for a device's.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import run_ranks

import bmtrain as bmt
from bmtrain._engine.engine import current_engine
from bmtrain.global_var import context

LAYERS, DIM, ROWS = 3, 8, 4
INPUT = ROWS * DIM * 4


class CopyingMover:
    """Counts what is moved; what it gives back is NaN until somebody has waited for it."""

    device_type = "cpu"
    least_bytes = 1

    def __init__(self) -> None:
        self.out: list[int] = []
        self.back: list[int] = []
        self.gathered: list[torch.Tensor] = []

    def to_host(self, memory: torch.Tensor) -> torch.Tensor:
        self.out.append(memory.nbytes)
        return memory.clone()

    def to_device(self, memory: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        self.back.append(memory.nbytes)
        back = torch.full_like(memory, 0xFF)
        return back, lambda: back.copy_(memory)


@contextmanager
def moving():
    engine = current_engine(context())
    engine.mover = mover = CopyingMover()
    try:
        yield mover
    finally:
        engine.mover = None


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.up = bmt.nn.Linear(DIM, 2 * DIM)
        self.down = bmt.nn.Linear(2 * DIM, DIM)
        self.register_buffer("scale", torch.full((DIM,), 0.5))

    def forward(self, x, mask):
        wide = self.up(x)
        one, two = torch.tanh(wide).chunk(2, dim=-1)  # two views of one piece of memory
        return x * self.scale + mask * self.down(torch.cat([one * two, two], dim=-1))


def model_of(**policy: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    with bmt.default_policy(bmt.BlockPolicy(**policy)):
        layers = bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(LAYERS)])
    bmt.init_parameters(layers)
    return layers


def passes(layers: torch.nn.Module, times: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(bmt.rank())
    x = torch.randn(ROWS, DIM, generator=generator).requires_grad_()
    out = layers(x, torch.rand(ROWS, DIM, generator=generator))
    for number in range(times):
        out.square().sum().backward(retain_graph=number + 1 < times)
    return [out.detach().clone(), x.grad, *(param.grad.clone() for param in layers.parameters())]


def moved_and_not(policy: dict[str, Any]) -> tuple[list[int], list[int]]:
    wanted = [passes(model_of(**policy), times) for times in (1, 2)]
    with moving() as mover:
        layers = model_of(offload_activations=True, **policy)
        found = passes(layers)
        out, back = list(mover.out), list(mover.back)
        layers.zero_grad()
        again = passes(model_of(offload_activations=True, **policy), 2)
    for one, other in zip((*found, *again), (*wanted[0], *wanted[1]), strict=True):
        assert torch.equal(one, other)
    return out, back


@pytest.mark.parametrize(
    ("recompute", "moved"),
    # Of each layer its input; the results of both maps; what autograd saves: the input, tanh's result, of which the
    # halves are views, and what the last map takes.
    [
        ("whole", [INPUT]),
        ("selective", [INPUT, 2 * INPUT, INPUT]),
        ("off", [INPUT, 2 * INPUT, 2 * INPUT]),
    ],
)
@pytest.mark.parametrize("level", [3, 2])
def test_each_is_moved_once_each_way_and_nothing_changes(
    level: int, recompute: str, moved: list[int]
) -> None:
    for out, back in run_ranks(2, moved_and_not, {"level": level, "recompute": recompute}):
        assert sorted(out) == sorted(LAYERS * moved)
        assert sorted(back) == sorted(out)


class Gates(bmt.DistributedModule):
    """The gates of torch's GRU cell: chunks of one storage, each with a version of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = bmt.nn.Linear(DIM, 3 * DIM)

    def forward(self, x, mask):
        reset, update, new = self.up(x).unsafe_chunk(3, dim=-1)
        reset = reset.add_(x).sigmoid_()
        update = update.add_(mask).sigmoid_()
        new = new.add_(reset * x).tanh_()
        return (x - new) * update + new


class WritesToData(Layer):
    def forward(self, x, mask):
        kept = torch.exp(x)
        once = kept * mask
        kept.data.mul_(2)
        return self.down(torch.cat([once, kept[:, :DIM] * mask], dim=-1))


class Phases(bmt.DistributedModule):
    """Saves views of complex numbers whose signs are in a bit of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up = bmt.nn.Linear(DIM, 2 * DIM)

    def forward(self, x, mask):
        z = torch.view_as_complex(self.up(x).view(ROWS, DIM, 2))
        conjugate = torch.view_as_complex(torch.stack([x, mask], dim=-1)).conj()
        return (z * conjugate).real + conjugate.imag * z.imag


def written_without_a_version(layer: type[torch.nn.Module], recompute: str) -> None:
    found = []
    for offloads in (False, True):
        with moving():
            torch.manual_seed(0)
            policy = bmt.BlockPolicy(recompute=recompute, offload_activations=offloads)
            block = bmt.Block(layer(), policy=policy)
            bmt.init_parameters(block)
            found.append(passes(block))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("recompute", ["whole", "selective", "off"])
@pytest.mark.parametrize("layer", [Gates, WritesToData, Phases])
def test_unusual_views_come_back_as_they_were(layer: type[torch.nn.Module], recompute: str) -> None:
    run_ranks(1, written_without_a_version, layer, recompute)


def memory_that_is_left(recompute: str) -> None:
    with moving():
        layers = model_of(offload_activations=True, recompute=recompute)
        x = torch.randn(ROWS, DIM, requires_grad=True)
        seen: list[weakref.ref[Any]] = []
        layers[1].register_forward_hook(lambda block, args, out: seen.append(weakref.ref(args[0])))
        before = torch.ones(())
        out = layers(x * before, before)
        gc.collect()
        assert seen[0]() is None
        report = bmt.memory_report()
        assert report.offloaded >= LAYERS * INPUT
        assert report.activations == (None if recompute == "off" else before.nbytes)
        out.sum().backward()
        assert bmt.memory_report().offloaded == 0


@pytest.mark.parametrize("recompute", ["whole", "off"])
def test_nothing_is_left_on_the_device(recompute: str) -> None:
    # The report counts all calls of the process, also those that an earlier test may have left.
    run_ranks(1, memory_that_is_left, recompute, fresh=True)


class WritesLater(Layer):
    def forward(self, x, mask):
        kept = torch.exp(x)
        result = kept * mask
        kept.add_(1)
        return result


class WritesItsInput(Layer):
    def forward(self, x, mask):
        return x.add_(1) * mask


def refused() -> None:
    with moving():
        policy = bmt.BlockPolicy(recompute="off", offload_activations=True)
        x = torch.ones(ROWS, DIM, requires_grad=True)
        out = bmt.Block(WritesLater(), policy=policy)(x, torch.ones(()))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        with pytest.raises(RuntimeError, match="modified in place after the block's forward started"):
            bmt.Block(WritesItsInput(), policy=policy)(x * 1, torch.ones(()))


def test_what_is_written_to_is_refused_as_ever() -> None:
    run_ranks(1, refused)


def on_cpu_ranks() -> None:
    layers = model_of(offload_activations=True)
    passes(layers)
    assert bmt.memory_report().offloaded == 0


def test_on_cpu_ranks_there_is_nowhere_to_move_to() -> None:
    run_ranks(1, on_cpu_ranks)
