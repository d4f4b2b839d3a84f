"""Host time of one Block around a module that does next to nothing, less the time of the module alone.

In the same turns, what torch itself takes for the same structure: one ``torch.autograd.Function`` whose forward is a
graph of its own, differentiated in its backward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..block_layer import Block
from ..layer import DistributedModule
from ..parameter import DistributedParameter

_CALLS = 200


class _Little(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _LittlePlain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ends: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        ctx.ends = ends
        return ends[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        leaf, out = ctx.ends
        torch.autograd.backward(out, gradient)
        return None, leaf.grad


class _GraphInside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(x)  # type: ignore[no-any-return]
        leaf = x.detach().requires_grad_()
        return _Node.apply((leaf, self.inner(leaf)), x)  # type: ignore[no-any-return]


def host_cost(turns: int) -> dict[str, dict[str, float]]:
    """Seconds that ``block`` and ``torch`` add to a call in ``evaluation``, a ``forward`` and a ``backward``.

    The least of all turns of each: a busy machine only adds.
    """
    modules: dict[str, list[Any]] = {
        "block": [Block(_Little(), use_checkpoint=False) for _ in range(_CALLS)],
        "torch": [_GraphInside(_LittlePlain()) for _ in range(_CALLS)],
        "alone": [_LittlePlain() for _ in range(_CALLS)],
    }
    least = {name: _turn(chain) for name, chain in modules.items()}
    for _ in range(turns):
        for name, chain in modules.items():
            least[name] = {what: min(least[name][what], took) for what, took in _turn(chain).items()}
    return {
        name: {what: (took - least["alone"][what]) / _CALLS for what, took in least[name].items()}
        for name in ("block", "torch")
    }


def _turn(chain: Sequence[nn.Module]) -> dict[str, float]:
    with torch.no_grad():
        evaluation, _ = _timed_forward(chain, torch.ones(1))
    forward, result = _timed_forward(chain, torch.ones(1, requires_grad=True))
    begin = time.perf_counter()
    result.backward()
    return {"evaluation": evaluation, "forward": forward, "backward": time.perf_counter() - begin}


def _timed_forward(chain: Sequence[nn.Module], x: Tensor) -> tuple[float, Tensor]:
    begin = time.perf_counter()
    for module in chain:
        x = module(x)
    return time.perf_counter() - begin, x
