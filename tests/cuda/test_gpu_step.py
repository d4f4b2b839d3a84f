"""Training on a GPU: against CPU ranks, over NCCL, without host waits, and under random delays of every stream."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from harness import free_port, run_process, run_ranks
from harness.fake_nccl import ROOT
from torch import Tensor

import bmtrain as bmt
from bmtrain import _C
from bmtrain._engine.engine import Engine
from bmtrain._engine.host_activations import CudaMover
from bmtrain._ranks import context as _context
from bmtrain._ranks.comm_nccl import find_candidates
from bmtrain._ranks.context import Context, Group
from bmtrain._ranks.streams import Streams
from bmtrain.topology import GroupKind, Topology

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SCRIPT = Path(__file__).with_name("gpu_script.py")
SCHEDULES = 1000


def losses(num_ranks: int, on_gpu: bool, *arguments: str) -> list[float]:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", "NVIDIA_TF32_OVERRIDE": "0"}
    if on_gpu:
        environment["BMTRAIN_BACKEND"] = "gloo" if num_ranks > 1 else "nccl"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = [
        "-m",
        "torch.distributed.run",
        f"--nproc_per_node={num_ranks}",
        f"--master_port={free_port()}",
    ]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), SCRIPT, *arguments]
    output = run_process(command, environment=environment, directory=ROOT, timeout=200).stdout
    found: list[float] = json.loads(next(line for line in output.splitlines() if line.startswith("[")))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_losses_are_those_of_cpu_ranks(num_ranks: int) -> None:
    on_cpu, on_gpu = (losses(num_ranks, on_gpu) for on_gpu in (False, True))
    assert on_cpu[-1] < 0.9 * on_cpu[0]
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_offload_changes_no_bit(num_ranks: int) -> None:
    expected = losses(num_ranks, True, "bfloat16")
    for fraction in ("0", "0.5", "1"):
        assert losses(num_ranks, True, "bfloat16", fraction) == expected


def trained(offload: bool, recompute: str) -> tuple[list[Tensor], int]:
    """Weights after a few steps with dropout, and the bytes of activations on the host between forward and backward."""
    torch.manual_seed(3)
    policy = bmt.BlockPolicy(offload_activations=offload, recompute=recompute)
    with bmt.default_policy(policy):
        model = bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(3)])
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    generator = torch.Generator().manual_seed(bmt.rank())
    device, most = bmt.config["device"], 0
    for _ in range(4):
        manager.zero_grad()
        with patch.object(CudaMover, "least_bytes", 1):
            loss = model(torch.randn(16, 64, generator=generator).to(device)).square().mean()
        most = max(most, bmt.memory_report().offloaded)
        manager.backward(loss)
        manager.step()
    return [x.cpu() for x in model.state_dict().values()], most


@pytest.mark.parametrize("recompute", ["whole", "selective", "off"])
def test_activations_on_the_host_change_no_bit(recompute: str) -> None:
    where = {"cuda": True, "environment": {"BMTRAIN_BACKEND": "gloo"}}
    expected = run_ranks(2, trained, False, "off", **where)
    for (values, most), (others, _) in zip(
        run_ranks(2, trained, True, recompute, **where), expected, strict=True
    ):
        assert most >= 2 * 16 * 64 * 4  # the batch stays, as nothing is computed from its gradient
        assert all(map(torch.equal, values, others))


@pytest.fixture
def nccl() -> Iterator[_C.NcclCommunicator]:
    """The real NCCL with one rank."""
    library = _C.NcclLibrary(find_candidates())
    device = torch.device("cuda", torch.cuda.current_device())
    comm = _C.NcclCommunicator(library, library.make_unique_id(), 0, 1, "zero", device, 60.0)
    yield comm
    comm.close()
    with pytest.raises(RuntimeError, match="is closed"):
        comm.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nccl_of_one_rank(nccl: _C.NcclCommunicator, dtype: torch.dtype) -> None:
    x = torch.randn(1000, device="cuda").to(dtype)
    out = torch.empty_like(x)
    total = _C.ReduceOp.SUM
    torch.cuda.set_sync_debug_mode("error")
    try:
        for run in (
            lambda: nccl.all_gather(out, x),
            lambda: nccl.all_to_all(out, x),
            lambda: nccl.reduce_scatter(out, x, total),
            lambda: nccl.all_reduce(out.copy_(x), total),
            lambda: nccl.broadcast(out, 0),
        ):
            run().wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, x)
    nccl.barrier()


class Layer(bmt.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, self.weight))
        return torch.nn.functional.dropout(hidden, 0.1 if x.dtype == torch.float32 else 0.0)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """This process as rank 0 of 2 on the GPU, over an NCCL whose other rank does the same, with delays."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        pytest.skip("no CUDA toolkit")
    path = tmp_path / "libmirror.so"
    places = [f"-I{CUDA_HOME}/include", f"-L{CUDA_HOME}/lib64"]
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-fPIC", "-shared", "-Icsrc", *places]
    source = "tests/cuda/fake/mirror_nccl.cpp"
    subprocess.run([*command, source, "-o", str(path), "-lcudart"], cwd=ROOT, check=True, timeout=120)
    monkeypatch.setenv("BMTRAIN_NCCL_LIBRARY", str(path))
    monkeypatch.setenv("BMTRAIN_POISON_BUFFERS", "1")
    library = _C.NcclLibrary([])
    device = torch.device("cuda", torch.cuda.current_device())
    names = ("zero", "zero.reduce")
    world = [
        _C.NcclCommunicator(library, library.make_unique_id(), 0, 2, name, device, 60.0) for name in names
    ]
    place = Topology(0, 2, 1, 1)
    groups = {}
    for kind in GroupKind:
        members = place.members(kind)
        pair = world if len(members) == 2 else [_C.SingleCommunicator(kind.value) for _ in range(2)]
        number = place.get_group_id(kind)
        groups[kind.value] = Group(
            kind.value, pair[0], pair[1], place.get_group_rank(kind), len(members), number
        )
    streams = Streams.for_device(device)
    _context.install(Context(place, device, "nccl", 0, 2, 60.0, 0, groups, Engine(device), streams=streams))
    yield ctypes.CDLL(str(path))
    _context.uninstall()


def train(mirror: ctypes.CDLL, steps: int, delay: int, serially: bool) -> tuple[list[Tensor], Engine]:
    torch.manual_seed(0)
    model = bmt.TransformerBlockList([bmt.Block(Layer()) for _ in range(4)]).to(torch.bfloat16)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-3)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    for step in range(steps):
        mirror.mirror_delays(delay, step)
        if not serially and step == 5:
            torch.cuda.set_sync_debug_mode("error")
        manager.zero_grad()
        loss = model(x).float().square().mean()
        if serially:
            torch.cuda.synchronize()
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        if serially:
            torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    context = _context.current()
    assert context is not None
    return [p.detach().clone() for p in model.parameters()], context.engine


def test_random_delays_change_no_bit_and_the_host_waits_for_nothing(mirror: ctypes.CDLL) -> None:
    expected, engine = train(mirror, SCHEDULES, 0, serially=True)
    found, _ = train(mirror, SCHEDULES, 200, serially=False)
    assert engine.pool.stats()["peak_buffers_in_use"] > 1
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
        assert x.isfinite().all()
