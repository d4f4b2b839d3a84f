"""The wheel of csrc/packaging/build_wheel.py: built for the torch that is installed, and used without a compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from harness import free_port, run_process
from harness.empty_environment import EmptyEnvironment

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "csrc" / "packaging" / "build_wheel.py"

TRAINING = ROOT / "tests" / "scripts" / "train_with_wheel.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("auditwheel", "patchelf"):
        if importlib.util.find_spec(tool) is None and shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    folder = tmp_path_factory.mktemp("wheel")
    # Without kernels its objects are those of the core that runs the tests.
    environment = {"BMTRAIN_CUDA": "0", "MAX_JOBS": str(os.cpu_count() or 1)}
    command = [sys.executable, SCRIPT, "--output", folder, "installed"]
    run_process(command, directory=ROOT, timeout=900, environment=environment)
    [built] = folder.iterdir()
    return built


@pytest.mark.slow
def test_what_is_in_a_wheel(wheel: Path) -> None:
    """A stripped core for the release of torch, which the metadata name, and nothing of this machine's age."""
    assert re.fullmatch(r"bmtrain-[^-]+-(cp\d+)-\1-manylinux_2_28_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 15 << 20
    major, minor = str(torch.__version__).split(".")[:2]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [about] = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(about).decode()
    assert f"Requires-Dist: torch<{major}.{int(minor) + 1},>=2.11" in metadata
    cores = [name for name in names if name.endswith(".so")]
    assert [str(Path(name).parent) for name in cores] == [f"bmtrain/_cores/torch{major}_{minor}"]
    assert f"bmtrain/_cores/torch{major}_{minor}/_build_config.json" in names
    assert not [name for name in names if name.startswith("tests") or "/testing" in name]


@pytest.mark.slow
def test_training_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    person = EmptyEnvironment(tmp_path, ("torch", "numpy"))
    path = str(person.bin)  # and nothing else
    person.run(f"python -m pip install --no-deps {wheel}", tmp_path, PATH=path)
    launch = f"torchrun --nproc-per-node 2 --master-port {free_port()} {TRAINING}"
    told = person.run(launch, tmp_path, PATH=path)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", told)]
    assert len(losses) == 20 and losses[-1] < losses[0] / 2
    [core] = re.findall(r"core (.+)", told)
    assert Path(core).is_relative_to(person.packages / "bmtrain" / "_cores")
    report = person.run("python -m bmtrain doctor", tmp_path, PATH=path)
    assert "PROBLEM" not in report and "torch.compile would need one" in report


def test_which_functions_are_of_old_systems() -> None:
    """The newest version that the platform has, of functions that have a newer one."""
    script = runpy.run_path(str(SCRIPT))
    table = """
       931: 00000000000392b0   181 FUNC    GLOBAL DEFAULT   17 pow@@GLIBC_2.29
       932: 00000000000130c0   353 FUNC    GLOBAL DEFAULT   17 pow@GLIBC_2.2.5
       933: 00000000000130c0   353 IFUNC   WEAK   DEFAULT   17 memcpy@@GLIBC_2.14
       934: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  ABS GLIBC_2.2.5
       935: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND free@GLIBC_2.2.5 (3)
    """
    assert script["functions_of"](table) == {
        "pow": ["GLIBC_2.29", "GLIBC_2.2.5"],
        "memcpy": ["GLIBC_2.14"],
    }
    known = ["GLIBC_2.2.5", "GLIBC_2.28", "GLIBC_2.29", "GLIBCXX_3.4.24", "GLIBCXX_3.4.25", "GLIBC_PRIVATE"]
    assert [script["is_old"](version) for version in known] == [True, True, False, True, False, False]
