"""How a block's flat buffer is cut."""

from __future__ import annotations

import random

import pytest

from bmtrain import _C
from bmtrain._shards.sharding import slot_length

#: GPT-2 small, width 1280, and models whose sizes divide nothing.
SIZES = [
    [768 * 2304, 2304, 768 * 768, 768, 768 * 3072, 3072, 3072 * 768, 768, 768, 768, 768, 768],
    [1280 * 3840, 1280 * 1280, 1280 * 5120, 5120 * 1280, 1280, 1280],
    [1],
    [7, 3, 1, 11],
    [],
    [0, 5],
]
RANKS = [*range(1, 65), 96, 127, 128, 192, 255, 256, 384, 500, 511, 512]


def sizes_of(seed: int) -> list[int]:
    random.seed(seed)
    return [random.randrange(1, 10 ** random.randrange(1, 7)) for _ in range(random.randrange(1, 9))]


@pytest.mark.parametrize("numels", SIZES + [sizes_of(seed) for seed in range(12)], ids=lambda n: f"{sum(n)}")
@pytest.mark.parametrize("element_size", [2, 4, 8])
def test_slices_are_aligned_and_cover_every_parameter_once(numels: list[int], element_size: int) -> None:
    for num_ranks in RANKS:
        layout = _C.FlatLayout(numels, element_size, num_ranks)
        partition = layout.partition
        assert partition * element_size % _C.FlatLayout.SLICE_BYTES == 0
        for width in (2, element_size):  # also on a wire of 16 bits
            assert partition * width % 16 == 0
        assert partition * num_ranks >= layout.total
        assert partition - -(-layout.total // num_ranks) < _C.FlatLayout.SLICE_BYTES // element_size
        for index, numel in enumerate(numels):
            owners = range(num_ranks)
            if partition:  # all others have none of it
                first = layout.offset(index) // partition
                last = max(layout.offset(index) + numel - 1, layout.offset(index)) // partition
                owners = range(max(first - 1, 0), min(last + 2, num_ranks))
            end = 0
            for rank in owners:
                begin, count, at = layout.local_part(index, rank)
                if count:
                    assert begin == end  # neither a gap nor an overlap
                    assert rank * partition + at == layout.offset(index) + begin and at + count <= partition
                    end = begin + count
            assert end == numel


@pytest.mark.parametrize("element_size", [1, 2, 4, 8, 16])
def test_slots_outside_blocks_are_aligned(element_size: int) -> None:
    for numel in range(200):
        slot = slot_length(numel, element_size)
        assert slot >= numel and slot * element_size % 16 == 0
        assert (slot - numel) * element_size < 16


def test_a_partition_that_is_known_is_kept() -> None:
    assert _C.FlatLayout([640], 4, 3, partition=214).partition == 214
    with pytest.raises(ValueError, match="partition: expected at least 214"):
        _C.FlatLayout([640], 4, 3, partition=213)
