"""What is built, what is shipped, and what a user reads when it does not fit."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import types
from pathlib import Path

import environment
import pytest
import torch
from harness import run_process

import bmtrain
from bmtrain._base import build

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup_script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(monkeypatch: pytest.MonkeyPatch, folder: Path, **built: object) -> None:
    """Pretend that the core was built like this."""
    file = folder / "_build_config.json"
    file.write_text(json.dumps(built))
    monkeypatch.setattr(build, "_PACKAGE", folder)


def test_build_info_describes_this_build() -> None:
    info = bmtrain.build_info()
    assert info["version"] == bmtrain.__version__
    assert info["torch"] == info["running_torch"] == str(torch.__version__)
    assert Path(str(info["extension"])).is_relative_to(ROOT)
    assert not info["warnings"]
    assert "-ffp-contract=off" in str(info["flags"])
    assert "-march" not in str(info["flags"])
    assert "fast-math" not in str(info["flags"])


def test_core_of_another_torch_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record(monkeypatch, tmp_path, torch="2.1.0+cpu", cuda=None)
    with pytest.raises(ImportError, match=r"built for torch 2\.1\.0\+cpu, but torch .*pip install") as caught:
        build.load_extension()
    assert str(torch.__version__) in str(caught.value)


@pytest.mark.parametrize(
    ("built", "running", "fits"),
    [
        ({}, ("2.13.0", None), True),
        ({"torch": "2.13.0+cpu", "cuda": None}, ("2.13.0+cu130", "13.0"), True),
        ({"torch": "2.13.0", "cuda": "13.0"}, ("2.13.0", "13.2"), True),
        ({"torch": "2.13.0", "cuda": "13.0"}, ("2.13.0+cpu", None), False),
        ({"torch": "2.13.0", "cuda": "13.0"}, ("2.13.0", "12.8"), False),
        ({"torch": "2.12.0", "cuda": None}, ("2.13.0", None), False),
        # Of a wheel, which goes without kernels where their CUDA is not torch's.
        ({"torch": "2.13", "cuda": "13.0"}, ("2.13.1+cpu", None), True),
        ({"torch": "2.13", "cuda": "13.0"}, ("2.13.0", "12.8"), True),
        ({"torch": "2.13", "cuda": "13.0"}, ("2.14.0", "13.0"), False),
    ],
)
def test_which_torch_fits(built: dict[str, str | None], running: tuple[str, str | None], fits: bool) -> None:
    assert (build._mismatch(built, *running) == "") == fits


def make_wheel_cores(folder: Path) -> None:
    """As in a wheel for torch 2.9, 2.10 and the release that is installed."""
    installed = "_".join(str(torch.__version__).split(".")[:2])
    for release in ("2_9", "2_10", installed):
        place = folder / "_cores" / f"torch{release}"
        place.mkdir(parents=True)
        config = {"torch": release.replace("_", "."), "cuda": "13.0", "cuda_arch_list": "9.0+PTX"}
        (place / "_build_config.json").write_text(json.dumps(config))


def test_a_wheel_has_a_core_for_each_release_of_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_wheel_cores(tmp_path)
    monkeypatch.setattr(build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu130")
    found = []

    def find(name: str) -> types.ModuleType:
        found.append(bmtrain.__path__[-1])
        return types.SimpleNamespace(use_cuda_kernels=lambda: found.append("kernels"))  # type: ignore[return-value]

    monkeypatch.setattr(bmtrain, "__path__", list(bmtrain.__path__))
    monkeypatch.setattr(importlib, "import_module", find)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    build.load_extension()
    assert found == [str(tmp_path / "_cores" / "torch2_10"), "kernels"]
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    build.load_extension()
    assert found[2:] == [str(tmp_path / "_cores" / "torch2_10")]
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(
        ImportError, match=r"cores for torch 2\.9, 2\.10, 2\.\d+, but torch 2\.99\.0 is.*pip install"
    ):
        build.load_extension()


def test_kernels_for_another_cuda_are_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Or `check_card` would refuse cards on account of kernels that nobody uses."""
    make_wheel_cores(tmp_path)
    monkeypatch.setattr(build, "_PACKAGE", tmp_path)
    monkeypatch.setattr(build, "load_extension", lambda: types.SimpleNamespace(__file__="_C.so"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert (build.build_info()["cuda"], build.build_info()["cuda_arch_list"]) == (None, None)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    assert (build.build_info()["cuda"], build.build_info()["cuda_arch_list"]) == ("13.0", "9.0+PTX")


def test_missing_core_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> types.ModuleType:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", find_nothing)
    # As somebody does in a clone.
    with pytest.raises(ImportError, match="another folder; else run `pip install -e"):
        build.load_extension()
    monkeypatch.setattr(build, "__file__", "/usr/lib/python3/site-packages/bmtrain/_base/build.py")
    with pytest.raises(
        ImportError, match="not built for this Python: in its source tree, run `pip install .`"
    ):
        build.load_extension()


def test_import_is_light_and_silent() -> None:
    """Heavy optional packages stay out, no thread starts, no device is touched, nothing is printed."""
    program = """
import sys, threading, torch
before = set(sys.modules)
import bmtrain
heavy = {"torch._dynamo", "torch._inductor", "tensorboard", "matplotlib", "rich", "safetensors", "triton"}
assert not heavy & (set(sys.modules) - before), heavy & (set(sys.modules) - before)
assert threading.active_count() == 1, threading.enumerate()
assert not torch.cuda.is_initialized()
ours = [name for name in sys.modules if name.partition(".")[0] == "bmtrain"]
assert len(ours) <= 100, (len(ours), ours)
"""
    assert (
        run_process([sys.executable, "-W", "error::UserWarning", "-c", program], directory=ROOT).stdout == ""
    )


def test_every_name_of_the_package_is_there() -> None:
    """Also a name that loads its module on first use, in any order, for `dir` and for type checkers."""
    program = """
import random, bmtrain
names = [*bmtrain.__all__, *bmtrain._ON_FIRST_USE]
assert set(names) <= set(dir(bmtrain))
random.shuffle(names)
for name in names:
    getattr(bmtrain, name)
import bmtrain.plan, bmtrain.synchronize
assert bmtrain.plan.estimate and callable(bmtrain.synchronize) and bmtrain.distributed.checkpoint.save
for name in bmtrain._ON_FIRST_USE:
    assert getattr(bmtrain, name).__name__ == f"bmtrain.{name}"
for name, end in {"optin": "'optin'", "Optin": "'Optin'", "OptimManager": ": it is bmtrain.optim.OptimManager"}.items():
    try:
        getattr(bmtrain, name)
    except AttributeError as error:
        assert str(error).endswith(end)
    else:
        raise AssertionError
"""
    run_process([sys.executable, "-c", program], directory=ROOT)
    tree = ast.parse((ROOT / "bmtrain" / "__init__.py").read_text())
    [block, _] = [node for node in tree.body if isinstance(node, ast.If)]
    shown = {
        (node.module, name.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    table = bmtrain._ON_FIRST_USE
    assert shown == {(None, name) for name in table} | {(m, name) for m in table for name in table[m]}


def test_stubs_name_what_the_core_has() -> None:
    from bmtrain import _C

    tree = ast.parse((ROOT / "bmtrain" / "_C.pyi").read_text())
    declared = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    constants = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert constants | set(declared) == {name for name in vars(_C) if not name.startswith("_")}
    for name, node in declared.items():
        if isinstance(node, ast.ClassDef):
            members = {m.name for m in node.body if isinstance(m, ast.FunctionDef | ast.ClassDef)}
            missing = [m for m in members if not hasattr(getattr(_C, name), m)]
            assert not missing, (name, missing)


def test_build_requirements_leave_torch_out() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    requirements = text.partition("requires = [")[2].partition("]")[0]
    assert "setuptools" in requirements
    assert "torch" not in requirements


def test_cuda_sources_are_for_cuda_builds(setup_script: types.ModuleType, tmp_path: Path) -> None:
    for name in (
        "a.cpp",
        "a.h",
        "cuda/b.cu",
        "cuda/c_cuda.cpp",
        "comm/d_cuda.cpp",
        "comm/e.cpp",
        "testing/f.cpp",
    ):
        (tmp_path / "csrc" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "csrc" / name).touch()
    setup_script.ROOT = tmp_path
    assert setup_script.find_sources(cuda=False, testing=False) == ["csrc/a.cpp", "csrc/comm/e.cpp"]
    assert setup_script.find_sources(cuda=False, testing=True)[2:] == ["csrc/testing/f.cpp"]
    everything = {
        "csrc/a.cpp",
        "csrc/comm/e.cpp",
        "csrc/comm/d_cuda.cpp",
        "csrc/cuda/b.cu",
        "csrc/cuda/c_cuda.cpp",
    }
    assert set(setup_script.find_sources(cuda=True, testing=False)) == everything


def test_a_wheel_has_cores_without_this_machine(
    setup_script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One for each torch that is named, with what old systems lack; each asks for no newer torch."""
    for name in ("2.11.0+cu130", "2.13.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "version.py").write_text(f"__version__ = {name!r}")
    plain = setup_script.make_extension(tmp_path / "2.13.1", cuda=True, testing=False)
    assert plain.name == "bmtrain._C" and "cudart" in plain.libraries
    torches = [tmp_path / "2.11.0+cu130", tmp_path / "2.13.1"]
    monkeypatch.setenv("BMTRAIN_TORCHES", ":".join(map(str, torches)))
    cores = [setup_script.make_extension(folder, cuda=True, testing=False) for folder in torches]
    assert [core.name for core in cores] == ["bmtrain._cores.torch2_11._C", "bmtrain._cores.torch2_13._C"]
    assert "cudart_static" in cores[0].libraries and not {"c10_cuda", "cudart"} & set(cores[0].libraries)
    assert set(cores[0].sources) - set(plain.sources) == {"csrc/packaging/old_glibc.cpp"}
    distribution = setup_script.Distribution({"name": "x"})
    distribution.install_requires = ["torch>=2.11", "other"]
    distribution.parse_config_files([])
    assert distribution.install_requires == ["torch>=2.11,<2.14", "other"]


def test_files_without_torch_are_known(setup_script: types.ModuleType, tmp_path: Path) -> None:
    """By what they include, themselves or through others."""
    core = tmp_path / "csrc"
    core.mkdir()
    for name, text in {
        "plain.h": "#include <vector>",
        "tensor.h": "#include <ATen/core/Tensor.h>",
        "a.cpp": '#include "plain.h"\n#include <torchless.h>',
        "b.cpp": '#include "plain.h"\n#include "tensor.h"',
        "c.cpp": "#include <Python.h>",
    }.items():
        (core / name).write_text(text)
    setup_script.ROOT = tmp_path
    found = [setup_script.includes_torch(core / f"{letter}.cpp") for letter in "abc"]
    assert found == [False, True, True]


def test_machinery_of_tests_is_built_in_a_checkout_only(
    setup_script: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BMTRAIN_TESTING", raising=False)
    assert setup_script.wants_testing(["--quiet", "build_ext", "--inplace"])
    assert setup_script.wants_testing(["editable_wheel"])
    assert not setup_script.wants_testing(["bdist_wheel"])
    monkeypatch.setenv("BMTRAIN_TESTING", "1")
    assert setup_script.wants_testing(["bdist_wheel"])
    monkeypatch.setenv("BMTRAIN_TESTING", "0")
    assert not setup_script.wants_testing(["build_ext", "--inplace"])
    monkeypatch.setenv("BMTRAIN_TESTING", "yes")
    with pytest.raises(SystemExit, match="BMTRAIN_TESTING: expected 0 or 1, got 'yes'"):
        setup_script.wants_testing([])


def test_machinery_of_tests_is_named_in_its_folder_only() -> None:
    for path in (ROOT / "csrc").rglob("*.*"):
        if path.parent.name != "testing" and path.suffix != ".pyc":
            text = path.read_text(encoding="utf-8")
            assert not re.search("set_random_delays|disturb_updates|install_device_runtime", text), path


def test_an_old_torch_is_refused_before_anything_is_downloaded(
    setup_script: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.5.1+cu121")
    with pytest.raises(SystemExit, match=r"needs torch >= 2\.11, .* has 2\.5\.1"):
        setup_script.require_torch()


def test_an_old_python_is_named(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")  # its answer to the question for its version
    old.chmod(0o755)
    script = ["bash", "-c", f"cd {tmp_path}; . {ROOT}/tests/env.sh"]
    done = run_process(script, environment={"BMTRAIN_PYTHON": str(old)}, check=False)
    assert done.returncode != 0
    assert f"set-up: {old} is not a Python >= 3.10; name one in BMTRAIN_PYTHON" in done.stdout
    assert len(done.stdout.splitlines()) <= 2, done.stdout


def test_a_build_without_a_compiler_names_it(
    setup_script: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "nope-g++ -O2")
    with pytest.raises(SystemExit, match=r"needs a C\+\+20 compiler, and there is no nope-g\+\+ \(Debian"):
        setup_script.require_compiler()


def test_files_with_the_same_headers_are_compiled_as_one(
    setup_script: types.ModuleType, tmp_path: Path
) -> None:
    """Each source once, with its bindings; instruction sets and CUDA alone; an unchanged group keeps its time."""
    wanted = {
        "comm": ["bindings/comm", "bindings/guard", "comm/gloo/link", "comm/transport", "shard/graph"],
        "shard": [
            *("bindings/module", "bindings/shard", "common/check", "disk/file"),
            *("ops/ops", "optim/adam", "shard/memory"),
        ],
        "testing": ["testing/disturbance"],  # builds without it have the other groups as they are
    }
    names = sorted(f"csrc/{name}.cpp" for each in wanted.values() for name in each)
    alone = ["csrc/cpu/avx2.cpp", "csrc/ops/ops_cuda.cpp", "csrc/cuda/adam.cu"]
    found = setup_script.group_sources([*names, *alone], tmp_path)
    assert found[: len(alone)] == alone
    groups = [Path(name) for name in found[len(alone) :]]
    assert {
        group.stem: re.findall(r'#include "(.*)\.cpp"\n', group.read_text()) for group in groups
    } == wanted
    times = [group.stat().st_mtime_ns for group in groups]
    setup_script.group_sources([*names, *alone], tmp_path)
    assert [group.stat().st_mtime_ns for group in groups] == times


def test_the_build_says_how_far_it_is_and_keeps_warnings(
    setup_script: types.ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those of an object stay until it is compiled again without."""
    file = tmp_path / "warnings.json"

    def build(*lines: str) -> dict[str, str]:
        with setup_script.CompilerOutput(file):
            subprocess.run(["printf", "%s\\n", *lines], check=True)
        found: dict[str, str] = json.loads(file.read_text())
        return found

    first, second = "@compiled 1 2 c++ -c a.cpp -o a.o", "@compiled 2 2 c++ -c b.cpp -o b.o"
    found = build(first, "a.cpp:1: warning: unused", second, "note: nothing")
    assert list(found) == ["a.o"] and "unused" in found["a.o"]
    told = capfd.readouterr().out
    assert (
        "compiling: 2 of 2 files" in told and "a.cpp:1: warning: unused" in told and "@compiled" not in told
    )
    assert told.count("compiling:") == 1  # a pipe gets a line every eight seconds, and the last one
    assert list(build("ninja: no work to do.")) == ["a.o"]
    assert build(first) == {}


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ([], "8.0;9.0+PTX"),
        ([(9, 0)] * 8, "8.0;9.0+PTX"),
        ([(8, 9), (7, 5), (7, 5), (6, 1)], "7.5;8.0;9.0+PTX"),
    ],
)
def test_kernels_are_built_for_the_cards_of_this_machine(
    cards: list[tuple[int, int]],
    expected: str,
    setup_script: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(torch.cuda, "get_device_capability", cards.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])
    assert setup_script.architectures() == expected


def test_cuda_on_request_fails_loudly(
    setup_script: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = types.SimpleNamespace(__version__="2.13.0+cpu", version=types.SimpleNamespace(cuda=None))
    monkeypatch.setenv("BMTRAIN_CUDA", "1")
    with pytest.raises(SystemExit, match=r"BMTRAIN_CUDA=1.*torch 2\.13\.0\+cpu is not"):
        setup_script.wants_cuda(without)
    monkeypatch.setenv("BMTRAIN_CUDA", "yes")
    with pytest.raises(SystemExit, match="expected 0 or 1, got 'yes'"):
        setup_script.wants_cuda(without)
    monkeypatch.setenv("BMTRAIN_CUDA", "0")
    assert setup_script.wants_cuda(without) is False


@pytest.mark.parametrize("headers", ["include", f"targets/{platform.machine()}-linux/include"])
def test_toolkits_of_both_layouts_are_found(
    setup_script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, headers: str
) -> None:
    for file in ("bin/nvcc", f"{headers}/cuda_runtime_api.h"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert setup_script.find_toolkit() == tmp_path
    assert setup_script.find_headers(tmp_path) == tmp_path / headers


def test_a_build_without_kernels_says_so(
    setup_script: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BMTRAIN_CUDA", raising=False)
    monkeypatch.setattr(setup_script, "find_toolkit", lambda: None)
    version = types.SimpleNamespace(cuda="13.0")
    with_cuda = types.SimpleNamespace(version=version, __version__="2.13.0+cu130")
    assert setup_script.wants_cuda(with_cuda) is False
    assert "WITHOUT CUDA kernels" in capsys.readouterr().err
    monkeypatch.setenv("BMTRAIN_CUDA", "0")
    assert setup_script.wants_cuda(with_cuda) is False
    assert capsys.readouterr().err == ""


def test_isolated_build_finds_the_torch_around_it(
    setup_script: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONNOUSERSITE", "1")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    found = setup_script.outer_path()
    assert str(Path(torch.__file__).parents[1]) in found
    assert "/nowhere" not in found


def test_build_without_torch_says_what_to_run(
    setup_script: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_script, "outer_path", list)
    monkeypatch.setattr(setup_script, "find_torch", lambda: False)
    with pytest.raises(SystemExit, match=r"-m pip install torch==\d"):
        setup_script.require_torch()


def test_setup_py_install_names_its_successor() -> None:
    result = run_process([sys.executable, "setup.py", "install"], directory=ROOT, check=False)
    assert result.returncode != 0
    assert "pip install ." in result.stdout


def test_set_up_sees_what_is_missing() -> None:
    requirements = [
        f"torch=={importlib.metadata.version('torch')}",  # which a wheel has without its +cu130
        "torch>=2.11",
        "torch==0.0.1",
        "no-such-distribution>=3; extra == 'test'",
        'no-such-other; extra == "docs"',
        "pytest[dev]>=9; extra == 'test'",
        "pytest[dev]==0.0.1; extra == 'test'",
    ]
    found = environment.missing_requirements(requirements, ["test"])
    assert found == ["torch==0.0.1", "no-such-distribution>=3", "pytest[dev]==0.0.1"]


def test_set_up_rebuilds_a_stale_core(monkeypatch: pytest.MonkeyPatch) -> None:
    version = str(torch.__version__)
    assert environment.core_is_stale("2.1.0")
    core = Path(str(bmtrain.build_info()["extension"]))
    monkeypatch.setattr(environment, "ROOT", core.parents[1])
    if bmtrain.build_info()["cuda"] is None:
        monkeypatch.setenv("BMTRAIN_CUDA", "1")
        assert environment.core_is_stale(version)


@pytest.mark.parametrize(
    ("newer", "is_stale"), [("csrc/comm/exchange.h", True), ("csrc/packaging/__pycache__/a.pyc", False)]
)
def test_what_makes_a_core_stale(
    newer: str, is_stale: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = f"bmtrain/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    for name in ("setup.py", newer, "bmtrain/_build_config.json", core):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"torch": "2.13.0", "cuda": null, "testing": true}')
    os.utime(tmp_path / newer, (2e9, 2e9))
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.delenv("BMTRAIN_CUDA", raising=False)
    assert environment.core_is_stale("2.13.0") == is_stale


@pytest.mark.slow
def test_source_distribution_can_be_built_from(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path]
    run_process(command, directory=ROOT, timeout=120)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "csrc", "bmtrain", "tests", "setup.py", "pyproject.toml", "LICENSE"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    expected = tracked or [
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "csrc/bindings/bindings.h",
        "bmtrain/py.typed",
    ]
    assert [name for name in expected if name not in names] == []
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
