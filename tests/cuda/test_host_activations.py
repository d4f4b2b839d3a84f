"""Activations of a GPU that wait in the host's memory."""

from __future__ import annotations

import pytest
import torch

from bmtrain._engine.host_activations import CudaMover, HostActivations

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_memory_is_free_meanwhile_and_values_come_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    activations = HostActivations("block", CudaMover(device), lambda tensor: False, ())
    x = torch.randn(1024, 1024, device=device)
    wanted = (x * 2).cpu()
    doubled = x * 2
    packed = [activations.put(doubled), activations.put(doubled[1:].t())]
    assert activations.nbytes == doubled.nbytes  # once, whatever views there are
    torch.cuda.synchronize()
    with_it = torch.cuda.memory_allocated(device)
    del doubled
    assert torch.cuda.memory_allocated(device) <= with_it - wanted.nbytes
    busy = torch.ones(4096, 4096, device=device)
    for _ in range(20):  # what others do with the memory does not reach the copies
        busy = busy @ busy / 4096
        torch.full((1024, 1024), 7.0, device=device)
    activations.bring_back()
    whole, part = (activations.take(one) for one in packed)
    assert torch.equal(whole.cpu(), wanted)
    assert torch.equal(part.cpu(), wanted[1:].t())
    activations.drop(for_good=True)
    assert activations.nbytes == 0
