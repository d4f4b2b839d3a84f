"""``bmtrain plan``: predicted memory, step time and bottleneck of a training run.

Predicts memory, time and traffic of a training run from the sizes of a model, a machine and the policy of its blocks.
The runtime's own schedule simulates the step on a virtual clock, so overlap is a result and not an assumption.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from .._engine.pipe_schedule import SCHEDULES
from .._tools.table import table
from .._tools.terminal import columns, output_file
from .calibrate import measure_machine
from .decoder import describe_config, gpt2
from .describe import describe_module
from .estimator import estimate
from .machine import MACHINES, Machine
from .model import ModelDescription
from .policy import DISK, TrainingPolicy
from .published import FITTED, compare, fit_constants
from .report import format_plan, format_published
from .scale import draw_scale
from .search import choose_policy, remedies

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = """examples:
  bmtrain plan --layers 40 --dim 5120 --heads 40 --machine a100-80gb --nodes 4 --micro-batch 8
  bmtrain plan --config config.json --machine h100-80gb --choose
  bmtrain plan --module train.py:build --machine h200-141gb --json plan.json
  bmtrain plan --published
--module names a function without arguments that returns a model (build it under torch.device("meta")) and its
inputs: (model, input, ...)."""


_NUMBERS = ("layers", "dim", "heads", "dim_head", "vocab")
_DEFAULTS = {
    "layers": 24,
    "dim": 2048,
    "heads": 16,
    "vocab": 50257,
    "machine": "a100-80gb",
    "schedule": "gpipe",
}
_Group: TypeAlias = "argparse._ArgumentGroup"  # argparse has no other name for it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the options of ``plan``."""
    parser.epilog = EPILOG
    _add_model(parser.add_argument_group("model (a GPT-2 by numbers unless --config or --module is given)"))
    _add_machine(parser.add_argument_group("machine"))
    policy = parser.add_argument_group("policy")
    for add in (_add_policy, _add_places, _add_steps, _add_ranks):
        add(policy)
    _add_output(parser.add_argument_group("output"))


def _add_model(model: _Group) -> None:
    model.add_argument("--layers", type=int, default=_DEFAULTS["layers"], help="number of layers")
    model.add_argument("--dim", type=int, default=_DEFAULTS["dim"], help="width")
    model.add_argument("--heads", type=int, default=_DEFAULTS["heads"], help="attention heads")
    model.add_argument("--dim-head", type=int, help="width of a head (default: dim / heads)")
    model.add_argument("--vocab", type=int, default=_DEFAULTS["vocab"], help="size of the vocabulary")
    model.add_argument("--seq", type=int, help="tokens per sample (default: 1024)")
    model.add_argument("--config", type=Path, help="a Hugging Face config.json instead")
    model.add_argument("--module", metavar="FILE:FUNCTION", help="a module instead, see below")
    model.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="dtype of the parameters (default: a module's own; else float32 with --compute-dtype or "
        "--gather-dtype, bfloat16 without)",
    )


def _add_machine(machine: _Group) -> None:
    machine.add_argument("--machine", default=_DEFAULTS["machine"], metavar="NAME", help=", ".join(MACHINES))
    machine.add_argument(
        "--here", action="store_true", help="measure this machine with --devices ranks (default: 2) instead"
    )
    machine.add_argument("--nodes", type=int, help="number of nodes (default: the preset's)")
    machine.add_argument("--devices", type=int, help="devices per node (default: the preset's)")
    machine.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=NUMBER",
        help="replace a number of the machine (bytes, bytes/s, FLOP/s, s), e.g. network_bandwidth=25e9; "
        "may be repeated",
    )


