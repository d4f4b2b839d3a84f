"""Several drives: which of them gets what, and the bits of one."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.disk_tier import ALL, TIERS, make, small_chunks, small_drive, train

import bmtrain as bmt
from bmtrain._engine import disk_tier
from bmtrain._engine.disk_tier import StoredArray, tier_of
from bmtrain._engine.drives import Drives, num_on_drives
from bmtrain._engine.engine import current_engine
from bmtrain.errors import DiskError
from bmtrain.global_var import context


def bytes_in(directories: list[str]) -> list[int]:
    """Bytes of this process's files without a name in each directory."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            path, size = os.readlink(f"/proc/self/fd/{number}"), os.stat(f"/proc/self/fd/{number}").st_size
        except OSError:  # of the listing itself
            continue
        found[os.path.dirname(path)] += size
    return [found[directory] for directory in directories]


def compare(directories: list[str]) -> list[str]:
    """Returns the drive of each block's parameters."""
    small_chunks()
    expected = train(*make("AdamOptimizer", torch.bfloat16, False), range(4))
    for places in (TIERS[1], ALL):
        model, optimizer = make("AdamOptimizer", torch.bfloat16, places)
        for a, b in zip(train(model, optimizer, range(4)), expected, strict=True):
            assert torch.equal(a, b)
    assert all(bytes_in(directories))
    return [layer.weight._stored().parameters.file.name for layer in model.layers]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_same_bits_with_several(world: int, count: int, tmp_path: Path) -> None:
    directories = [str(tmp_path / str(number)) for number in range(count)]
    for directory in directories:
        os.mkdir(directory)
    results = run_ranks(world, compare, directories, init={"tier_directories": directories})
    assert all(result == results[0] for result in results)  # the same on all ranks of a host


def more_transfers_than_slots() -> None:
    """Arrays that are read, and then written, at the same time; some take three slots of the queue."""
    tier = tier_of(current_engine(context()))
    arrays = []
    for number in range(disk_tier._SLOTS + 6):
        nbytes = 4096 if number % 30 else 3 << 20
        array = StoredArray(
            tier, tier.drives.reserve(nbytes), 0, nbytes, f"array {number}", lambda memory: None
        )
        array.mapping.fill_(number)
        arrays.append(array)
    for added in (0, 100):
        for array in arrays:
            array.fetch()
        for number, array in enumerate(arrays):
            array.arrive()
            assert array.memory is not None and array.memory.eq(number + added).all()
            array.memory.add_(100)
        for array in arrays:
            array.send()
        for array in reversed(arrays):
            array.rest()
    assert all(array.mapping.eq(number + 200).all() for number, array in enumerate(arrays))
    assert sorted(tier._free) == list(range(disk_tier._SLOTS))


def test_transfers_wait_for_free_slots(tmp_path: Path) -> None:
    run_ranks(1, more_transfers_than_slots, init={"tier_directories": [str(tmp_path)]})


def test_files_are_divided_by_speed(tmp_path: Path) -> None:
    drives = Drives([str(tmp_path / name) for name in "abc"], [3.0, 1.0, 2.0])
    for name in "abc":
        (tmp_path / name).mkdir()
    files = [drives.reserve(4096 * (1 + number % 3)) for number in range(60)]
    numbers = Counter[str]()
    for file in files:
        numbers[file.name[-1]] += file.nbytes // 4096
    assert sum(numbers.values()) == 120
    for name, share in zip("abc", (60, 20, 40), strict=True):
        assert abs(numbers[name] - share) <= 3


def test_a_full_drive_leaves_its_part_to_others(tmp_path: Path) -> None:
    with small_drive(tmp_path / "small", 1 << 20) as small:
        (tmp_path / "large").mkdir()
        drives = Drives([str(small), str(tmp_path / "large")], [1000.0, 1.0])
        files = [drives.reserve(400 << 10) for _ in range(4)]
        assert [file.name.endswith("small") for file in files] == [True, True, False, False]
    assert not os.path.ismount(small)  # although the files are open
    with small_drive(tmp_path / "one", 1 << 20) as one, small_drive(tmp_path / "two", 1 << 20) as two:
        drives = Drives([str(one), str(two)], [1.0, 1.0])
        with pytest.raises(DiskError, match=r"disk tier in .*one: cannot reserve space: .* are free"):
            drives.reserve(2 << 20)


def test_directories_on_one_drive_share_its_speed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with small_drive(tmp_path / "small", 1 << 20) as small:
        assert num_on_drives([str(tmp_path), str(small), str(tmp_path / "other")]) == [2, 1, 2]


def start(directories: Any) -> str:
    with pytest.raises((DiskError, TypeError, ValueError)) as raised:
        bmt.init_distributed(tier_directories=directories)
    return str(raised.value)


def test_wrong_directories(tmp_path: Path) -> None:
    for given, words in (
        (str(tmp_path), "expected a list of directories"),
        ([], "expected one directory or more, got none"),
        ([str(tmp_path), "/no/such"], "disk tier in /no/such: cannot make a file there"),
    ):
        for text in run_ranks(1, start, given, init=False, fresh=True):
            assert words in text
