"""The options of train.py."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from typing import Any, NoReturn, TypeAlias

import torch
from data import VOCAB_SIZE

__all__ = [
    "DTYPES",
    "SCHEDULERS",
    "layout_options",
    "model_options",
    "parse_options",
    "refuse",
    "run_options",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p")
SCHEDULERS = ("cosine", "noam", "linear", "exponential", "no-decay")

_Group: TypeAlias = "argparse._ArgumentGroup"  # argparse has no other name for it

# What a step's loss depends on, apart from the text and the number of ranks; equal in a resumed run. The learning rate
# and the bound of the norm may change: a run that ended in NaN continues with smaller ones.
_DECIDES_LOSS = (
    "num_layers",
    "dim_model",
    "num_heads",
    "dim_head",
    "dim_ff",
    "untied",
    "experts",
    "dtype",
    "batch_size",
    "seq_len",
    "seed",
    "optimizer",
    "scheduler",
    "warmup",
    "weight_decay",
    "loss_scale",
    "offload",
)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        description="Train a GPT-2 on bytes of text, sharded over all ranks of the launcher.",
        formatter_class=Help,
    )
    _add_model(parser.add_argument_group("model"))
    _add_training(parser.add_argument_group("training"))
    _add_memory(parser.add_argument_group("memory"))
    _add_layout(parser.add_argument_group("layout of the ranks, which changes speed and memory only"))
    _add_files(parser.add_argument_group("files"))
    options = parser.parse_args(arguments)
    if options.dim_head is None:
        if options.dim_model % options.num_heads:
            parser.error(
                f"--num-heads: expected a divisor of --dim-model {options.dim_model}, or --dim-head as well, "
                f"got {options.num_heads}"
            )
        options.dim_head = options.dim_model // options.num_heads
    options.dim_ff = options.dim_ff or 4 * options.dim_model
    for name, size in (("seq_len", options.sp), ("num_heads", options.sp), ("experts", options.ep)):
        if getattr(options, name) % size:
            parser.error(
                f"--{name.replace('_', '-')}: expected a multiple of {size}, the ranks that divide it, got "
                f"{getattr(options, name)}"
            )
    return options


def _add_model(model: _Group) -> None:
    model.add_argument("--num-layers", type=_positive, default=4, help="transformer blocks")
    model.add_argument("--dim-model", type=_positive, default=128, help="width")
    model.add_argument("--num-heads", type=_positive, default=4, help="attention heads")
    model.add_argument("--dim-head", type=_positive, help="default: dim-model / num-heads")
    model.add_argument("--dim-ff", type=_positive, help="default: 4 dim-model")
    model.add_argument("--untied", action="store_true", help="give the output head a weight of its own")
    model.add_argument("--experts", type=int, default=0, help="of each layer, instead of one feed-forward")
    model.add_argument("--dtype", choices=DTYPES, default="fp32", help="on a CPU prefer bf16 to fp16")


def _add_training(training: _Group) -> None:
    training.add_argument("--steps", type=_positive, default=1000, help="optimizer steps")
    training.add_argument("--batch-size", type=_positive, default=8, help="samples in a step, all ranks")
    training.add_argument("--seq-len", type=_positive, default=256, help="bytes in a sample")
    training.add_argument(
        "--optimizer", choices=("adam", "muon"), default="adam", help="muon: for the matrices of the layers"
    )
    training.add_argument("--lr", type=_not_negative, default=2e-3, help="learning rate after warm-up")
    training.add_argument("--scheduler", choices=SCHEDULERS, default="cosine", help="of the learning rate")
    training.add_argument("--warmup", type=int, default=50, help="steps until --lr is reached")
    training.add_argument("--weight-decay", type=_not_negative, default=0.0, help="decoupled from Adam")
    training.add_argument("--clip", type=_not_negative, default=1.0, help="bound of the gradient's norm")
    training.add_argument("--loss-scale", type=float, default=2.0**15, help="first loss scale, for fp16")
    training.add_argument("--seed", type=int, default=0, help="of weights and of the order of samples")


def _add_memory(memory: _Group) -> None:
    memory.add_argument(
        "--zero-level", type=int, choices=(2, 3), default=3, help="2: keep parameters until backward"
    )
    memory.add_argument("--no-recompute", action="store_true", help="keep activations for backward")
    memory.add_argument("--offload", action="store_true", help="optimizer state in host memory")
    places = memory.add_mutually_exclusive_group()
    places.add_argument(
        "--parameters",
        choices=("device", "host"),
        default="device",
        help="where a GPU's blocks keep parameters, gradients and state",
    )
    places.add_argument(
        "--disk", metavar="FOLDER", help="keep parameters, gradients and state of the blocks on this drive"
    )
    memory.add_argument(
        "--state-dtype", choices=("fp32", "bf16", "int8"), default="fp32", help="of the moments"
    )


def _add_layout(layout: _Group) -> None:
    layout.add_argument("--sp", type=_positive, default=1, help="ranks that divide a sequence")
    layout.add_argument("--ep", type=_positive, default=1, help="ranks that divide the experts of a layer")
    layout.add_argument("--pipe", type=_positive, default=1, help="stages of a pipeline")
    layout.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline")


def _add_files(files: _Group) -> None:
    files.add_argument(
        "--data", metavar="PATH", help="a file or folder of text; default: Python's standard library"
    )
    files.add_argument("--out", metavar="FOLDER", default="out/gpt2", help="folder for checkpoints and logs")
    files.add_argument("--save-every", type=_positive, default=250, help="steps between checkpoints")
    files.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    files.add_argument(
        "--validate-every",
        type=_positive,
        default=250,
        help="steps between validations; there is one before each checkpoint too",
    )
    files.add_argument("--validation-batches", type=_positive, default=16, help="of one validation")
    files.add_argument("--log-every", type=_positive, default=20, help="steps between lines")
    files.add_argument(
        "--inspect-every", type=_positive, help="steps between tables of parameters and gradients"
    )
    files.add_argument(
        "--tensorboard", action=argparse.BooleanOptionalAction, default=True, help="write events if installed"
    )
    files.add_argument("--wandb", metavar="PROJECT", help="log to this project of Weights & Biases too")
    files.add_argument(
        "--plot",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw loss.png if matplotlib is there",
    )


class Help(argparse.HelpFormatter):
    """Shows the defaults of options that take a value, and N or X for a number."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        names = {int: "N", _positive: "N", float: "X", _not_negative: "X"}
        return names.get(action.type) or super()._get_default_metavar_for_optional(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_shown = action.default not in (None, argparse.SUPPRESS) and action.default is not False
        return text if not is_shown or "default:" in text else f"{text} (default: %(default)s)"


class _Parser(argparse.ArgumentParser):
    """Says in one line, on rank 0, what is wrong; all ranks get the same options."""

    def error(self, message: str) -> NoReturn:
        refuse(self.prog, f"{message} (--help lists all options)")


def refuse(program: str, message: str) -> NoReturn:
    """Ends this rank with status 2, before the ranks have met; rank 0 prints why."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # a launcher ends all ranks as soon as one has failed: rank 0 must have spoken by then
    sys.exit(2)


def model_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of GPT that a checkpoint needs to be read again, with the dtype by its short name."""
    return {
        "num_layers": options.num_layers,
        "vocab_size": VOCAB_SIZE,
        "dim_model": options.dim_model,
        "dim_head": options.dim_head,
        "num_heads": options.num_heads,
        "dim_ff": options.dim_ff,
        "max_distance": options.seq_len,
        "dtype": options.dtype,
        "tied": not options.untied,
        **({"num_experts": options.experts} if options.experts else {}),
    }


def layout_options(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of init_distributed for the layout of the ranks."""
    sizes = {"sp_size": options.sp, "ep_size": options.ep}
    if options.pipe > 1:
        sizes |= {"pipe_size": options.pipe, "num_micro_batches": 2 * options.pipe}
    return sizes


def run_options(options: argparse.Namespace) -> dict[str, Any]:
    """Other values that must be equal for a resumed run to continue as the interrupted one would have."""
    return {name: getattr(options, name) for name in _DECIDES_LOSS}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number from 0, got {text!r}")
    return value
