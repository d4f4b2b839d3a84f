"""Train a GPT-2 on text, sharded over all ranks.

    torchrun --nproc_per_node 2 example/train.py --steps 300          (or: bash example/run.sh)

It runs on CPU ranks and on GPUs, and without a launcher on one rank.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from agree import StopRequest, UserError, exit_together, together
from checkpoint import load_checkpoint, save_checkpoint
from data import Batch, Sampler, load_corpus, validation_batches
from logbook import Logbook, prepare
from models import GPT
from options import DTYPES, layout_options, model_options, parse_options, refuse, run_options
from pace import Pace, peak_memory

import bmtrain as bmt
from bmtrain.distributed import checkpoint


def main() -> None:
    options = parse_options()

    # Part 1: initialise BMTrain. Every rank runs this script; each keeps a shard of the model.
    try:
        bmt.init_distributed(
            seed=options.seed, tier_directories=options.disk and [options.disk], **layout_options(options)
        )
    except ValueError as error:  # the options do not fit the number of ranks, which have not met yet
        refuse("train.py", str(error))
    try:
        train(options)
    except UserError as error:  # raised by all ranks alike
        exit_together("train.py", error)


def train(options: argparse.Namespace) -> None:
    # Part 2: the model, and the data it learns from.
    model = make_model(options)
    corpus = load_corpus(options.data)
    sampler = Sampler(corpus.train, options.seq_len, options.batch_size, options.seed)
    held_out = validation_batches(
        corpus.validation, options.seq_len, options.batch_size, options.validation_batches
    )

    # Part 3: the loss, the optimizer and the learning rate.
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    optimizer = make_optimizer(options, model)
    lr_scheduler = make_scheduler(options, optimizer)
    # fp16 gradients below 6e-8 would become 0: the loss is scaled up, as far as they do not overflow.
    optim_manager = bmt.optim.OptimManager(loss_scale=options.loss_scale if options.dtype == "fp16" else None)
    optim_manager.add_optimizer(optimizer, lr_scheduler)

    # Part 4: where this run begins.
    out = Path(options.out)
    run = {"model": model_options(options), "options": run_options(options), "text": corpus.digest}
    first_step = resume_or_start(options, out, model, optim_manager, run)
    # A resumed run may be longer than the interrupted one, and have another learning rate.
    lr_scheduler.start_lr, lr_scheduler.end_iter = options.lr, options.steps
    lr_scheduler.step(lr_scheduler.num_iter)
    with Logbook(out, first_step, options) as logbook:
        logbook.note(describe(model, options, corpus.description))
        if first_step == 0:
            logbook.validation(0, evaluate(model, loss_func, held_out))

        # Part 5: the training loop.
        saved, stopped = None, 0.0
        stop = StopRequest()
        tokens = options.batch_size * options.seq_len
        flops = flops_per_token(model, options)
        pace = Pace(tokens, flops, DTYPES[options.dtype], counts_drives=options.disk is not None)
        for step in range(first_step, options.steps):
            pace.begin_step()
            batch = sampler.batch(step)
            lr = lr_scheduler.current_lr

            optim_manager.zero_grad()
            loss = compute_loss(model, loss_func, batch)
            optim_manager.backward(loss)
            grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=options.clip)
            loss_scale = optim_manager.loss_scale
            if options.inspect_every and (step + 1) % options.inspect_every == 0:  # while there are gradients
                logbook.table(step + 1, bmt.inspect.inspect_model(model, "*"))
            optim_manager.step()

            # Means over all ranks: of the loss, and of whether Ctrl-C was pressed.
            shared = torch.stack(
                [loss.detach().float(), torch.tensor(float(stop.is_made), device=loss.device)]
            )
            mean_loss, stopped = bmt.distributed.all_reduce(shared, op="avg").tolist()
            numbers = {"loss": mean_loss, "lr": lr, "loss_scale": loss_scale, "grad_norm": grad_norm.item()}
            logbook.step(step + 1, **numbers, **pace.end_step())
            refuse_nan(options, step + 1, numbers)
            saves = stopped > 0 or step + 1 == options.steps or (step + 1) % options.save_every == 0
            if saves or (step + 1) % options.validate_every == 0:
                held_out_loss = evaluate(model, loss_func, held_out)
                logbook.validation(step + 1, held_out_loss)
                # Only now it is known that the step left a usable model.
                refuse_nan(options, step + 1, {"validation loss": held_out_loss})
            if saves:
                saved = save_checkpoint(out / "checkpoints", step + 1, model, optim_manager, run)
            if stopped:
                logbook.note(f"stopped at step {step + 1}, last checkpoint {saved}; continue with --resume")
                break
        pace.close()
    if stopped:
        sys.exit(130)  # as a shell reports a program that Ctrl-C ended

    # Part 6: the result.
    if options.disk is None:
        weights = out / "model.pt"
        bmt.save(model, weights)  # plain PyTorch reads it
    else:  # one tensor at a time: the whole may not fit
        weights = out / "model.safetensors"
        bmt.weights.save(model, weights)
    report(logbook, pace, saved, weights)


def refuse_nan(options: argparse.Namespace, step: int, numbers: dict[str, float]) -> None:
    """End the run before NaN overwrites a good checkpoint. The numbers are equal on all ranks.

    Raises:
        UserError: the loss is not finite; or the gradients are not, which without a loss scale went into the model.
    """
    for name, value in numbers.items():
        if not math.isfinite(value) and not (name == "grad_norm" and options.dtype == "fp16"):
            last = checkpoint.latest(Path(options.out) / "checkpoints")
            if last is None:
                remedy = "there is no checkpoint yet: start again with"
            else:
                remedy = f"the last good checkpoint is {last}: continue with --resume and"
            raise UserError(f"step {step}: {name} is {value}; {remedy} a smaller --lr or --clip")


def make_model(options: argparse.Namespace) -> GPT:
    places = {"parameters": options.parameters}
    if options.disk is not None:
        places = dict.fromkeys(("parameters", "gradients", "optimizer"), "disk")
    with bmt.default_policy(bmt.BlockPolicy(**places)):
        model = GPT(
            **{**model_options(options), "dtype": DTYPES[options.dtype]},
            use_checkpoint=not options.no_recompute,
            zero_level=options.zero_level,
            schedule=options.schedule,
        )
    bmt.init_parameters(model)  # or bmt.load(model, "model.pt")
    return model


def make_optimizer(options: argparse.Namespace, model: GPT) -> torch.optim.Optimizer:
    arguments: dict[str, Any] = {
        "lr": options.lr,
        "betas": (0.9, 0.95),
        "weight_decay": options.weight_decay,
        "state_dtype": {**DTYPES, "int8": torch.int8}[options.state_dtype],
    }
    if options.optimizer == "muon":
        # With this adjustment a learning rate has the same size as Adam's.
        muon = bmt.optim.MuonOffloadOptimizer if options.offload else bmt.optim.MuonOptimizer
        return muon(
            model.named_parameters(),
            lr=options.lr,
            weight_decay=options.weight_decay,
            adjust_lr_fn="match_rms_adamw",
            splits={"*.project_qkv": 3},
            state_dtype=arguments["state_dtype"],
        )
    if options.offload:
        return bmt.optim.AdamOffloadOptimizer(model.parameters(), **arguments)
    return bmt.optim.AdamOptimizer(model.parameters(), **arguments)


def compute_loss(model: GPT, loss_func: bmt.loss.FusedCrossEntropy, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over this rank's tokens, in nats a byte."""
    return model.loss(batch.enc_input, batch.targets, loss_func)


