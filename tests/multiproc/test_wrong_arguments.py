"""Every argument of the collectives with every wrong kind: a typed error that names the argument, and no crash.

One table: a valid call of each function; every argument in turn is replaced by what its kind does not admit. The same
under ``python -O``, where assertions are gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_process, run_ranks

import bmtrain as bmt

X = torch.ones(4)

# What is wrong for a kind of argument: a name, and the value made from the valid one.
WRONG: dict[str, dict[str, Callable[[Any], Any]]] = {
    "tensor": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "a number": lambda _: 1.0,
        "sparse": lambda x: x.to_sparse(),
        "on meta": lambda x: x.to("meta"),
    },
    "buffer": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "not contiguous": lambda x: torch.ones(2 * x.numel())[::2],
        "another size": lambda x: torch.ones(x.numel() + 1),
        "another dtype": lambda x: x.to(torch.float16),
        "on meta": lambda x: x.to("meta"),
    },
    "op": {"None": lambda _: None, "unknown": lambda _: "median", "a number": lambda _: 1},
    "rank": {
        "None": lambda _: None,
        "a string": lambda _: "0",
        "a float": lambda _: 0.5,
        "negative": lambda _: -1,
        "too large": lambda _: 99,
    },
    "comm": {"a string": lambda _: "world", "a number": lambda _: 3},
}


def table() -> dict[str, tuple[Callable[..., Any], dict[str, tuple[str, Any]]]]:
    """Function -> its arguments in order: kind, and a value that is right."""
    comm, d, n = bmt.config["comm"], bmt.distributed, bmt.nccl
    any_comm = ("comm", comm)
    return {
        "all_reduce": (d.all_reduce, {"x": ("tensor", X), "op": ("op", "sum"), "comm": any_comm}),
        "all_gather": (d.all_gather, {"x": ("tensor", X), "comm": any_comm}),
        "broadcast": (d.broadcast, {"src": ("tensor", X), "root": ("rank", 0), "comm": any_comm}),
        "reduce_scatter": (d.reduce_scatter, {"x": ("tensor", X), "op": ("op", "sum"), "comm": any_comm}),
        "nccl.allReduce": (
            n.allReduce,
            {"src": ("buffer", X), "dst": ("buffer", X.clone()), "op": ("op", "sum"), "comm": any_comm},
        ),
        "nccl.broadcast": (
            n.broadcast,
            {"src": ("buffer", X), "dst": ("buffer", X.clone()), "root": ("rank", 0), "comm": any_comm},
        ),
        "nccl.allGather": (
            n.allGather,
            {"src": ("buffer", X), "dst": ("buffer", X.clone()), "comm": any_comm},
        ),
        "nccl.reduceScatter": (
            n.reduceScatter,
            {"src": ("buffer", X), "dst": ("buffer", X.clone()), "op": ("op", "sum"), "comm": any_comm},
        ),
    }


def pairs() -> list[tuple[str, str, str]]:
    """Function, argument, wrong kind: all that there are."""
    return [
        (function, argument, wrong)
        for function, (_, arguments) in table().items()
        for argument, (kind, _) in arguments.items()
        for wrong in WRONG[kind]
    ]


def check_all() -> list[str]:
    """What did not raise as it should, of all pairs."""
    bad = []
    for function, argument, wrong in pairs():
        call, arguments = table()[function]
        values = {name: value for name, (_, value) in arguments.items()}
        kind, right = arguments[argument]
        values[argument] = WRONG[kind][wrong](right)
        where = f"{function}({argument}={wrong})"
        try:
            call(*values.values())
        except (TypeError, ValueError) as error:
            if argument not in str(error):
                bad.append(f"{where}: the message does not name it: {type(error).__name__}: {error}")
        except Exception as error:
            bad.append(f"{where}: {type(error).__name__}: {error}")
        else:
            bad.append(f"{where}: nothing raised")
    for function, (call, arguments) in table().items():  # and all is well afterwards
        call(*(value for _, value in arguments.values()))
        assert function
    return bad


@pytest.mark.parametrize("world", [1])
def test_wrong_arguments_are_named(world: int) -> None:
    for bad in run_ranks(world, check_all):
        assert bad == []


@pytest.mark.slow
def test_without_assertions() -> None:
    folder = Path(__file__).parent
    program = (
        f"import sys; sys.path[:0] = [{str(folder)!r}, {str(folder.parent)!r}, {str(folder.parents[1])!r}]\n"
        "import bmtrain, test_wrong_arguments as t\n"
        "bmtrain.init_distributed()\n"
        "print(len(t.pairs()), t.check_all())\n"
    )
    done = run_process([sys.executable, "-O", "-c", program], timeout=120)
    assert done.stdout.splitlines()[-1].endswith(" []")
