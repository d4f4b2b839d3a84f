"""Model and data of all programs of this folder: one linear layer, 4096 random samples.

4 ranks take 32 samples each in a step, so that an epoch has 4096 / (32 * 4) = 32 steps.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch.utils.data import TensorDataset

__all__ = ["DIM", "LEARNING_RATE", "device_kind", "log_line", "make_dataset", "parse_options"]

NUM_SAMPLES = 4096
DIM = 20
LEARNING_RATE = 1e-2
_DATA_SEED = 0  # every rank draws the same samples and takes its own part of them


def make_dataset() -> TensorDataset:
    """Random inputs of 20 numbers, each with a random target."""
    generator = torch.Generator().manual_seed(_DATA_SEED)
    inputs = torch.rand(NUM_SAMPLES, DIM, generator=generator)
    targets = torch.rand(NUM_SAMPLES, 1, generator=generator)
    return TensorDataset(inputs, targets)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one dense layer on all ranks.")
    parser.add_argument("--max_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32, help="samples of a rank in a step")
    parser.add_argument(
        "--num_ranks", type=int, default=4, help="without GPUs, of the programs that start ranks"
    )
    parser.add_argument("--save", help="file for the trained parameters")
    return parser.parse_args()


def device_kind() -> str:
    """Kind of device of a rank: GPU or CPU."""
    return "GPU" if torch.cuda.is_available() else "CPU"


def log_line(rank: int, epoch: int, batch_size: int, losses: list[torch.Tensor]) -> None:
    """Say what this rank has done in an epoch, in one write, so that the ranks' lines stay whole.

    Args:
        losses: of this rank's steps, on its own samples.
    """
    mean = torch.stack(losses).mean().item()
    sys.stdout.write(
        f"{device_kind()}:{rank} | Epoch: {epoch} | Batchsize: {batch_size} | Steps: {len(losses)} | Loss: {mean:.4f}\n"
    )
    sys.stdout.flush()
