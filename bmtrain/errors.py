"""The errors of the library that are not plain ValueError or TypeError."""

from __future__ import annotations

__all__ = [
    "BMTrainError",
    "CommunicationError",
    "DoesNotFitError",
    "PipelineModeError",
    "RepeatedBlockError",
    "UnevenSplitError",
    "UnreadableFileError",
]


class BMTrainError(RuntimeError):
    """What every error that is specific to this library derives from."""


class CommunicationError(BMTrainError):
    """A rank is gone, late, or did something else than the others.

    The message names the operation, what it served, its sequence number, the group, this rank, and the rank that did
    not answer. After it the communicator is aborted: every later operation on it fails with the first reason.

    Example::

        try:
            train()
        except bmtrain.errors.CommunicationError as error:
            print(error)  # rank 1 died: connections closed without a word ...
            raise  # this process cannot join the others again: let the launcher start all of them anew
    """


class DoesNotFitError(BMTrainError, ValueError):
    """A plan given to ``init_distributed`` needs more memory than there is."""


class RepeatedBlockError(BMTrainError, ValueError, AssertionError):
    """One Block was given twice where each must be another one (older versions raised AssertionError)."""


class PipelineModeError(BMTrainError, ValueError, AssertionError):
    """A Block was given to a pipeline list without being made for one (older versions raised AssertionError)."""


class UnevenSplitError(BMTrainError, ValueError, AssertionError):
    """A tensor does not divide by the number of ranks (older versions raised AssertionError)."""


class UnreadableFileError(BMTrainError, ValueError):
    """A file is not what it should be, or holds something that would run code when it is read."""
