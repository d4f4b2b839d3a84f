"""A device and an NCCL library that need neither a GPU nor NCCL (tests/cuda/fake)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_gpu import EmulatedGpu
from harness.fake_nccl import build_fake, install_one_of_two

from bmtrain import _C
from bmtrain._ranks import context
from bmtrain.optim.places.overlap import posting


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = build_fake(tmp_path_factory.mktemp("fake"))
    _C.install_device_runtime(str(path))
    return path


@pytest.fixture
def fake(fake_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The controls of the fake, at the end of fake_nccl.cpp."""
    monkeypatch.setenv("BMTRAIN_NCCL_LIBRARY", str(fake_path))
    controls = ctypes.CDLL(str(fake_path))
    controls.fake_reset()
    yield controls
    controls.fake_stuck(0, 0)
    controls.fake_async_error(0)


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    """The library's own kernels."""
    root = Path(__file__).resolve().parents[2]
    kernels = sorted((root / "csrc" / "cuda").glob("*.cu"))
    return EmulatedGpu(tmp_path_factory.mktemp("emulated"), kernels, [root / "tests/cuda/emulate/entry.cpp"])


@pytest.fixture
def one_of_two(fake: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """This process as rank 0 of 2, connected by the fake NCCL."""
    fake.fake_mirror(1)
    fake.fake_journal.restype = ctypes.c_char_p
    install_one_of_two()
    yield fake
    context.uninstall()


@pytest.fixture
def staged(one_of_two: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Parameters of the fake device, which the CPU's workers are not to reach but by copies."""
    monkeypatch.setattr(posting, "needs_staging", lambda device: True)
    yield one_of_two
    _C.disturb_updates(0)
