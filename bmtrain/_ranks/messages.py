"""Messages whose size the receivers do not know: bytes, and tensors behind a header."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .._C import Communicator
from .comm import wire_device

#: What a header can describe.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool)  # fmt: skip
MAX_DIMS = 30


def broadcast_bytes(data: bytes | None, root: int, comm: Communicator, label: str) -> bytes | None:
    """The ``data`` of rank ``root`` on every rank, which may be None. Collective."""
    size = torch.tensor([-1 if data is None else len(data)], device=wire_device(comm))
    comm.broadcast(size, root, label).wait()
    length = int(size.item())
    if length < 0:
        return None
    buffer = _buffer(data if comm.rank == root else None, length, size.device)
    comm.broadcast(buffer, root, label).wait()
    return _bytes_of(buffer)


def gather_bytes(data: bytes | None, comm: Communicator, label: str) -> list[bytes | None]:
    """The ``data`` of every rank, in rank order; if it is None on a rank, nothing but that is exchanged. Collective."""
    mine = torch.tensor([-1 if data is None else len(data)], device=wire_device(comm))
    sizes = mine.new_empty(comm.size)
    comm.all_gather(sizes, mine, label).wait()
    lengths: list[int] = sizes.tolist()
    if min(lengths) < 0:
        return [None if length < 0 else b"" for length in lengths]
    buffers = [_buffer(data if rank == comm.rank else None, n, mine.device) for rank, n in enumerate(lengths)]
    for work in [comm.broadcast(buffer, rank, label) for rank, buffer in enumerate(buffers)]:
        work.wait()
    return [_bytes_of(buffer) for buffer in buffers]


def _buffer(data: bytes | None, length: int, device: torch.device) -> Tensor:
    if data:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    return torch.empty(length, dtype=torch.uint8, device=device)


def _bytes_of(buffer: Tensor) -> bytes:
    host = buffer.cpu()
    return ctypes.string_at(host.data_ptr(), host.numel())


def header_of(tensor: Tensor | None, device: torch.device) -> Tensor:
    """Shape and dtype of a tensor as a small one, which travels before it; of None, a place to receive a header."""
    values = [] if tensor is None else [tensor.dim(), DTYPES.index(tensor.dtype), *tensor.shape]
    return torch.tensor(values + [0] * (2 + MAX_DIMS - len(values)), dtype=torch.int64, device=device)


def read_header(header: Tensor) -> tuple[torch.Size, torch.dtype]:
    """The shape and dtype in a header that was received."""
    dims, dtype, *sizes = header.tolist()
    return torch.Size(sizes[:dims]), DTYPES[dtype]
