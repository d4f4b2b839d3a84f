"""``bmtrain doctor``: checks of an installation before training, with a remedy for each problem.

Checks torch, compiler, core, processor, devices, NCCL, shared memory, memory and port, connects the ranks, and tries a
collective and an Adam step. Under a launcher (torchrun -m bmtrain doctor) every rank reports.

With --gpus it tests the GPUs instead: kernels against the CPU's, collectives with known results, training against plain
torch, on one rank for each GPU of this host, or on the ranks of the launcher.
"""

from __future__ import annotations

import argparse
import importlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from .._base.said import print_whole
from .._ranks import context as _context
from .checkup import Check, Surroundings, check_up
from .checkup.gpus import prove, run_on_all_gpus
from .terminal import columns, fold

PACKAGE = "bmtrain"

#: Objects: where one lives, and after each "=" another path under which it is the same; with a dot at its end, of the
#: same name there. Paths are below the package.
_OBJECTS = (
    # launch and state
    "init_distributed=init. init.is_initialized init.topology config=global_var. rank=global_var. "
    "world_size=global_var. synchronize=synchronize. sum_loss=synchronize. wait_loader=synchronize. "
    "gather_result=synchronize. print_rank=utils. print_block=utils. print_dict=utils. see_memory=utils. "
    "load_nccl_pypi=utils. __version__ "
    # models
    "DistributedParameter=parameter.=layer.=nn. ParameterInitializer=parameter. parameter.OpAllGather "
    "DistributedModule=layer.=nn. init_parameters=param_init. grouped_parameters=param_init. "
    "Block=CheckpointBlock=block_layer.=block_layer.CheckpointBlock TransformerBlockList=block_layer. "
    "block_layer.round_up=utils. block_layer.storage_type_cuda PipelineTransformerBlockList=pipe_layer. "
    "BMTrainModelWrapper=wrapper. wrapper.make_distributed wrapper.model_wrapper_dispatch "
    "checkpoint=checkpointing. zero_context.ZeroContext=block_layer.CheckpointBlockContext "
    # files
    "save=store. load=store. store.DistributedStateDictWrapper store.DistributedTensorWrapper "
    "store.DTYPE_LIST store._save_to_rank0 store._save_to_local_rank0 store._save_to_infer_model "
    "store.allgather_object store.allgather_objects store.broadcast_object "
    # training
    "optim.AdamOptimizer=optim.adam. optim.AdamOffloadOptimizer=optim.adam_offload. "
    "optim.OptimManager=optim.optim_manager. optim.clip_grad_norm=optim.clip_grad. "
    "optim.optim_manager.check_overflow optim.optim_manager.grad_rescale optim_step=backward. "
    "lr_scheduler.WarmupLRScheduler=lr_scheduler.warmup.=lr_scheduler.WarmupLRSchduler "
    "lr_scheduler.Noam=lr_scheduler.noam. lr_scheduler.Linear=lr_scheduler.linear. "
    "lr_scheduler.Cosine=lr_scheduler.cosine. lr_scheduler.Exponential=lr_scheduler.exponential. "
    "lr_scheduler.NoDecay=lr_scheduler.no_decay. loss.FusedCrossEntropy=loss.cross_entropy. "
    "loss._function.has_inf_nan "
    # collectives
    "distributed.all_reduce=distributed.ops. distributed.all_gather=distributed.ops. "
    "distributed.broadcast=distributed.ops. distributed.reduce_scatter=distributed.ops. "
    "distributed.send_activations=distributed.ops. distributed.recv_activations=distributed.ops. "
    "nccl.send=distributed.ops.ncclSend nccl.recv=distributed.ops.ncclRecv "
    "nccl.allGather=distributed.ops.ncclAllGather nccl.allReduce=distributed.ops.ncclAllReduce "
    "nccl.broadcast=distributed.ops.ncclBroadcast nccl.reduceScatter=distributed.ops.ncclReduceScatter "
    "nccl.reduce nccl.groupStart nccl.groupEnd nccl.commCount nccl.commRank nccl.getUniqueId "
    "nccl.commInitRank nccl.commDestroy nccl.NCCLCommunicator nccl.dtype2nccl nccl.op2nccl "
    # layers
    "nn.Linear=nn.linear. nn.OpLinear=nn.linear. nn.ColumnParallelLinear=nn.column_parallel_linear. "
    "nn.RowParallelLinear=nn.row_parallel_linear. nn.VPEmbedding=nn.parallel_embedding. "
    "nn.OpParallelLinear=nn.parallel_linear_func. nn.parallel_linear_func.ReduceType nn.Projection "
    "nn.VPProjection "
    # looking into a run
    "inspect.inspect_model=inspect.model. inspect.inspect_tensor=inspect.tensor. "
    "inspect.record_tensor=inspect.tensor. inspect.format_summary=inspect.format. "
    "inspect.tensor.InspectTensor inspect.tensor.InspectTensorManager benchmark.all_gather "
    "benchmark.reduce_scatter benchmark.send_recv utils.AverageRecorder utils.check_torch_version "
    "utils.tp_split_tensor debug.set debug.get debug.append debug.extend debug.clear "
)


def _paths(entry: str) -> tuple[str, str]:
    """Returns where an object lives, and its other paths."""
    home, *others = entry.split("=")
    name = home.rpartition(".")[2]
    return home, " ".join(other + name * other.endswith(".") for other in others)


API = dict(map(_paths, _OBJECTS.split()))

