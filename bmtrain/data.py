"""Samples for each rank: a loader that can resume, and batches by the number of the step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    default_collate,
)

from ._base.arguments import require_integer, require_keys
from ._ranks import context as _context
from .global_var import config, context
from .virtual import shards_of

__all__ = ["Batch", "Batches", "Loader", "batches", "loader"]

_CHOSEN_HERE = ("batch_sampler", "drop_last", "generator", "sampler")


def loader(
    dataset: Dataset[Any], batch_size: int, seed: int = 0, *, shuffle: bool = True, **options: Any
) -> Loader:
    """Loads a dataset in batches, with different samples on each rank.

    A step takes the next ``batch_size * W`` samples of the epoch's order, of which rank *r* of *W* gets every *W*-th,
    beginning with the *r*-th, as with torch's ``DistributedSampler``. The ranks of a tensor-parallel group get the same
    samples, and so do ranks that divide the tokens of one batch (``sp_size``). With virtual shards a batch belongs to
    one shard, and shards take the place of ranks: a step sees the same samples on any number of ranks. Samples at the
    end of an epoch that do not fill a step are dropped.

    Args:
        dataset: has a length and takes indices; the same on all ranks.
        batch_size: samples in a batch: of one rank, or of one virtual shard.
        seed: of the order, which is another one in each epoch; the same on all ranks.
        shuffle: False for the order of the dataset.
        options: of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory``, ...

    Returns:
        An iterable of batches in host memory, with ``state_dict()`` and ``load_state_dict()``.

    Raises:
        TypeError: ``dataset`` has no length or takes no indices; or an option is one that the loader decides.
        ValueError: the samples do not fill one step; or ``init_distributed(survive=...)`` was called.
        RuntimeError: before :func:`bmtrain.init_distributed`.

    Example:
        >>> batches = bmtrain.data.loader(range(6), batch_size=3, shuffle=False)
        >>> for epoch in range(2):
        ...     for batch in batches:
        ...         print(epoch, batch.tolist())
        0 [0, 1, 2]
        0 [3, 4, 5]
        1 [0, 1, 2]
        1 [3, 4, 5]
    """
    ctx = context("data.loader")
    if ctx.survival is not None:
        raise ValueError(
            "data.loader: not with init_distributed(survive=...), where a step may be repeated with other shards: use "
            "batches(dataset, batch_size, seed)[step], cut by shard.of(batch)"
        )
    _check_dataset(dataset)
    for name in _CHOSEN_HERE:
        if name in options:
            raise TypeError(f"{name}: the loader decides that; for another choice use torch's DataLoader")
    batch_size = require_integer("batch_size", batch_size, 1)
    if ctx.virtual_shards:
        parts, mine = ctx.virtual_shards, shards_of(ctx.topology, ctx.virtual_shards)
    else:
        parts, mine = config["dp_size"], [config["dp_rank"]]
    batches = _Batches(
        len(dataset),  # type: ignore[arg-type]  # a Dataset need not have a length, this one has
        batch_size,
        parts,
        mine,
        require_integer("seed", seed),
        shuffle,
    )
    return Loader(dataset, batches, options)


def batches(
    dataset: Dataset[Any],
    batch_size: int,
    seed: int = 0,
    *,
    shuffle: bool = True,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
) -> Batches:
    """Gives each virtual shard its samples by seed, step and shard, so that a step can be repeated and moved.

    ``batches[step]`` is the batch of a step, of which ``shard.of(batch)`` reads a shard's samples, as
    :func:`loader` gives them. They are the same on any number of ranks, and when a step runs again after the loss
    of a rank. A run that is resumed needs nothing but the number of its step.

    Args:
        dataset: has a length and takes indices; the same on all ranks.
        batch_size: samples of one virtual shard.
        seed: of the order, which is another one in each epoch.
        shuffle: False for the order of the dataset.
        collate_fn: makes a batch of a list of samples, as for ``torch.utils.data.DataLoader``.

    Returns:
        An object whose length is the number of steps of an epoch; steps after it belong to the next epochs.

    Raises:
        TypeError: ``dataset`` has no length or takes no indices.
        ValueError: the samples do not fill one step.
        RuntimeError: before :func:`bmtrain.init_distributed`, or it was not given ``virtual_shards``.

    Example:
        >>> bmtrain.init_distributed(virtual_shards=2)
        >>> batches = bmtrain.batches(range(10), batch_size=2, shuffle=False)
        >>> for step in range(3):  # two steps are an epoch; the last two samples do not fill one
        ...     print(step, [shard.of(batches[step]).tolist() for shard in bmtrain.virtual_shards(step)])
        0 [[0, 2], [1, 3]]
        1 [[4, 6], [5, 7]]
        2 [[0, 2], [1, 3]]
    """
    count = context("batches").virtual_shards
    if not count:
        raise RuntimeError(
            "batches: expected init_distributed(virtual_shards=...), got none; or use data.loader"
        )
    _check_dataset(dataset)
    size = require_integer("batch_size", batch_size, 1)
    order = _Batches(len(dataset), size, count, (), require_integer("seed", seed), shuffle)  # type: ignore[arg-type]
    return Batches(dataset, order, collate_fn)


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset) or not all(
        hasattr(dataset, name) for name in ("__len__", "__getitem__")
    ):
        raise TypeError(
            f"dataset: expected one with a length and indices, got {type(dataset).__name__}; an iterable "
            'dataset must itself select this rank\'s samples, by config["dp_rank"] of config["dp_size"]'
        )


class _Batches(Sampler[list[int]]):
    """Indices of this rank's batches, from ``first`` of ``epoch`` on."""

    def __init__(
        self, num_samples: int, batch_size: int, parts: int, mine: Sequence[int], seed: int, shuffle: bool
    ) -> None:
        self.num_samples = num_samples
        self.parts = parts
        self.mine = mine
        self.seed = seed
        self.shuffle = shuffle
        self.step = batch_size * parts  # samples of all ranks
        self.epoch = 0
        self.first = 0
        if num_samples < self.step:
            raise ValueError(
                f"dataset: expected at least {self.step} samples, {batch_size} for each of {parts} "
                f"{'rank' if parts == 1 else 'ranks or virtual shards'}, got {num_samples}"
            )

    def __len__(self) -> int:
        """Number of batches in a whole epoch."""
        return self.num_samples // self.step * len(self.mine)

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for first in range(self.first, self.num_samples - self.step + 1, self.step):
            for part in self.mine:
                yield self.part(order, first, part)

    def part(self, order: torch.Tensor, first: int, part: int) -> list[int]:
        """Returns the indices of a part of the step that begins at ``first``."""
        indices: list[int] = order[first + part : first + self.step : self.parts].tolist()
        return indices

    def order(self) -> torch.Tensor:
        """The order of ``torch.utils.data.DistributedSampler`` with the same seed."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        return torch.randperm(
            self.num_samples, generator=torch.Generator().manual_seed(self.seed + self.epoch)
        )


class Loader:
    """Batches of one epoch after the other, see :func:`loader`.

    Each ``for`` runs through one epoch, the next one through the next; the first after :meth:`load_state_dict` through
    what was left of the saved one.

    Attributes:
        dataset: the dataset.
        epoch: number of the running epoch; between two epochs, of the next.
    """

    def __init__(self, dataset: Dataset[Any], batches: _Batches, options: dict[str, Any]) -> None:
        self.dataset = dataset
        self.epoch = 0
        self._samples = 0  # consumed in this epoch, by all ranks together
        self._is_running = False
        self._batches = batches
        # A generator of its own: that of the program gives the same numbers whether or not a run was interrupted.
        self._generator = torch.Generator()
        self._torch_loader: DataLoader[Any] = DataLoader(
            dataset, batch_sampler=batches, generator=self._generator, **options
        )

    def __len__(self) -> int:
        """Number of this rank's batches in an epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        if self._is_running:  # the loop over the epoch before was left by `break`
            self._go_to(self.epoch + 1)
        self._is_running = True
        first, batches = self._samples, self._batches
        batches.epoch, batches.first = self.epoch, first
        # Workers draw other random numbers on each rank.
        self._generator.manual_seed(hash((batches.seed, self.epoch, batches.mine[0])) & (2**63 - 1))
        for number, batch in enumerate(self._torch_loader, 1):
            self._samples = first + number // len(batches.mine) * batches.step
            yield batch
        self._go_to(self.epoch + 1)

    def _go_to(self, epoch: int, samples: int = 0) -> None:
        self.epoch = epoch
        self._samples = samples
        self._is_running = False

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the loop: the same on all ranks, for any number of ranks.

        The current batch counts as done: call this after its step.

        Example:
            >>> batches = bmtrain.data.loader(range(10), batch_size=2, shuffle=False)
            >>> for batch in batches:
            ...     if 4 in batch:
            ...         state = batches.state_dict()  # for instance in `data=` of a checkpoint
            >>> batches.load_state_dict(state)
            >>> [batch.tolist() for batch in batches]
            [[6, 7], [8, 9]]
        """
        return {
            "epoch": self.epoch,
            "samples": self._samples,
            "seed": self._batches.seed,
            "size": self._batches.num_samples,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues after the batch at which :meth:`state_dict` was called, on as many ranks as then or others.

        Args:
            state_dict: of a loader of the same dataset with the same seed.

        Raises:
            TypeError: ``state_dict`` is not a dict.
            ValueError: something is missing in it, or the dataset's size or the seed is another one.
        """
        require_keys("state_dict", state_dict, ("epoch", "samples", "seed", "size"))
        for name, now in (("seed", self._batches.seed), ("size", self._batches.num_samples)):
            if state_dict[name] != now:
                raise ValueError(
                    f"state_dict: expected the {name} of this loader's order, {now}, got {state_dict[name]}: the "
                    "samples that are left of the epoch would be others"
                )
        self._go_to(state_dict["epoch"], state_dict["samples"])


