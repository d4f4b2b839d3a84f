"""Failing together: an error of one rank becomes the same error on all."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVar

import torch

import bmtrain as bmt

__all__ = ["StopRequest", "UserError", "exit_together", "together"]

T = TypeVar("T")
_MESSAGE_BYTES = 512


class UserError(ValueError):
    """Something that the user gave cannot be used: one sentence, raised by every rank alike."""


def together(action: Callable[[], T], what: str) -> T:
    """Run what a single rank may fail at, such as reading a file; if one does, all raise. Collective.

    Without this, the ranks that did not fail would wait in the next collective for the one that did.

    Args:
        action: does it, on this rank.
        what: put before the message of any error but a UserError, for example the option that it is about.

    Raises:
        UserError: with the message of the first rank that failed.
    """
    problem, result = "", None
    try:
        result = action()
    except UserError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{what}: {error.filename}: {error.strerror or error} (rank {bmt.rank()})"
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = f"{what}: {type(error).__name__}: {error} (rank {bmt.rank()})"
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    if problem:
        text = problem.encode()[:_MESSAGE_BYTES]
        message[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for answer in bmt.distributed.all_gather(message.to(bmt.config["device"])).cpu():
        if answer.any():
            raise UserError(bytes(answer.tolist()).rstrip(b"\0").decode(errors="replace"))
    return result  # type: ignore[return-value]  # no rank had a problem, so there is one


class StopRequest:
    """Whether Ctrl-C was pressed on this rank: the first time it is noted, the second time it interrupts as usual.

    Ranks get it in different places of a step. Each tells the others at the end of its step, and all stop after the
    same one.
    """

    def __init__(self) -> None:
        self.is_made = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_made = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_together(program: str, error: UserError) -> NoReturn:
    """Print the error once and end this rank with status 2. Collective."""
    bmt.print_rank(f"{program}: error: {error}", file=sys.stderr, flush=True)
    bmt.synchronize()  # a launcher ends all ranks as soon as one has failed: rank 0 must have spoken by then
    sys.exit(2)
