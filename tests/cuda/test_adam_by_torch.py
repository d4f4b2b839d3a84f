"""Where the kernel has not the bits of a torch's multi-tensor Adam, that updates fp32 parameters of a GPU, in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bmtrain.optim import AdamOptimizer
from bmtrain.optim.formulas import adam as formula


class OnGpu(torch.nn.Parameter):
    """A parameter that says so, in the host's memory; of a class that torch does not know, as ours are."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]


@pytest.mark.parametrize(("batch", "expected"), [(1 << 26, 1), (300, 2), (1, 4)])
@pytest.mark.parametrize("hold_steps", [0, 2])
def test_bits_are_those_of_one_call_for_all(
    batch: int, expected: int, hold_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, Any]] = []
    adam = formula.torch_adam

    def counted(params: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        calls.append((len(params), kwargs["foreach"]))
        adam(params, *args, **kwargs)

    monkeypatch.setattr(formula, "torch_adam", counted)
    monkeypatch.setattr(formula, "_kernel_has_torchs_bits", lambda device: False)
    monkeypatch.setattr(formula, "_BATCH", batch)
    start = [torch.randn(size) for size in (200, 100, 250, 7)]
    ours = [OnGpu(x.clone()) for x in start]
    theirs = [torch.nn.Parameter(x.clone()) for x in start]
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.01}
    optimizer = AdamOptimizer(ours, hold_steps=hold_steps, **options)
    reference = torch.optim.Adam(theirs, foreach=True, **options)
    for step in range(1, 5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        reference.param_groups[0]["lr"] = 0.0 if step <= hold_steps else 0.1
        calls.clear()
        optimizer.step()
        reference.step()
        assert len(calls) == expected and sum(number for number, _ in calls) == 4
        assert all(foreach is True for _, foreach in calls)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p.detach(), q.detach())
