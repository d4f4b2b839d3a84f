"""Files and queues of the disk tier: both back ends, and what goes wrong."""

from __future__ import annotations

import errno
import os
import sys
import zlib
from pathlib import Path

import pytest
import torch
from harness import run_process
from harness.sanitized import build_with_torch, run_driver

from bmtrain import _C
from bmtrain._C import DiskFile, DiskQueue
from bmtrain.errors import DiskError

BACK_ENDS = ["io_uring", "threads"]
DISK_ALIGNMENT = 4096
PIECE = 16 * DISK_ALIGNMENT


def make_queue(back_end: str, num_buffers: int = 4) -> DiskQueue:
    try:
        return DiskQueue(back_end, num_buffers, PIECE)
    except DiskError as error:
        pytest.skip(f"not here: {error}")


def make_file(folder: Path, num_pieces: int = 16) -> DiskFile:
    file = DiskFile(str(folder))
    file.reserve(num_pieces * PIECE)
    return file


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("delay", [0, 500])
def test_bytes_come_back(back_end: str, delay: int, tmp_path: Path) -> None:
    queue, file = make_queue(back_end), make_file(tmp_path)
    values = torch.randint(256, (16, PIECE), dtype=torch.uint8)
    _C.disturb_transfers(delay)
    for n in range(16):
        queue.wait(n % 4)
        queue.buffer(n % 4).copy_(values[n])
        queue.write(n % 4, file, n * PIECE, PIECE)
    for n in range(16):  # reads follow the writes of their buffers, in the same places
        queue.wait(n % 4)
        queue.buffer(n % 4).fill_(85)
        queue.read(n % 4, file, n * PIECE, PIECE)
        queue.wait(n % 4)
        assert torch.equal(queue.buffer(n % 4), values[n])
    _C.disturb_transfers(0)
    assert (queue.bytes_read, queue.bytes_written) == (16 * PIECE, 16 * PIECE)
    assert queue.back_end == back_end
    assert torch.equal(file.map(0, 16 * PIECE).tensor(0, 16 * PIECE).view(16, PIECE), values)
    assert not any(tmp_path.iterdir())


def test_back_ends_write_the_same_file(tmp_path: Path) -> None:
    contents = []
    for back_end in BACK_ENDS:
        queue, file = make_queue(back_end), make_file(tmp_path, 2)
        queue.buffer(0).copy_(torch.arange(PIECE) % 251)
        queue.write(0, file, PIECE, DISK_ALIGNMENT)
        queue.wait(0)
        contents.append(os.pread(os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY), 2 * PIECE, 0))
    assert contents[0] == contents[1]
    assert contents[0].count(0) > PIECE


def test_new_space_reads_as_zeros(tmp_path: Path) -> None:
    queue, file = DiskQueue("auto", 1, PIECE), make_file(tmp_path)
    queue.buffer(0).fill_(1)
    queue.read(0, file, 0, PIECE)
    queue.wait(0)
    assert not queue.buffer(0).any()


def test_a_wait_calls_the_kernel_once(tmp_path: Path) -> None:
    nbytes = 64 << 20  # which a drive takes a while to write
    queue, file = make_queue("io_uring"), DiskFile(str(tmp_path))
    file.reserve(nbytes)
    memory = torch.ones(nbytes + DISK_ALIGNMENT, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % DISK_ALIGNMENT :][:nbytes]
    quarter = nbytes // 4
    for n in range(4):
        queue.write(n, file, n * quarter, quarter, memory[n * quarter :])
    for n in range(4):
        queue.wait(n)
    assert 4 <= queue.num_calls <= 4 + 8  # submissions, and one wait for each, with some room


