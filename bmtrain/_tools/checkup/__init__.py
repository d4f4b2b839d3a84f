"""The checks of ``bmtrain doctor``: each finds a fact, or a problem and its remedy."""

from __future__ import annotations

from collections.abc import Iterator

from .drives import check_drive
from .findings import Check, Surroundings
from .machine import (
    check_compiler,
    check_cuda,
    check_extension,
    check_memory,
    check_memory_nodes,
    check_nccl,
    check_port,
    check_processor,
    check_shared_memory,
    check_torch,
    check_transport,
)
from .ranks import check_ranks

__all__ = ["Check", "Surroundings", "check_up"]


def check_up(here: Surroundings) -> Iterator[Check]:
    """Checks everything that training needs. Collective with several ranks."""
    for check in (
        check_torch,
        check_compiler,
        check_extension,
        check_processor,
        check_memory_nodes,
        check_cuda,
        check_nccl,
        check_shared_memory,
        check_transport,
        check_memory,
        check_drive,
        check_port,
    ):
        try:
            yield check(here)
        except Exception as error:  # a check that fails is a finding, not the end of the report
            yield Check(
                check.__name__.removeprefix("check_"), f"{type(error).__name__}: {error}", "report this"
            )
    yield from check_ranks(here.timeout, here.clock)
