"""A newcomer's walk, done from the pages: install, quick start, own model and data, save, resume, convert.

The environment is empty but for torch, what torch needs and the tools of the build, which are linked from the one that
runs the tests: nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import free_port, run_process
from harness.empty_environment import EmptyEnvironment

ROOT = Path(__file__).parents[2]
PRESENT = ("torch", "setuptools", "ninja", "numpy")

pytestmark = pytest.mark.slow


def blocks(page: str, language: str) -> list[str]:
    """The blocks of code of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def command(page: str, start: str) -> str:
    """The one line of a page's shell blocks that starts so, without its remark; a continued line is one."""
    text = "\n".join(blocks(page, "shell")).replace("\\\n", " ")
    [found] = {line.partition("  #")[0].strip() for line in text.splitlines() if line.startswith(start)}
    return found


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> EmptyEnvironment:
    """Has installed bmtrain, as the README says, but from a wheel: `pip install .` here would compile all anew."""
    person = EmptyEnvironment(tmp_path_factory.mktemp("newcomer"), PRESENT)
    make = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", person.folder, ROOT]
    environment = {"MAX_JOBS": str(os.cpu_count() or 1)}
    run_process([sys.executable, *make], directory=person.folder, timeout=600, environment=environment)
    [wheel] = person.folder.glob("bmtrain-*.whl")
    person.run(command("README.md", "pip install torch"), person.folder)  # there already
    person.run(command("README.md", "pip install .").replace(" .", f" {wheel}"), person.folder)
    return person


def test_what_is_installed(newcomer: EmptyEnvironment) -> None:
    """It is this version, typed, with its core, and not the tree of the tests."""
    installed = newcomer.packages / "bmtrain"
    assert (installed / "py.typed").exists()
    assert list(installed.glob("_C.*.so"))
    for needed in ("_C.pyi", "_build_config.json"):
        assert (installed / needed).exists()
    [about] = newcomer.packages.glob("bmtrain-*.dist-info")
    assert {path.name for path in newcomer.packages.glob("bmtrain*")} == {"bmtrain", about.name}
    modules = {p.relative_to(ROOT / "bmtrain") for p in (ROOT / "bmtrain").rglob("*.py")}
    assert {p.relative_to(installed) for p in installed.rglob("*.py")} == modules
    told = newcomer.run("python -c 'import bmtrain; print(bmtrain.__file__)'", newcomer.folder)
    assert Path(told.strip()).is_relative_to(newcomer.packages)


@pytest.mark.parametrize("launcher", ["torchrun --nnodes", "python3 -m torch.distributed.launch", "alone"])
def test_quick_start(newcomer: EmptyEnvironment, tmp_path: Path, launcher: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    part = text.split("<!-- quick start", 1)[1].split("<!-- end of quick start -->", 1)[0]
    program = "\n\n".join(re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL))
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    line = "python3 train.py" if launcher == "alone" else command("README.md", launcher)
    port = str(free_port())
    told = newcomer.run(line, tmp_path, NNODES="1", NODE_RANK="0", RANKS_PER_NODE="2", MASTER_PORT=port)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", told)]
    assert len(losses) == 100
    assert losses[-1] < losses[0] / 2
    assert "table" in torch.load(tmp_path / "model.pt", weights_only=True)


def test_own_model_and_data_saved_and_resumed(newcomer: EmptyEnvironment, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("\n\n".join(blocks("docs/tutorial/own.md", "python")), encoding="utf-8")
    line = command("docs/tutorial/own.md", "torchrun")
    first = re.findall(r"epoch (\d+)  loss ([0-9.]+)", newcomer.run(line, tmp_path))
    second = re.findall(r"epoch (\d+)  loss ([0-9.]+)", newcomer.run(line, tmp_path))
    assert [int(epoch) for epoch, _ in first + second] == [0, 1, 2, 3]
    assert float(second[-1][1]) < float(first[0][1])
    keys = torch.load(tmp_path / "own.pt", weights_only=True).keys()
    assert {"layers.0.norm.weight", "layers.1.down.bias", "head.weight"} <= set(keys)
    newcomer.run("python -m bmtrain convert own.pt weights --to safetensors", tmp_path)
    newcomer.run("python -m bmtrain convert weights back.pt", tmp_path)
    own, back = (torch.load(tmp_path / name, weights_only=True) for name in ("own.pt", "back.pt"))
    assert list(own) == list(back)
    assert all(torch.equal(own[key], back[key]) for key in own)


def test_nothing_of_the_test_environment_is_seen(newcomer: EmptyEnvironment) -> None:
    found = subprocess.run(
        [newcomer.bin / "python", "-c", "import pytest"],
        cwd=newcomer.folder,
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert found.returncode != 0