def _add_policy(policy: _Group) -> None:
    policy.add_argument(
        "--micro-batch", type=int, help="samples per device (default: as in --module's inputs, else 1)"
    )
    policy.add_argument("--level", type=int, default=3, choices=(0, 1, 2, 3), help="ZeRO level")
    policy.add_argument("--zero-size", type=int, help="devices that shard a block (default: all)")
    recompute = policy.add_mutually_exclusive_group()
    recompute.add_argument("--no-recompute", action="store_true", help="keep all activations")
    recompute.add_argument(
        "--selective", action="store_true", help="recompute all but matrix products and attention"
    )
    policy.add_argument(
        "--compute-dtype", choices=("float16", "bfloat16"), help="dtype of compute, over fp32 parameters"
    )
    policy.add_argument(
        "--gather-dtype", choices=("float16", "bfloat16"), help="dtype of sent fp32 parameters"
    )
    policy.add_argument(
        "--optimizer", choices=("adam", "muon"), default="adam", help="for matrices in blocks"
    )
    policy.add_argument(
        "--offload", type=float, default=0.0, metavar="F", help="share of the optimizer on the host, 0 to 1"
    )


def _add_places(policy: _Group) -> None:
    policy.add_argument(
        "--parameters",
        choices=("device", "host"),
        default="device",
        help="where GPUs keep parameters, gradients and state of blocks (default: device)",
    )
    policy.add_argument(
        "--host-share",
        type=float,
        metavar="F",
        help="share of the blocks on the host, in place of --parameters host",
    )
    policy.add_argument(
        "--disk",
        nargs="*",
        choices=DISK,
        metavar="WHAT",
        help="keep these of blocks on drives: optimizer, gradients, parameters (default: all three)",
    )
    policy.add_argument(
        "--disk-share", type=float, default=1.0, metavar="F", help="share of the blocks that do (default: 1)"
    )
    policy.add_argument(
        "--tier-directory",
        action="append",
        metavar="DIR",
        help="on a drive to measure for --disk; may be repeated (default: the current directory)",
    )


def _add_steps(policy: _Group) -> None:
    policy.add_argument(
        "--state-dtype",
        choices=("float32", "bfloat16", "int8"),
        help="dtype of Adam's moments",
        default="float32",
    )
    policy.add_argument("--survive", action="store_true", help="with the copies that survive=1 keeps")
    policy.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    policy.add_argument(
        "--vertical", action="store_true", help="a block takes all of these before the next block"
    )


def _add_ranks(policy: _Group) -> None:
    policy.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    policy.add_argument("--sp", type=int, default=1, help="ranks that divide a sequence, by heads")
    policy.add_argument("--ep", type=int, default=1, help="ranks that hold the experts of a layer together")
    policy.add_argument("--pipe", type=int, default=1, help="pipeline stages")
    policy.add_argument(
        "--schedule", choices=SCHEDULES, default=_DEFAULTS["schedule"], help="pipeline schedule"
    )
    policy.add_argument(
        "--num-micro-batches",
        type=int,
        metavar="M",
        help="micro-batches of a pipeline pass (default: --pipe)",
    )
    policy.add_argument(
        "--reduce",
        choices=("direct", "hosts", "ring"),
        help="how gradients are summed (default: by hosts where there are several, else directly)",
    )
    policy.add_argument(
        "--choose",
        action="store_true",
        help="find the fastest level, recomputation, offload and micro-batch; blocks "
        "are on the host where nothing else fits",
    )