class Batch:
    """The samples of one step, read when :meth:`VirtualShard.of` or another slice takes them."""

    def __init__(
        self, dataset: Dataset[Any], indices: Sequence[int], collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self.indices = indices
        self._dataset = dataset
        self._collate_fn = collate_fn

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, samples: slice) -> Any:
        return self._collate_fn([self._dataset[index] for index in self.indices[samples]])


class Batches:
    """The batches of all steps by number, see :func:`batches`."""

    def __init__(
        self, dataset: Dataset[Any], order: _Batches, collate_fn: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset = dataset
        self._batches = order
        self._collate_fn = collate_fn
        self._order = order.order()

    def __len__(self) -> int:
        """Number of steps of an epoch."""
        return self._batches.num_samples // self._batches.step

    def __getitem__(self, step: int) -> Batch:
        """Returns the batch of a step, of any epoch."""
        epoch, number = divmod(require_integer("step", step, 0), len(self))
        if epoch != self._batches.epoch:
            self._batches.epoch = epoch
            self._order = self._batches.order()
        parts = range(self._batches.parts)
        shards = [self._batches.part(self._order, number * self._batches.step, part) for part in parts]
        return Batch(self._dataset, [index for shard in shards for index in shard], self._collate_fn)

    def sampler(self, start: int = 0) -> Iterator[list[int]]:
        """Yields the samples of each step from ``start`` on, for torch's ``DataLoader`` with workers that read ahead.

        It has no end. Each rank reads the batch of the whole step, of which ``shard.of(batch)`` takes a shard's rows.

        Example:
            >>> bmtrain.init_distributed(virtual_shards=2)
            >>> samples = bmtrain.batches(range(8), batch_size=1, shuffle=False).sampler(start=1)
            >>> next(iter(torch.utils.data.DataLoader(range(8), batch_sampler=samples))).tolist()
            [2, 3]
        """
        return (list(self[step].indices) for step in itertools.count(require_integer("start", start, 0)))


def adapt_distributed_sampler() -> None:
    """Makes torch's ``DistributedSampler(dataset)`` use the ranks of this library where no process group was made.

    The sampler queries torch.distributed, which knows no ranks in a program that calls only `init_distributed`, and
    whose error would recommend a process group that is not needed.
    """
    plain = DistributedSampler.__init__
    if hasattr(plain, "_bmtrain"):
        return

    @functools.wraps(plain)
    def init(
        self: DistributedSampler[Any],
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if _context.current() is not None and not torch.distributed.is_initialized():
            num_replicas = config["dp_size"] if num_replicas is None else num_replicas
            rank = config["dp_rank"] if rank is None else rank
        plain(self, dataset, num_replicas, rank, *args, **kwargs)

    init._bmtrain = True  # type: ignore[attr-defined]
    DistributedSampler.__init__ = init  # type: ignore[method-assign]
