"""Which library is opened as NCCL, and which is refused."""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import run_process
from harness.fake_nccl import ROOT, build_fake

from bmtrain import _C
from bmtrain._ranks.comm_nccl import find_candidates
from bmtrain.errors import CommunicationError

CPU = torch.device("cpu")
TOOLKIT: Path | None = runpy.run_path(str(ROOT / "setup.py"))["find_toolkit"]()


def test_old_and_foreign_libraries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BMTRAIN_NCCL_LIBRARY", str(build_fake(tmp_path, "-DFAKE_VERSION=21805")))
    with pytest.raises(RuntimeError, match=r"expected version 2\.19 or later, got 2\.18\.5.*pip install"):
        _C.NcclLibrary([])
    monkeypatch.setenv("BMTRAIN_NCCL_LIBRARY", str(tmp_path / "missing.so"))
    with pytest.raises(RuntimeError, match=r"BMTRAIN_NCCL_LIBRARY: .*missing\.so"):
        _C.NcclLibrary([])
    monkeypatch.setenv("BMTRAIN_NCCL_LIBRARY", "libm.so.6")
    with pytest.raises(RuntimeError, match="has no function ncclGetVersion"):
        _C.NcclLibrary([])


def test_order_of_the_places(fake_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Path(shutil.copy(fake_path, tmp_path / "libnccl.so.2"))
    monkeypatch.setenv("BMTRAIN_NCCL_LIBRARY", str(other))
    assert _C.NcclLibrary([]).path == str(other)
    monkeypatch.delenv("BMTRAIN_NCCL_LIBRARY")
    # The fake is mapped, or what a torch built with CUDA brought along.
    found = _C.NcclLibrary([str(tmp_path / "missing.so")]).path
    assert str(Path(found).resolve()) in Path("/proc/self/maps").read_text()
    script = "import sys; from bmtrain import _C; print(_C.NcclLibrary(['/no/such/file', sys.argv[1]]).path)"
    told = run_process([sys.executable, "-c", script, other], directory=ROOT).stdout.strip()
    assert told == str(other) or torch.version.cuda is not None  # whose own copy comes first


def test_a_gpu_is_needed(fake: ctypes.CDLL) -> None:
    library = _C.NcclLibrary([])
    with pytest.raises(RuntimeError, match="expected a CUDA device, got meta"):
        _C.NcclCommunicator(library, library.make_unique_id(), 0, 1, "zero", torch.device("meta"), 1.0)


@pytest.fixture(scope="module")
def real_path() -> Path:
    """The library of the nvidia-nccl package: the one that is installed, else one that is fetched into build/."""
    folder = ROOT / "build" / "nccl"
    found = [Path(path) for path in find_candidates()] or sorted(folder.glob("nvidia/nccl/lib/libnccl.so*"))
    if not found:
        command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--target", folder]
        fetched = subprocess.run([*command, "nvidia-nccl-cu13==2.28.9"], timeout=240, check=False)
        found = sorted(folder.glob("nvidia/nccl/lib/libnccl.so*"))
        if fetched.returncode != 0 or not found:
            pytest.skip("nvidia-nccl is not installed and could not be fetched")
    return found[0]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a driver")
def test_real_library_without_a_driver(
    fake_path: Path, real_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BMTRAIN_NCCL_LIBRARY", str(real_path))
    library = _C.NcclLibrary([])
    assert library.version.startswith("2.")
    assert library.path == str(real_path)
    unique_id = library.make_unique_id()
    assert len(unique_id) == 128
    with pytest.raises(CommunicationError, match="connecting on group"):
        _C.NcclCommunicator(library, unique_id, 0, 1, "zero", CPU, 20.0)


@pytest.mark.slow
@pytest.mark.skipif(TOOLKIT is None, reason="no CUDA toolkit, whose headers that of NCCL includes")
def test_declarations_are_those_of_the_real_header(real_path: Path) -> None:
    includes = [f"-isystem{folder}/include" for folder in (real_path.parents[1], TOOLKIT)]
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
    run_process(
        [*command, "-Icsrc", *includes, "tests/cuda/host/nccl_header.cpp"], directory=ROOT, timeout=120
    )
