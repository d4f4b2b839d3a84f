"""Every argument of the collectives with every wrong kind: a typed error that names the argument, and no crash.

One table: a valid call of each function; every argument in turn is replaced by what its kind does not admit. The same
under ``python -O``, where assertions are gone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_process, run_ranks

import bmtrain as bmt
from bmtrain import _C

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
    "a tensor": {"None": lambda _: None, "a list": lambda _: [1.0], "a number": lambda _: 1.0},
    "number": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "a list": lambda _: [1],
        "negative": lambda _: -1.0,
        "NaN": lambda _: math.nan,
    },
    "optional number": {"a string": lambda _: "1", "a list": lambda _: [1], "negative": lambda _: -1.0},
    "scale": {"None": lambda _: None, "a string": lambda _: "1", "a list": lambda _: [1]},
    "count": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "a fraction": lambda _: 1.5,
        "negative": lambda _: -1,
    },
    "integer": {"None": lambda _: None, "a string": lambda _: "1", "a fraction": lambda _: 1.5},
    "betas": {
        "None": lambda _: None,
        "a number": lambda _: 0.9,
        "one": lambda _: (0.9,),
        "too large": lambda _: (0.9, 1.0),
        "strings": lambda _: ("a", "b"),
    },
    "norm": {"None": lambda _: None, "unknown": lambda _: [2], "zero": lambda _: 0, "negative": lambda _: -2},
    "level": {"None": lambda _: None, "unknown": lambda _: 4, "a string": lambda _: "3"},
    "unknown level": {"unknown": lambda _: 4, "a string": lambda _: "3"},
    "mode": {"None": lambda _: None, "unknown": lambda _: "PART"},
    "module": {"None": lambda _: None, "a tensor": lambda _: torch.ones(2), "a function": lambda _: len},
    "modules": {"None": lambda _: None, "a name": lambda _: "model", "a list of names": lambda _: ["model"]},
    "parameters": {
        "None": lambda _: None,
        "a number": lambda _: 1.0,
        "with their names": lambda _: torch.nn.Linear(2, 2).named_parameters(),
    },
    "callable": {"a name": lambda _: "zeros_", "a tensor": lambda x: torch.ones(2)},
    "optimizer": {"None": lambda _: None, "a module": lambda _: torch.nn.Linear(2, 2)},
    "optional scheduler": {"a number": lambda _: 0.1},
    "sequence": {"None": lambda _: None, "a number": lambda _: 3, "too few": lambda _: [1.0]},
    "leaf": {
        "None": lambda _: None,
        "integers": lambda x: x.long(),
    },
    "comm": {"a string": lambda _: "world", "a number": lambda _: 3},
}


def table() -> dict[str, tuple[Callable[..., Any], dict[str, tuple[str, Any]]]]:
    """Function -> its arguments in order: kind, and a value that is right."""
    comm, d, n = bmt.config["comm"], bmt.distributed, bmt.nccl
    any_comm = ("comm", comm)
    return {
        **optimizers(),
        **others(),
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


def optimizers() -> dict[str, tuple[Callable[..., Any], dict[str, tuple[str, Any]]]]:
    """Of constructors only what is checked there."""
    parameters = [torch.nn.Parameter(torch.ones(3))]
    numbers = dict.fromkeys(("lr", "eps", "weight_decay", "hold_steps"), ("number", 0.1))
    hyper = {"lr": numbers["lr"], "betas": ("betas", (0.9, 0.99)), **numbers}
    made: dict[str, tuple[Callable[..., Any], dict[str, tuple[str, Any]]]] = {
        kind.__name__: (lambda *values, kind=kind: kind(parameters, *values), hyper)
        for kind in (bmt.optim.AdamOptimizer, bmt.optim.AdamOffloadOptimizer)
    }
    made["OptimManager"] = (
        lambda *values: bmt.optim.OptimManager(*values[:6], accumulate=values[6]),
        {
            "loss_scale": ("optional number", 8.0),
            "loss_scale_factor": ("number", 2.0),
            "loss_scale_steps": ("scale", 10),
            "min_loss_scale": ("number", 1.0),
            "max_loss_scale": ("scale", 1e9),
            "grad_scale": ("optional number", 1.0),
            "accumulate": ("count", 1),
        },
    )
    made["clip_grad_norm"] = (
        bmt.optim.clip_grad_norm,
        {
            "param_groups": ("parameters", parameters),
            "max_norm": ("number", 1.0),
            "scale": ("number", 1.0),
            "norm_type": ("norm", 2),
        },
    )
    made["OptimManager.add_optimizer"] = (
        bmt.optim.OptimManager().add_optimizer,
        {
            "optimizer": ("optimizer", torch.optim.SGD(parameters, lr=1.0)),
            "lr_scheduler": ("optional scheduler", None),
        },
    )
    return made


def others() -> dict[str, tuple[Callable[..., Any], dict[str, tuple[str, Any]]]]:
    """Blocks, virtual shards, results of ranks, checkpoints, and a sum of the core."""
    shard = bmt.virtual.VirtualShard(0, 2)
    return {
        "BlockPolicy": (bmt.BlockPolicy, {"level": ("level", 3)}),
        "Block": (
            lambda *values: bmt.Block(bmt.nn.Linear(2, 2), zero_level=values[0], mode=values[1]),
            {"zero_level": ("unknown level", 3), "mode": ("mode", "BLOCK")},
        ),
        "BMTrainModelWrapper": (
            lambda model: bmt.BMTrainModelWrapper(model),
            {"model": ("module", torch.nn.Linear(2, 2))},
        ),
        "DistributedParameter": (
            lambda method: bmt.DistributedParameter(X, init_method=method),
            {"init_method": ("callable", torch.nn.init.zeros_)},
        ),
        "ParameterInitializer": (bmt.ParameterInitializer, {"func": ("callable", torch.nn.init.zeros_)}),
        "init_parameters": (bmt.init_parameters, {"module": ("modules", torch.nn.Linear(2, 2))}),
        "VirtualShard.of": (shard.of, {"batch": ("sequence", [1, 2])}),
        "sum_loss": (bmt.sum_loss, {"loss": ("a tensor", X)}),
        "gather_result": (bmt.gather_result, {"x": ("a tensor", X)}),
        "checkpoint.prune": (
            lambda keep: bmt.distributed.checkpoint.prune("nothing-here", keep),
            {"keep": ("count", 1)},
        ),
        "TreeSum.push": (lambda leaf: _C.TreeSum().push(leaf), {"leaf": ("leaf", X)}),
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