def evaluate(model: GPT, loss_func: bmt.loss.FusedCrossEntropy, batches: list[Batch]) -> float:
    """Mean loss over fixed held-out batches, of all ranks."""
    model.eval()
    with torch.no_grad():
        losses = torch.stack([compute_loss(model, loss_func, batch) for batch in batches])
    model.train()
    return bmt.distributed.all_reduce(losses.mean(), op="avg").item()


def make_scheduler(
    options: argparse.Namespace, optimizer: torch.optim.Optimizer
) -> bmt.lr_scheduler.WarmupLRScheduler:
    scheduler_class = {
        "cosine": bmt.lr_scheduler.Cosine,
        "noam": bmt.lr_scheduler.Noam,
        "linear": bmt.lr_scheduler.Linear,
        "exponential": bmt.lr_scheduler.Exponential,
        "no-decay": bmt.lr_scheduler.NoDecay,
    }[options.scheduler]
    return scheduler_class(
        optimizer, start_lr=options.lr, warmup_iter=options.warmup, end_iter=options.steps, num_iter=0
    )


def resume_or_start(
    options: argparse.Namespace,
    out: Path,
    model: GPT,
    optim_manager: bmt.optim.OptimManager,
    run: dict[str, Any],
) -> int:
    """The first step: the last checkpoint's step with --resume, else 0."""
    moved = together(lambda: prepare(out, options.resume) if bmt.rank() == 0 else None, "--out")
    if moved:
        bmt.print_rank(f"moved the former run in {out} to {moved} (--resume would have continued it)")
    if not options.resume:
        return 0
    last = checkpoint.latest(out / "checkpoints")
    if last is None:
        raise UserError(f"--resume: expected a checkpoint in {out / 'checkpoints'}, found none")
    step = load_checkpoint(last, model, optim_manager, run)
    if step > options.steps:
        raise UserError(f"--steps: expected at least {step}, the step of {last}, got {options.steps}")
    bmt.print_rank(f"resumed from {last}")
    return step


