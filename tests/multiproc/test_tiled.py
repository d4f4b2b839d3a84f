"""Layers and losses computed tile by tile: equal numbers, and memory linear in the tile."""

from __future__ import annotations

import gc
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from harness.divided import assert_same_run, batch_of, train_divided, train_whole
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bmtrain as bmt
from bmtrain.loss import fused_linear_cross_entropy
from bmtrain.nn.functional import tiled


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, as long as these are alive.

    Attributes:
        peak: the most bytes at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in known | self._known:
                    self._known.add(storage._cdata)
                    self._live += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._live)
        return out

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


WIDE = 64  # times the features of a token: what a tile holds outweighs what all tokens hold


def peak(tokens: int, tile: int) -> int:
    """Bytes of a forward and backward of an MLP and a loss, beyond parameters, with tiles of ``tile`` tokens."""
    torch.manual_seed(1)
    mlp = nn.Sequential(nn.Linear(8, 8 * WIDE), nn.GELU(), nn.Linear(8 * WIDE, 8))
    table = nn.Parameter(torch.randn(8 * WIDE, 8))
    x = torch.randn(1, tokens, 8, requires_grad=True)
    targets = torch.arange(tokens) % (8 * WIDE)
    with LiveBytes() as live:
        y = tiled(mlp, x, tokens // tile)
        fused_linear_cross_entropy(y[0], table, targets, chunk=tile).backward()
    return live.peak


def test_peak_memory_is_linear_in_the_tile() -> None:
    tokens = 4096
    peaks = {tile: peak(tokens, tile) for tile in (256, 512, 1024)}
    first, second = peaks[512] - peaks[256], peaks[1024] - peaks[512]
    assert 1.8 <= second / first <= 2.2, peaks
    assert peaks[256] < peak(tokens, tokens) / 6


def test_a_sequence_eight_times_as_long_needs_no_more_memory() -> None:
    assert peak(8 * 512, 128) <= peak(512, 512)


class Layer(nn.Module):
    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.tiles = tiles
        self.qkv = nn.Linear(32, 96)
        self.mlp = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + (tiled(self.mlp, x, self.tiles) if self.tiles else self.mlp(x))


class Model(nn.Module):
    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.layers = nn.ModuleList([Layer(tiles), Layer(tiles)])
        self.head = nn.Linear(32, 50)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def make(tiles: int) -> nn.Module:
    torch.manual_seed(3)
    return Model(tiles)


def trained(recompute: str) -> Any:
    return train_divided(lambda: make(3), batch_of(4, 19), "heads", 3, recompute)


@pytest.mark.parametrize("recompute", ["whole", "off"])
@pytest.mark.parametrize("sp_size", [1, 2])
def test_training_with_tiles_is_that_of_one_process(sp_size: int, recompute: str) -> None:
    wanted = train_whole(lambda: make(0), batch_of(4, 19), 3)
    for run in run_ranks(2, trained, recompute, init={"sp_size": sp_size}):
        assert_same_run(run, wanted)


def test_wrong_calls_are_named() -> None:
    x = torch.zeros(2, 6, 4)
    with pytest.raises(ValueError, match="tiles"):
        tiled(torch.tanh, x, 0)
    with pytest.raises(ValueError, match="x: expected \\(batch, tokens"):
        tiled(torch.tanh, x[0, 0], 2)
    with pytest.raises(ValueError, match="function: expected a tensor"):
        tiled(lambda tile: tile.sum(1), x, 2)
    assert tiled(torch.tanh, x, 100).shape == x.shape  # no empty tiles


#: Bytes beyond what a rank has before. A length that fits needs 18 to 20 MiB, and the stack of a thread that starts
#: meanwhile 8; twice the length more than 32.
LIMIT = 30 << 20


class LongLayer(nn.Module):
    """A layer whose MLP outweighs all else that it has of a token."""

    def __init__(self, tiles: int) -> None:
        super().__init__()
        self.tiles = tiles
        self.qkv = nn.Linear(8, 24)
        self.mlp = nn.Sequential(nn.Linear(8, 8 * WIDE), nn.GELU(), nn.Linear(8 * WIDE, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (1, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + (tiled(self.mlp, x, self.tiles) if self.tiles else self.mlp(x))


def fits(length: int, tile: int) -> bool:
    """Whether a forward and backward of a sequence fit into the limit, which the system enforces."""
    table = nn.Parameter(torch.randn(8 * WIDE, 8))

    def step(tokens: int) -> None:
        layer = LongLayer(-(-tokens // bmt.config["sp_size"] // tile) if tile else 0)
        part = bmt.shard_sequence(
            {"inputs_embeds": torch.randn(1, tokens, 8), "targets": torch.arange(tokens)[None] % 512},
            method="ring",
        )
        y = layer(part["inputs_embeds"].requires_grad_())
        chunk = tile or y.shape[1]
        fused_linear_cross_entropy(y[0], table, part["targets"][0], chunk=chunk).backward()

    step(64)  # threads and libraries have their memory
    gc.collect()
    status = Path("/proc/self/status").read_text()
    before = int(status.split("VmData:")[1].split()[0]) << 10
    former = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (before + LIMIT, former[1]))
    try:
        step(length)
    except (RuntimeError, MemoryError) as error:
        assert "memory" in str(error) or isinstance(error, MemoryError)
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, former)
    return True


def test_ranks_with_tiles_train_eight_times_the_length_under_one_limit() -> None:
    length = 2048
    assert run_ranks(1, fits, length, 0, fresh=True) == [True]
    assert run_ranks(1, fits, 2 * length, 0, fresh=True) == [False]
    assert run_ranks(2, fits, 8 * length, 256, init={"sp_size": 2}, fresh=True) == [True, True]
