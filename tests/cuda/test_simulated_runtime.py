"""The simulated CUDA runtime and NCCL of tests/cuda/simulate.py keep the promises that programs rely on."""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import run_process
from harness.fake_nccl import ROOT

TOOLKIT: Path | None = runpy.run_path(str(ROOT / "setup.py"))["find_toolkit"]()
pytestmark = pytest.mark.skipif(TOOLKIT is None, reason="no CUDA toolkit")

SOURCES = ROOT / "tests" / "cuda" / "simulated"
NOT_READY, OUT_OF_MEMORY, NOT_SUPPORTED = 600, 2, 801
TO_DEVICE, TO_HOST = 1, 2


def compiled(folder: Path, name: str, sources: list[str], *flags: str) -> Path:
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]
    places = [f"-I{TOOLKIT}/include", "-Icsrc"]
    files = [str(SOURCES / source) for source in sources]
    library = folder / name
    subprocess.run([*command, *places, *files, *flags, "-o", str(library)], cwd=ROOT, check=True, timeout=200)
    return library


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated")
    version = f"-Wl,-Bsymbolic,-soname,libcudart.so.13,--version-script={SOURCES / 'runtime.map'}"
    compiled(folder, "libcudart.so.13", ["runtime.cpp", "device.cpp", "not_simulated.cpp"], version)
    compiled(folder, "libnccl.so", ["nccl.cpp"], str(folder / "libcudart.so.13"), f"-Wl,-rpath,{folder}")
    return folder


class Runtime:
    """Calls of the runtime by their names; what does not succeed raises."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def result(self, name: str, *arguments: object) -> int:
        converted = [ctypes.c_size_t(x) if isinstance(x, int) else x for x in arguments]
        code: int = self._library[f"cuda{name}"](*converted)
        return code

    def __call__(self, name: str, *arguments: object) -> None:
        assert self.result(name, *arguments) == 0, name

    def made(self, name: str, *arguments: object) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self(name, ctypes.byref(handle), *arguments)
        return handle


@pytest.fixture
def cuda(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setenv("SIMULATED_CUDA_MEMORY", str(1 << 20))
    monkeypatch.setenv("SIMULATED_CUDA_DEVICES", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    runtime = Runtime(libraries / "libcudart.so.13")
    yield runtime
    runtime("DeviceSynchronize")


HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Gate:
    """Work that keeps a stream busy until it is opened."""

    def __init__(self, cuda: Runtime, stream: ctypes.c_void_p) -> None:
        self._open = threading.Event()
        self._function = HOST_FUNCTION(lambda _: self._open.wait(30) and None)
        cuda("LaunchHostFunc", stream, self._function, None)

    def open(self) -> None:
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()


def test_streams_run_beside_the_host_and_events_order_them(cuda: Runtime) -> None:
    first, second = (cuda.made("StreamCreateWithFlags", 1) for _ in range(2))
    event, device, pinned = (
        cuda.made("EventCreateWithFlags", 2),
        cuda.made("Malloc", 16),
        cuda.made("HostAlloc", 16, 0),
    )
    host = (ctypes.c_int * 4).from_address(pinned.value or 0)
    host[:] = [1, 2, 3, 4]
    gate = Gate(cuda, first)
    cuda("MemcpyAsync", device, pinned, 16, TO_DEVICE, first)
    cuda("EventRecord", event, first)
    cuda("StreamWaitEvent", second, event, 0)
    cuda("MemcpyAsync", pinned, device, 4, TO_HOST, second)
    assert [cuda.result("EventQuery", event), cuda.result("StreamQuery", second)] == [NOT_READY, NOT_READY]
    host[0] = 7  # what the copy finds when its turn comes
    gate.open()
    cuda("StreamSynchronize", second)
    assert cuda.result("EventQuery", event) == 0
    cuda("MemcpyAsync", ctypes.byref(host, 4), device, 4, TO_HOST, second)
    cuda("StreamSynchronize", second)
    assert host[1] == 7


def test_the_host_waits_for_copies_of_memory_that_is_not_pinned(cuda: Runtime) -> None:
    stream, device = cuda.made("StreamCreateWithFlags", 1), cuda.made("Malloc", 8)
    host = (ctypes.c_char * 8)(*b"12345678")
    gate = Gate(cuda, stream)
    threading.Timer(0.1, gate.open).start()
    cuda("MemcpyAsync", device, host, 8, TO_DEVICE, stream)
    assert gate.is_open


def test_memory_is_counted_and_fresh_memory_is_nan(cuda: Runtime) -> None:
    free, total, memory = ctypes.c_size_t(), ctypes.c_size_t(), cuda.made("Malloc", 4096)
    cuda("MemGetInfo", ctypes.byref(free), ctypes.byref(total))
    found = ctypes.c_float()
    cuda("Memcpy", ctypes.byref(found), memory, 4, TO_HOST)
    assert found.value != found.value
    assert cuda.result("Malloc", ctypes.byref(ctypes.c_void_p()), free.value + 4096) == OUT_OF_MEMORY
    cuda("Free", memory)
    before = free.value
    cuda("MemGetInfo", ctypes.byref(free), ctypes.byref(total))
    assert free.value == before + 4096


def test_a_kernel_of_torch_is_an_error_that_names_it(
    cuda: Runtime, capfd: pytest.CaptureFixture[str]
) -> None:
    register = cuda._library["__cudaRegisterFunction"]
    register(None, ctypes.c_void_p(4321), None, b"_ZN2at6kernelEi", *[None] * 6)
    triple = [1] * 4  # two dim3 are three numbers in two registers each
    assert cuda.result("LaunchKernel", ctypes.c_void_p(4321), *triple, None, 0, None) == NOT_SUPPORTED
    assert "at::kernel(int)" in capfd.readouterr().err


TOUCH = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
memory = ctypes.c_void_p()
cuda.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(8))
numbers = (ctypes.c_int * 2)(5, 6)
cuda.cudaMemcpy(memory, numbers, ctypes.c_size_t(8), 1)
cuda.cudaMemcpy(numbers, memory, ctypes.c_size_t(8), 2)
print(*numbers, flush=True)
if sys.argv[2] == "touch":
    print(ctypes.c_int.from_address(memory.value))
"""