def describe(model: GPT, options: argparse.Namespace, text: str) -> str:
    return (
        f"GPT-2 with {model.num_parameters():,} parameters in {options.dtype} on {bmt.world_size()} x "
        f"{bmt.config['device'].type}, {options.batch_size} x {options.seq_len} tokens per step\ntext: {text}"
    )


def flops_per_token(model: GPT, options: argparse.Namespace) -> float:
    """Forward and backward without what is recomputed (Chowdhery et al., PaLM, 2022, appendix B)."""
    attention = 12 * options.num_layers * options.num_heads * options.dim_head * options.seq_len
    return 6.0 * model.num_parameters(of_a_token=True) + attention


def report(logbook: Logbook, pace: Pace, saved: Path | None, weights: Path) -> None:
    """Print what came out, and where to find it. Collective."""
    before, after = logbook.validation_losses()
    device = bmt.config["device"]
    peaks = bmt.distributed.all_gather(torch.tensor(peak_memory(), device=device)).tolist()
    share = pace.exposed_communication()
    waits = (
        {} if share is None else {"communication": f"{share:.1%} of rank 0's time is spent waiting for it"}
    )
    results = {
        "validation loss": f"{before:.4f} before, {after:.4f} after",
        **({"tokens per second": f"{pace.tokens_per_second():,.0f}"} if pace.num_steps else {}),
        **waits,
        "peak memory per rank": ", ".join(f"{peak:,.0f} MiB" for peak in peaks),
        **drives(pace),
        "checkpoint": saved or "none: there was no step left to do",
        "weights": weights,
    }
    for name, value in results.items():
        bmt.print_rank(f"{name + ':':<22}{value}")
    for i, path in enumerate(logbook.written()):
        bmt.print_rank(f"{'' if i else 'logs:':<22}{path}")


def drives(pace: Pace) -> dict[str, str]:
    """Return the line on bytes that all ranks moved; writing wears a drive out. Collective with --disk."""
    if not pace.counts_drives or not pace.num_steps:
        return {}
    moved = torch.tensor(pace.moved, dtype=torch.float64) / pace.num_steps
    read, written = bmt.distributed.all_reduce(moved).tolist()
    a_day = written * 86_400 * pace.num_steps / pace.seconds
    moves = f"{read / 1e9:.3g} GB read and {written / 1e9:.3g} GB written in a step"
    return {"drives": f"{moves}, {a_day / 1e12:.3g} TB written in a day"}


if __name__ == "__main__":
    main()