#: Modules that ``import bmtrain`` alone makes reachable as attributes of the package.
MODULES = [
    "nccl",
    "distributed",
    "nn",
    "optim",
    "inspect",
    "lr_scheduler",
    "loss",
    "store",
    "utils",
    "debug",
    "benchmark",
    "init",
    "layer",
    "block_layer",
    "pipe_layer",
    "parameter",
    "wrapper",
    "global_var",
]

#: Paths that can be imported as modules, beyond those in which the objects above were found.
IMPORTABLE = ("nccl.enums", "hook_func")

#: Seconds in which ranks have to meet, by default. GPUs' have to load their libraries and to connect by NCCL, too.
_TIMEOUT, _TIMEOUT_OF_GPUS = 10.0, 90.0


@dataclass(frozen=True)
class Finding:
    """One row of the table: a path, and its kind or its error."""

    path: str
    resolves_to: str
    problem: str = ""


def check_api() -> Iterator[Finding]:
    """Resolves every documented name, in documented order."""
    package = importlib.import_module(PACKAGE)
    for name in MODULES:
        module = getattr(package, name, None)
        is_module = isinstance(module, ModuleType)
        yield Finding(
            name,
            _describe(module) if is_module else "",
            "" if is_module else "no module after import bmtrain",
        )
    for name in IMPORTABLE:
        yield _resolved(name)[0]
    for home, others in API.items():
        finding, value = _resolved(home)
        yield finding
        for path in others.split():
            other, found = _resolved(path)
            if not (finding.problem or other.problem) and found is not value:
                other = Finding(path, other.resolves_to, f"not the object that {home} is")
            yield other


def _resolved(path: str) -> tuple[Finding, Any]:
    """Finds ``path`` as ``from bmtrain.<module> import <name>`` does, or as a module."""
    module_name, _, name = f"{PACKAGE}.{path}".rpartition(".")
    try:
        module = importlib.import_module(module_name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # an old name is looked at, not used
            if hasattr(module, name):
                value = getattr(module, name)
            else:
                value = importlib.import_module(f"{module_name}.{name}")
    except Exception as error:  # whatever a module raises while it is imported belongs in the table
        return Finding(path, "", f"missing ({type(error).__name__}: {error})"), None
    return Finding(path, _describe(value)), value


def _describe(value: Any) -> str:
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    kind = "class" if isinstance(value, type) else "function" if callable(value) else type(value).__name__
    home = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None)
    return f"{kind} {home}.{name}" if home and name else f"{kind} object"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of the command."""
    parser.add_argument(
        "--api", action="store_true", help="list every documented name and what it resolves to instead"
    )
    parser.add_argument(
        "--tier-directory",
        action="append",
        default=[],
        metavar="DIR",
        help="measure the drive of this directory too; may be repeated",
    )
    parser.add_argument("--gpus", action="store_true", help="test training on all GPUs together instead")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"limit for connecting the ranks (default: {_TIMEOUT:.0f}, with GPUs {_TIMEOUT_OF_GPUS:.0f})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the report. Returns 1 if there is a problem, else 0."""
    if arguments.api:
        return _run_api()
    timeout = arguments.timeout
    if timeout is None:
        timeout = _TIMEOUT_OF_GPUS if torch.cuda.is_available() else _TIMEOUT
    here = Surroundings(timeout=timeout, tier_directories=arguments.tier_directory)
    if not arguments.gpus:
        return run_checks(here)
    if "WORLD_SIZE" in here.environ:
        return run_proof(here)
    return run_on_all_gpus(timeout)


def run_proof(here: Surroundings) -> int:
    """Prints the proof of the ranks' devices and a verdict. Returns 1 if any part fails, else 0."""
    problems = _report(here, prove(here.timeout))
    context = _context.current()
    if context is not None and context.topology.rank == 0:
        devices = f"{context.topology.world_size} x {context.device.type}, {context.backend}"
        print_whole(f"VERDICT: {'NOT proven' if problems else 'proven'} on {devices}", flush=True)
    return 1 if problems else 0


def run_checks(here: Surroundings) -> int:
    """Prints the finding of every check. Returns 1 if there is a problem, else 0."""
    return 1 if _report(here, check_up(here)) else 0


def _report(here: Surroundings, checks: Iterable[Check]) -> int:
    """Prints checks as they complete; returns the number of problems."""
    several = int(here.environ.get("WORLD_SIZE") or 1) > 1
    mark = f"[rank {here.environ.get('RANK', '?')}] " if several else ""
    problems = 0
    for check in checks:
        problems += check.is_problem
        lines = [f"{mark}{'PROBLEM' if check.is_problem else 'ok':<8}{check.name:<15}{check.found}"]
        if check.is_problem:
            lines.append(f"{mark}{'':<8}{'remedy:':<15}{check.remedy}")
        for line in lines:
            print_whole(fold(line, len(mark) + 23, columns()), flush=True)
    print_whole(f"{mark}{problems} problem{'' if problems == 1 else 's'}", flush=True)
    return problems


def _run_api() -> int:
    """Prints the table of names. Returns 1 if anything is missing or is not the object it should be, else 0."""
    findings = list(check_api())
    width = max(len(finding.path) for finding in findings) + len(PACKAGE) + 1
    width = min(width, (columns() or 2 * width) // 2)
    title = f"{'documented name':<{width}}  kind, and defining module"
    print(fold(title, 8, columns()))
    for finding in findings:
        result = f"PROBLEM: {finding.problem}" if finding.problem else finding.resolves_to
        print(fold(f"{PACKAGE + '.' + finding.path:<{width}}  {result}", 8, columns()))
    problems = sum(bool(finding.problem) for finding in findings)
    print(f"{len(findings)} names, {problems} with problems")
    return 1 if problems else 0
