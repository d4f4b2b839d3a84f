"""Agreement of ranks: values as JSON from one rank to all, and errors raised by every rank alike."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from .. import errors
from .._base.aside import Aside
from .._C import Communicator, ReduceOp
from .comm import wire_device
from .context import context
from .messages import broadcast_bytes, gather_bytes

T = TypeVar("T")

_PULSE = 5.0  # seconds between two signs of life while a rank works


def broadcast_json(value: T, root: int = 0, label: str = "", comm: Communicator | None = None) -> T:
    """The JSON value of rank ``root`` of ``comm`` on every rank; tuples arrive as lists. Collective."""
    comm = comm or context().world.comm
    if comm.size == 1:
        return value
    data = json.dumps(value).encode() if comm.rank == root else None
    received = broadcast_bytes(data, root, comm, label)
    return value if comm.rank == root or received is None else json.loads(received)


def gather_json(value: T, label: str, comm: Communicator) -> list[T]:
    """The JSON values of all ranks of ``comm``, in rank order; tuples arrive as lists. Collective."""
    return [json.loads(data or b"") for data in gather_bytes(json.dumps(value).encode(), comm, label)]


def largest(numbers: Sequence[Any], label: str, comm: Communicator | None = None) -> list[Any]:
    """The largest of each number, or flag, over the ranks of ``comm``. Collective."""
    comm = comm or context().world.comm
    if comm.size == 1 or not numbers:
        return list(numbers)
    found = torch.tensor(numbers, device=wire_device(comm))
    found = found.to(torch.uint8) if found.dtype is torch.bool else found
    comm.all_reduce(found, ReduceOp.MAX, label).wait()
    result: list[Any] = found.tolist()
    return result


def _raise_together(error: Exception | None, label: str, comm: Communicator) -> None:
    """Raises the error of the lowest rank that has one on every rank, with equal class and text. Collective.

    Follows every step that a single rank can fail, before the next collective.
    """
    if comm.size > 1:
        device = wire_device(comm)
        flags = torch.empty(comm.size, dtype=torch.uint8, device=device)
        mine = torch.tensor([error is not None], device=device).to(torch.uint8)
        comm.all_gather(flags, mine, label).wait()
        failed = flags.nonzero().flatten().tolist()
        if not failed:
            return
        own = describe_error(error) if error is not None else None
        told: Any = broadcast_json(own, failed[0], label, comm)
        if told != own:
            raise rebuild_error(told) from (None if own and own["class"] == told["class"] else error)
    if error is not None:
        raise error


@contextmanager
def failing_together(label: str, comm: Communicator | None = None) -> Iterator[None]:
    """Encloses code that may fail on a single rank; at its end all ranks, of ``comm``, raise the error. Collective."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    try:
        _raise_together(problem, label, comm or context().world.comm)
    except errors.CommunicationError as lost:  # a rank has raised its error before all have heard it
        raise lost from lost.__cause__


def on_rank_0(function: Callable[[], T], label: str = "") -> T | None:
    """Calls ``function`` on rank 0, however long it takes, while the others wait. Collective.

    Returns its result on rank 0, None elsewhere; all ranks raise its error.
    """
    return on_all_ranks(function if context().world.comm.rank == 0 else _nothing, label)


def _nothing() -> None: ...


def on_all_ranks(function: Callable[[], T], label: str = "") -> T:
    """Calls ``function``, which does not communicate, on every rank, however long it takes on some. Collective.

    An error of any rank is raised by all, when all are done.
    """
    current = context()
    comm = current.world.comm
    if comm.size == 1:
        return function()
    job = Aside(function, "bmtrain-job")
    pulse = min(_PULSE, current.timeout / 4)
    while any(largest([not job.wait(pulse)], label, comm)):
        pass  # a sign of life: no wait is longer than the group's timeout
    with failing_together(label):
        job.result()
    return job.result()


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as JSON, from which :func:`rebuild_error` restores it on another rank."""
    args = list(error.args)
    if isinstance(error, OSError) and error.filename is not None:
        args = [error.errno, error.strerror, str(error.filename)]
    if not all(isinstance(arg, (str, int, float, type(None))) for arg in args):
        args = [str(error)]
    return {"class": type(error).__name__, "args": args, "text": str(error)}


def rebuild_error(told: dict[str, Any]) -> Exception:
    """The error that was described, of the same class and text where the class is known here."""
    name, text = told["class"], told["text"]
    for namespace in (builtins, errors, torch):
        known = getattr(namespace, name, None)
        if isinstance(known, type) and issubclass(known, Exception):
            error = known(*told["args"])
            if str(error) == text:
                return error
    return RuntimeError(f"{name}: {text}")
