"""Warnings, each given once."""

from __future__ import annotations

import os
import warnings

# Keys already warned about. Process-wide on purpose: "once" means once for the whole program, whatever
# warning filters are active (a filter of "always" would otherwise repeat a warning every step).
_seen: set[str] = set()


def warn_once(
    key: str, message: str, stacklevel: int = 2, category: type[Warning] = DeprecationWarning
) -> None:
    """Issues a warning the first time that ``key`` is seen in this process; of an old spelling on rank 0 alone.

    ``stacklevel`` counts frames as :func:`warnings.warn` does: 1 is the line that calls ``warn_once``, 2 (default) is
    its caller, normally the user's line.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     for _ in range(3):
    ...         warn_once("doctest.old", "old() is deprecated: use new()")
    >>> len(caught)
    1
    """
    if key in _seen or (category is DeprecationWarning and os.environ.get("RANK", "0") != "0"):
        return
    _seen.add(key)
    warnings.warn(message, category, stacklevel=stacklevel + 1)


def was_given(key: str) -> bool:
    """Whether :func:`warn_once` has seen ``key``."""
    return key in _seen