@pytest.mark.parametrize("bit", [0, 12345, 8 * PIECE - 1])
def test_changed_bit(bit: int, tmp_path: Path) -> None:
    queue, file = DiskQueue("auto", 1, PIECE), make_file(tmp_path)
    queue.write(0, file, PIECE, PIECE)
    queue.wait(0)
    file.map(0, 2 * PIECE).tensor(PIECE + bit // 8, 1).bitwise_xor_(1 << bit % 8)
    queue.read(0, file, PIECE, PIECE)
    with pytest.raises(DiskError, match=f"{PIECE} bytes at offset {PIECE} are not those"):
        queue.wait(0)
    file.unseal(0, 2 * PIECE)
    queue.read(0, file, PIECE, PIECE)
    queue.wait(0)  # and sealed as they are now
    file.map(0, 2 * PIECE).tensor(PIECE + bit // 8, 1).bitwise_xor_(1 << bit % 8)
    queue.read(0, file, PIECE, PIECE)
    with pytest.raises(DiskError, match="are not those"):
        queue.wait(0)


@pytest.mark.parametrize("piece", range(3))
def test_changed_bit_in_a_large_range(piece: int, tmp_path: Path) -> None:
    sealed = 1 << 18
    queue, file = DiskQueue("auto", 1, 3 * sealed), DiskFile(str(tmp_path))
    file.reserve(3 * sealed)
    queue.write(0, file, 0, 3 * sealed)
    queue.wait(0)
    file.map(0, 3 * sealed).tensor(piece * sealed + 77, 1).bitwise_xor_(4)
    queue.read(0, file, 0, 3 * sealed)
    with pytest.raises(DiskError, match=f"{sealed} bytes at offset {piece * sealed} are not those"):
        queue.wait(0)


@pytest.mark.parametrize("folder", ["", "/dev/shm"], ids=["drive", "without zeroed ranges"])
def test_part_of_a_range_is_written_or_zeroed(folder: str, tmp_path: Path) -> None:
    queue, file = DiskQueue("auto", 1, PIECE), make_file(Path(folder or tmp_path))
    expected, part = torch.ones(PIECE, dtype=torch.uint8), slice(DISK_ALIGNMENT, 2 * DISK_ALIGNMENT)
    for number in (0, 2):
        queue.buffer(0).fill_(1)
        queue.write(0, file, 0, PIECE)
        queue.wait(0)
        if number:
            queue.buffer(0).fill_(number)
            queue.write(0, file, part.start, DISK_ALIGNMENT)
            queue.wait(0)
        else:
            file.zero(part.start, DISK_ALIGNMENT)
        expected[part] = number
        queue.read(0, file, 0, PIECE)
        queue.wait(0)
        assert torch.equal(queue.buffer(0), expected)


@pytest.mark.parametrize("nbytes", [DISK_ALIGNMENT, 1 << 18, (1 << 20) + 3 * DISK_ALIGNMENT])
def test_seals_are_the_checksums_of_checkpoints(nbytes: int, tmp_path: Path) -> None:
    queue, file = DiskQueue("auto", 1, nbytes), DiskFile(str(tmp_path))
    file.reserve(2 * nbytes)
    written = queue.buffer(0).random_(256).numpy().tobytes()
    queue.write(0, file, nbytes, nbytes)
    queue.wait(0)
    pieces = [written[at : at + (1 << 18)] for at in range(0, nbytes, 1 << 18)]
    assert file.seals(nbytes, nbytes) == [zlib.crc32(piece) for piece in pieces]
    assert file.seals(0, 2 * nbytes) == file.seals(0, nbytes) == []
    file.unseal(0, nbytes)  # of those before, which have none
    assert len(file.seals(nbytes, nbytes)) == len(pieces)
    queue.write(0, file, nbytes, DISK_ALIGNMENT)  # of a part, which leaves none of the rest
    queue.wait(0)
    assert len(file.seals(nbytes, nbytes)) == (nbytes == DISK_ALIGNMENT)
    file.unseal(2 * nbytes - 1, 1)
    assert file.seals(nbytes, nbytes) == []


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize(
    ("result", "words"), [(-errno.EIO, "Input/output error"), (0, "the file ended after 0 bytes")]
)
def test_failures(back_end: str, result: int, words: str, tmp_path: Path) -> None:
    queue, file = make_queue(back_end), make_file(tmp_path)
    queue.read(0, file, 0, PIECE)
    queue.read(1, file, PIECE, PIECE)
    _C.disturb_transfers(0, 1, result)
    queue.wait(0)
    with pytest.raises(DiskError, match=f"reading {PIECE} bytes at offset {PIECE}: {words}"):
        queue.wait(1)
    queue.read(1, file, PIECE, PIECE)
    queue.wait(1)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_part_is_continued(back_end: str, tmp_path: Path) -> None:
    queue, file = make_queue(back_end), make_file(tmp_path)
    values, beyond = torch.randint(256, (2, PIECE), dtype=torch.uint8)
    queue.buffer(1).copy_(beyond)
    queue.write(1, file, PIECE, PIECE)
    queue.wait(1)
    for move, before in ((queue.write, values), (queue.read, torch.zeros(PIECE, dtype=torch.uint8))):
        queue.buffer(0).copy_(before)
        queue.buffer(1).fill_(85)
        _C.disturb_transfers(0, 0, DISK_ALIGNMENT)
        move(0, file, 0, PIECE)
        queue.wait(0)
        assert queue.buffer(1).eq(85).all()
    _C.disturb_transfers(0)
    assert torch.equal(queue.buffer(0), values)
    queue.read(1, file, PIECE, PIECE)
    queue.wait(1)
    assert torch.equal(queue.buffer(1), beyond)


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_file_that_has_become_shorter(back_end: str, tmp_path: Path) -> None:
    queue, file = make_queue(back_end), make_file(tmp_path)
    os.ftruncate(file.fileno(), DISK_ALIGNMENT)
    queue.read(0, file, 0, PIECE)
    with pytest.raises(
        DiskError, match=f"reading {PIECE} bytes at offset 0: the file ended after 4096 bytes"
    ):
        queue.wait(0)


def test_wrong_calls(tmp_path: Path) -> None:
    queue, file = DiskQueue("auto", 2, PIECE), make_file(tmp_path)
    for offset, nbytes in ((1, PIECE), (0, 100), (0, 2 * PIECE), (16 * PIECE, PIECE), (0, 0)):
        with pytest.raises(ValueError, match="expected an aligned range"):
            queue.read(0, file, offset, nbytes)
    with pytest.raises(ValueError, match="expected a buffer from 0 to 1, got 2"):
        queue.read(2, file, 0, PIECE)
    queue.read(0, file, 0, PIECE)
    with pytest.raises(RuntimeError, match="has a transfer already"):
        queue.write(0, file, 0, PIECE)
    with pytest.raises(ValueError, match="expected 'auto', 'io_uring' or 'threads', got 'mmap'"):
        DiskQueue("mmap", 2, PIECE)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="cannot make a file there: No such file"):
        DiskFile(str(tmp_path / "absent"))


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_queue_ends_with_transfers_on_their_way(back_end: str, tmp_path: Path) -> None:
    for _ in range(20):
        queue, file = make_queue(back_end), make_file(tmp_path)
        for n in range(4):
            queue.write(n, file, n * PIECE, PIECE)
        del queue, file


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_forked_child_is_refused(back_end: str, tmp_path: Path) -> None:
    queue, file = make_queue(back_end), make_file(tmp_path)
    queue.read(0, file, 0, PIECE)
    child = os.fork()
    if child == 0:
        try:
            queue.read(1, file, 0, PIECE)
        except RuntimeError as error:
            del queue
            os._exit("forked" in str(error))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    queue.wait(0)


@pytest.mark.slow
def test_a_transfer_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    units = {
        "driver": ["tests/cpp/disk_queue_driver.cpp"],
        "core": [
            "csrc/disk/*.cpp",
            *(f"csrc/common/{name}.cpp" for name in ("thread_pool", "latch", "race_point")),
        ],
    }
    run_driver(build_with_torch(tmp_path, units, "undefined"), None, tmp_path)


def test_container_without_io_uring(tmp_path: Path) -> None:
    environment = {"BMTRAIN_CPU_ISA": "base"}  # whose checksums are those of zlib as well
    command = [sys.executable, "-c", WITHOUT, str(tmp_path)]
    done = run_process(command, environment=environment, timeout=60)
    assert "threads: io_uring_setup: Operation not permitted" in done.stdout


WITHOUT = """
import sys, zlib
sys.path.insert(0, "tests")
from harness.limits import refuse_calls
import torch
from bmtrain._C import DiskFile, DiskQueue
refuse_calls(["io_uring_setup"])
queue, file = DiskQueue("auto", 1, 4096), DiskFile(sys.argv[1])
file.reserve(4096)
queue.buffer(0).random_(256)
assert queue.write(0, file, 0, 4096) is None and file.seals(0, 4096) == [zlib.crc32(queue.buffer(0).numpy())]
queue.wait(0)
queue.read(0, file, 0, 4096)
queue.wait(0)
print(f"{queue.back_end}: {queue.reason}")
"""
