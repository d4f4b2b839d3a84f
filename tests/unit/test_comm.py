"""Collectives without a launch: errors before init, numbers of NCCL."""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks

import bmtrain
from bmtrain import _C, nccl


def before_init() -> None:
    from bmtrain import benchmark, distributed
    from bmtrain._ranks import objects

    x = torch.ones(4)
    comm = _C.SingleCommunicator("x")
    for call in (
        lambda: distributed.all_reduce(x),
        lambda: distributed.all_gather(x, comm),
        lambda: distributed.broadcast(x, 0),
        lambda: distributed.reduce_scatter(x),
        lambda: distributed.send_activations(x, 0, comm),
        lambda: distributed.recv_activations(0, comm),
        lambda: objects.allgather_objects(1),
        lambda: objects.broadcast_object(1),
        benchmark.all_gather,
    ):
        with pytest.raises(RuntimeError, match="not initialized"):
            call()


def test_before_init() -> None:
    run_ranks(1, before_init, init=False)


def test_single_communicator() -> None:
    comm = _C.SingleCommunicator("alone")
    assert (comm.rank, comm.size, comm.name, comm.backend) == (0, 1, "alone", "single")
    x = torch.arange(4.0)
    out = torch.empty(4)
    comm.all_gather(out, x).wait()
    assert torch.equal(out, x)
    comm.barrier()
    assert comm.traffic() == {"all_gather": (1, 0), "barrier": (1, 0)}
    comm.reset_traffic()
    assert comm.traffic() == {}
    with pytest.raises(bmtrain.errors.CommunicationError, match="nothing was sent"):
        comm.recv(x, 0)
    comm.abort("enough")
    with pytest.raises(bmtrain.errors.CommunicationError, match="enough"):
        comm.barrier()
    comm.close()
    assert comm.closed
    with pytest.raises(RuntimeError, match="closed"):
        comm.all_reduce(x, _C.ReduceOp.SUM)


def test_numbers_of_nccl() -> None:
    assert [nccl.op2nccl(op) for op in ("sum", "prod", "max", "min", "avg")] == [0, 1, 2, 3, 4]
    assert nccl.dtype2nccl(torch.float16) == nccl.ncclHalf == nccl.enums.ncclFloat16 == 6
    assert nccl.dtype2nccl(torch.bool) == nccl.ncclUint8
    with pytest.raises(TypeError, match="complex64"):
        nccl.dtype2nccl(torch.complex64)
    with pytest.raises(ValueError, match="median"):
        nccl.op2nccl("median")


def test_raw_names_in_distributed_ops() -> None:
    from bmtrain.distributed import ops as collectives

    assert collectives.ncclAllReduce is nccl.allReduce
    assert collectives.ncclSend is nccl.send
    assert collectives.all_reduce is bmtrain.distributed.all_reduce