@pytest.mark.parametrize("how", ["copy", "touch"])
def test_a_host_that_touches_device_memory_ends(libraries: Path, how: str) -> None:
    command = [sys.executable, "-c", TOUCH, str(libraries / "libcudart.so.13"), how]
    done = run_process(command, environment={"SIMULATED_CUDA_PROTECT": "1"}, timeout=60, check=False)
    assert done.stdout.startswith("5 6\n")
    assert (done.returncode == 0) == (how == "copy")


RANK = """
import ctypes, sys, time
import numpy as np
rank, size, name = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode()
nccl, cuda = ctypes.CDLL(sys.argv[1] + "/libnccl.so"), ctypes.CDLL(sys.argv[1] + "/libcudart.so.13")
class Id(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 128)]
comm, state, config = ctypes.c_void_p(), ctypes.c_int(7), (ctypes.c_int * 32)()
assert nccl.ncclCommInitRankConfig(ctypes.byref(comm), size, Id(name), rank, config) == 7
while state.value == 7:
    assert nccl.ncclCommGetAsyncError(comm, ctypes.byref(state)) == 0
    time.sleep(0.001)
def memory(values):
    at = ctypes.c_void_p()
    assert cuda.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(max(values.nbytes, 1))) == 0
    assert cuda.cudaMemcpy(at, values.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(values.nbytes), 1) == 0
    return at
def found(at, like):
    out = np.empty_like(like)
    assert cuda.cudaMemcpy(out.ctypes.data_as(ctypes.c_void_p), at, ctypes.c_size_t(out.nbytes), 2) == 0
    return out
n = ctypes.c_size_t
everyone = [np.arange(12, dtype=np.float32) + 100 * r for r in range(size)]
mine = memory(everyone[rank])
whole = memory(np.zeros(12 * size, np.float32))
assert nccl.ncclAllGather(mine, whole, n(12), 7, comm, None) == 0
assert (found(whole, np.concatenate(everyone)) == np.concatenate(everyone)).all()
part = memory(np.zeros(12 // size, np.float32))
assert nccl.ncclReduceScatter(mine, part, n(12 // size), 7, 0, comm, None) == 0
expected = sum(everyone).reshape(size, -1)[rank]
assert (found(part, expected) == expected).all()
assert nccl.ncclAllReduce(mine, mine, n(12), 7, 4, comm, None) == 0
assert (found(mine, everyone[0]) == sum(everyone) / size).all()
assert nccl.ncclBroadcast(mine, mine, n(0), 7, 0, comm, None) == 0
large = np.full(3_000_000, float(rank), np.float32)  # more than one message of a file
to, source = memory(large), memory(large)
nccl.ncclGroupStart()
assert nccl.ncclRecv(to, n(large.size), 7, (rank - 1) % size, comm, None) == 0
assert nccl.ncclSend(source, n(large.size), 7, (rank + 1) % size, comm, None) == 0
assert nccl.ncclGroupEnd() == 0
assert (found(to, large) == (rank - 1) % size).all()
assert nccl.ncclAllReduce(config, config, n(1), 7, 0, comm, None) == 4  # not on the device
print("right")
"""


@pytest.mark.parametrize("world", [1, 2, 3])
def test_nccl_between_processes(libraries: Path, tmp_path: Path, world: int) -> None:
    environment = {**os.environ, "SIMULATED_NCCL_FOLDER": str(tmp_path), "SIMULATED_CUDA_DELAY": "2000"}
    command = [sys.executable, "-c", RANK, str(libraries)]
    ranks = [
        subprocess.Popen(
            [*command, str(r), str(world), "id"], env=environment, stdout=subprocess.PIPE, text=True
        )
        for r in range(world)
    ]
    try:
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["right\n"] * world
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
