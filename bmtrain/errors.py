"""Exception classes of the library."""

from __future__ import annotations

__all__ = [
    "BMTrainError",
    "CommunicationError",
    "DiskError",
    "DoesNotFitError",
    "PipelineModeError",
    "RepeatedBlockError",
    "UnevenSplitError",
    "UnreadableFileError",
]


class BMTrainError(RuntimeError):
    """Base class of the errors that are specific to this library."""


class CommunicationError(BMTrainError):
    """A rank has exited, is late, or called another operation than the others.

    The message names the operation, its purpose, its sequence number, the group, this rank, and the rank that did
    not answer. After it the communicator is aborted: every later operation on it fails with the first reason.

    Example::

        try:
            train()
        except bmtrain.errors.CommunicationError as error:
            print(error)  # rank 1 died: connections closed without a word ...
            raise  # this process cannot join the others again: let the launcher start all of them again
    """


class DiskError(BMTrainError):
    """A disk tier has no room, cannot be read or written, or holds other bytes than were written to it.

    The message names the directory, the offset and the cause. Bytes that were read are not used: continue from the last
    checkpoint.
    """


class DoesNotFitError(BMTrainError, ValueError):
    """A plan given to ``init_distributed`` needs more memory than is available."""


class RepeatedBlockError(BMTrainError, ValueError, AssertionError):
    """One Block was given twice where each must be another one (older versions raised AssertionError)."""


class PipelineModeError(BMTrainError, ValueError, AssertionError):
    """A Block was given to a pipeline list without being made for one (older versions raised AssertionError)."""


class UnevenSplitError(BMTrainError, ValueError, AssertionError):
    """A tensor does not divide by the number of ranks (older versions raised AssertionError)."""


class UnreadableFileError(BMTrainError, ValueError):
    """A file is damaged or of another format, or contains objects that would run code when it is read."""