def _add_output(output: _Group) -> None:
    output.add_argument("--json", type=output_file, help="write the plan to this file as well")
    output.add_argument(
        "--published", action="store_true", help="compare with the published 13B table instead"
    )
    output.add_argument(
        "--scale",
        type=Path,
        metavar="DIR",
        help="draw scaling curves from 1 to 4,096 devices of --machine in this folder instead",
    )
    output.add_argument(
        "--fit", action="store_true", help="with --published: fit its two constants again (15 s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan. Returns 1 if it does not fit, 2 for an option that makes no sense, else 0."""
    try:
        return _run(arguments)
    except (ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of the output has seen enough
            raise
        print(f"bmtrain plan: {_in_options(str(error))}", file=sys.stderr)
        return 2


def _in_options(message: str) -> str:
    """An error of the planner with options in place of the arguments of its functions."""
    names = {field.name: field.name for field in dataclasses.fields(TrainingPolicy)}
    names |= {f"{name}_size": name for name in ("tp", "pipe", "sp", "ep")}
    names |= {"num_layers": "layers", "num_heads": "heads", "dim_model": "dim", "dim_head": "dim_head"}
    names |= {"vocab_size": "vocab", "seq_len": "seq", "config": "config"}

    def option(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        if name not in names:
            return found[0]
        return f"--{names[name].replace('_', '-')}" + (f" {value}" if value else "")

    # The first word, words with underscores and those with a value; "parameters" may be a word of the sentence.
    return re.sub(r"(^\w+(?=[: ])|\b\w+_\w+|\b\w+(?==\S))(?:='?(\w+)'?)?", option, message)


def _run(arguments: argparse.Namespace) -> int:
    _refuse_unused(arguments)
    if arguments.published:
        fit = fit_constants() if arguments.fit else FITTED
        cells = compare(fit)
        print(format_published(cells, fit))
        _write(arguments.json, {"fit": dataclasses.asdict(fit), "cells": [vars(cell) for cell in cells]})
        return 0
    if arguments.scale is not None:
        machine = _machine(arguments)
        if not arguments.scale.is_dir():
            raise ValueError(
                f"--scale: expected a folder that exists, for the pictures, got {str(arguments.scale)!r}"
            )
        drawn = draw_scale(arguments.scale, machine)
        print("\n".join(drawn) if columns() is None else _aligned(drawn))
        return 0
    model, micro_batch = _model(arguments)
    policy = _policy(arguments, micro_batch)
    _require_wide(model, policy)
    if arguments.tier_directory and not (policy.disk and arguments.here):
        raise ValueError("--tier-directory: expected --disk and --here, to measure the drives that it names")
    machine = _machine(arguments, policy.compute_dtype or _stored_in(model, arguments))
    plan = choose_policy(model, machine, policy) if arguments.choose else None
    if arguments.choose and plan is None:
        print("no level, recomputation, offload or micro-batch makes it fit; the closest is:")
        policy = dataclasses.replace(policy, micro_batch=1, level=3, recompute=True, offload=1.0)
    plan = plan or estimate(model, machine, policy)
    changes = remedies(plan)
    print(format_plan(plan, changes))
    _write(arguments.json, {**plan.as_dict(), "remedies": changes})
    return 0 if plan.fits else 1


def _policy(arguments: argparse.Namespace, micro_batch: int) -> TrainingPolicy:
    """The policy of the options, most of which have the names of its fields; ``micro_batch``: of the model's inputs."""
    names = {field.name for field in dataclasses.fields(TrainingPolicy)}
    choices: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name in names}
    choices |= {name: _dtype(choices[name]) for name in names if name.endswith("_dtype")}
    choices |= {f"{name}_size": getattr(arguments, name) for name in ("tp", "sp", "ep", "pipe")}
    choices |= {"host_share": 1.0} if arguments.host_share is None else {"parameters": "host"}
    choices["recompute"] = "selective" if arguments.selective else not arguments.no_recompute
    choices["disk"] = () if arguments.disk is None else tuple(arguments.disk) or DISK
    if arguments.micro_batch is None:
        choices["micro_batch"] = micro_batch
    return TrainingPolicy(**choices)


def _refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuses options without an effect beside others: the plan would not be of what they say."""
    model = (*_NUMBERS, "seq", "config", "module", "dtype", "micro_batch")
    machine = ("machine", "here", "nodes", "devices", "set")
    for applies, reason, names in (
        (arguments.published, "--published: has its own model and machine", (*model, *machine, "scale")),
        (arguments.scale is not None, "--scale: draws models of its own (1.3B to 1T)", (*model, "json")),
        (arguments.config is not None, "--config: has the numbers of the model", (*_NUMBERS, "module")),
        (arguments.module is not None, "--module: builds the model and its inputs", (*_NUMBERS, "seq")),
        (arguments.here, "--here: measures this machine", ("machine", "nodes")),
        (not arguments.published, "without --published", ("fit",)),
        (arguments.pipe == 1, "without --pipe", ("schedule", "num_micro_batches")),
    ):
        given = [f"--{name.replace('_', '-')}" for name in names if _is_given(arguments, name)]
        if applies and given:
            raise ValueError(f"{reason}; leave out {', '.join(given)}")


def _is_given(arguments: argparse.Namespace, name: str) -> bool:
    value = getattr(arguments, name)
    return value not in (None, False, []) and value != _DEFAULTS.get(name)


def _aligned(markdown: Sequence[str]) -> str:
    """A Markdown table aligned for a terminal, its titles in two lines."""
    title, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown]
    above, _, below = zip(*(cell.rpartition(" ") for cell in title), strict=True)
    return table(above, [below, *rows])


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n")


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _stored_in(model: ModelDescription, arguments: argparse.Namespace) -> torch.dtype:
    """The dtype of the parameters of blocks. For a module only their width is known: 16 bits count as bf16."""
    sizes = [buffer.element_size for block in model.blocks for buffer in block.buffers]
    return _dtype(arguments.dtype) or (torch.bfloat16 if sizes[:1] == [2] else torch.float32)


def _require_wide(model: ModelDescription, policy: TrainingPolicy) -> None:
    """Refuses dtypes without an effect."""
    if any(buffer.element_size == 4 for block in model.blocks for buffer in block.buffers):
        return
    for option, dtype in (("--compute-dtype", policy.compute_dtype), ("--gather-dtype", policy.gather_dtype)):
        if dtype is not None:
            raise ValueError(
                f"{option}: acts on blocks of fp32 parameters, and {model.name} has none (--dtype)"
            )


def _machine(arguments: argparse.Namespace, dtype: torch.dtype | None = None) -> Machine:
    if arguments.here:
        directories = [] if arguments.disk is None else arguments.tier_directory or ["."]
        machine = measure_machine(arguments.devices or 2, dtype, directories)
    elif arguments.machine in MACHINES:
        preset = MACHINES[arguments.machine]
        machine = preset.sized(num_nodes=arguments.nodes, devices_per_node=arguments.devices)
    else:
        raise ValueError(f"--machine: expected one of {', '.join(MACHINES)}, got {arguments.machine!r}")
    numbers = {f.name for f in dataclasses.fields(Machine) if f.type == "float"}
    for change in arguments.set:
        name, _, value = change.partition("=")
        if name not in numbers:
            raise ValueError(f"--set: expected one of {', '.join(sorted(numbers))}, got {name!r}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"--set {change}: expected FIELD=NUMBER, such as {name}=25e9") from None
        try:
            replacement: dict[str, Any] = {name: number}
            machine = dataclasses.replace(machine, **replacement)
        except ValueError as error:
            raise ValueError(f"--set {change}: {error}") from None
    return machine


def _model(arguments: argparse.Namespace) -> tuple[ModelDescription, int]:
    """The model, and the micro-batch of its inputs."""
    narrows = arguments.compute_dtype or arguments.gather_dtype
    dtype = _dtype(arguments.dtype) or (torch.float32 if narrows else torch.bfloat16)
    if arguments.config is not None:
        try:
            config = json.loads(arguments.config.read_text())
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"--config: {arguments.config} is not JSON ({error})") from None
        if not isinstance(config, dict):
            raise ValueError(f"--config: expected a configuration (an object of JSON) in {arguments.config}")
        return describe_config(config, seq_len=arguments.seq, dtype=dtype), 1
    if arguments.module is not None:
        if arguments.dtype is not None:
            raise ValueError("--dtype: a module has its parameters' own, convert it in its function")
        model, *inputs = _build(arguments.module)
        described = describe_module(model, *inputs)
        first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        return described, first.shape[0]
    numbers = gpt2(
        arguments.layers,
        arguments.dim,
        arguments.heads,
        dim_head=arguments.dim_head,
        vocab_size=arguments.vocab,
        seq_len=arguments.seq or 1024,
        dtype=dtype,
    )
    return numbers, 1


def _build(place: str) -> Any:
    """Calls ``FUNCTION`` of ``FILE:FUNCTION``."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"--module: expected FILE:FUNCTION of a file that exists, got {place!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"--module: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"--module: {path} has no function {name!r}")
    built = getattr(module, name)()
    leaves = tree_leaves(built[1:]) if isinstance(built, tuple | list) else []
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        got = type(built).__name__
        raise ValueError(f"--module: expected {name}() to return (model, input, ...), got {got}")
    return built
