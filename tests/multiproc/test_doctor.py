"""The doctor finds injected problems and names the remedy; on a healthy installation it finds none."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import free_port, run_process, run_ranks

import bmtrain
from bmtrain._tools.checkup import Check, Surroundings, check_up, gpus, machine
from bmtrain._tools.checkup.gpus import prove
from bmtrain._tools.doctor import run_checks


def here(**changes) -> Surroundings:
    return replace(Surroundings(environ={"PATH": os.environ["PATH"]}), **changes)


def no_compiler(folder: Path, stack: ExitStack) -> Check:
    return machine.check_compiler(here(environ={"PATH": str(folder)}))


def stale_core(folder: Path, stack: ExitStack) -> Check:
    source = folder / "kernels.cpp"
    source.touch()
    os.utime(source, (time.time() + 3600, time.time() + 3600))
    return machine.check_extension(here(sources=folder))


def old_nccl(folder: Path, stack: ExitStack) -> Check:
    source, library = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text("int ncclGetVersion(int* version) { *version = 21805; return 0; }\n")
    compiler = shutil.which("cc") or shutil.which("c++")
    assert compiler is not None  # bmtrain could not have been built
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return machine.check_nccl(here(environ={"BMTRAIN_NCCL_LIBRARY": str(library)}))


def port_taken(folder: Path, stack: ExitStack) -> Check:
    listener = stack.enter_context(socket.socket())
    listener.bind(("", 0))
    listener.listen()
    return machine.check_port(here(environ={"MASTER_PORT": str(listener.getsockname()[1])}))


def unwritable_shared_memory(folder: Path, stack: ExitStack) -> Check:
    (folder / "shm").touch()  # nobody, root included, can write into a file as into a folder
    return machine.check_shared_memory(here(shared_memory=folder / "shm"))


def forced_too_high(folder: Path, stack: ExitStack) -> Check:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(machine, "highest_cpu_isa", lambda: "avx2")
    return machine.check_processor(here(environ={"BMTRAIN_CPU_ISA": "avx512"}))


def test_memory_nodes_are_those_of_the_processors_it_may_run_on(tmp_path: Path) -> None:
    for node, processors in enumerate(("0-1,4", "2-3,5", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(processors + "\n")
    for own, said in (({0, 4}, "this process on one"), ({1, 5}, "this process on 2"), ({9}, "on one")):
        check = machine.check_memory_nodes(here(nodes=tmp_path, processors=lambda own=own: own))
        assert said in check.found and check.found.startswith("3, ") and not check.is_problem
    assert "nothing to place" in machine.check_memory_nodes(here(nodes=tmp_path / "none")).found


def unknown_transport(folder: Path, stack: ExitStack) -> Check:
    return machine.check_transport(here(environ={"BMTRAIN_CPU_TRANSPORT": "tcp"}))


def shared_memory_refused(folder: Path, stack: ExitStack) -> Check:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr("bmtrain._ranks.shm_meeting.why_not", lambda: "memory files are not allowed here")
    return machine.check_transport(here(environ={"BMTRAIN_CPU_TRANSPORT": "shm"}))


def wrong_torch(folder: Path, stack: ExitStack) -> Check:
    return machine.check_torch(here(build={**bmtrain.build_info(), "torch": "2.1.0+cpu"}))


def unused_gpu(folder: Path, stack: ExitStack) -> Check:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setattr(torch.cuda, "is_available", lambda: False)
    surroundings = here(driver=folder, environ={})
    hidden = machine.check_cuda(here(driver=folder, environ={"CUDA_VISIBLE_DEVICES": ""}))
    assert not hidden.is_problem and "hides the GPUs" in hidden.found
    patch.setattr(torch.version, "cuda", None)
    without = machine.check_cuda(surroundings)
    assert "was built without CUDA" in without.found and "install a torch with CUDA" in without.remedy
    patch.setattr(torch.version, "cuda", "13.0")

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)\nmore")

    patch.setattr(torch.cuda, "init", refuse)
    return machine.check_cuda(surroundings)


def card_without_kernels(folder: Path, stack: ExitStack) -> Check:
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    for name, answer in {"is_available": True, "device_count": 1}.items():
        patch.setattr(torch.cuda, name, lambda answer=answer: answer)
    patch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla T4")
    patch.setattr(torch.cuda, "get_device_capability", lambda number: (7, 5))
    build = {**bmtrain.build_info(), "cuda": "13.0", "cuda_arch_list": "9.0"}
    patch.setattr("bmtrain._base.build.build_info", lambda: build)
    return machine.check_cuda(here(build=build))


def little_memory(folder: Path, stack: ExitStack) -> Check:
    return machine.check_memory(here(available_memory=lambda: 100 << 20))


def wrong_clock() -> list[Check]:
    shift = 100.0 * bmtrain.rank()
    return list(check_up(here(clock=lambda: time.time() + shift)))


def skewed_clocks(folder: Path, stack: ExitStack) -> Check:
    first, second = run_ranks(2, wrong_clock)
    assert first == second or all(len(checks) == len(first) for checks in (first, second))
    return next(check for check in first if check.name == "clocks")


def missing_rank(folder: Path, stack: ExitStack) -> Check:
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "bmtrain", "doctor", "--timeout", "2"]
    done = run_process(command, environment=launch, check=False)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    number = next(n for n, line in enumerate(lines) if "PROBLEM ranks" in line)
    return Check("ranks", lines[number], lines[number + 1])


@pytest.mark.parametrize(
    ("inject", "found", "remedy"),
    [
        (no_compiler, "no C++ compiler", "apt-get install g++"),
        (stale_core, "older than kernels.cpp", "pip install -e"),
        (old_nccl, "NCCL 2.18.5", "pip install nvidia-nccl"),
        (
            unused_gpu,
            "cannot use it: The NVIDIA driver on your system is too old",
            "install a driver for CUDA 13.0",
        ),
        (
            card_without_kernels,
            "built for compute capability 9.0, and Tesla T4 has 7.5",
            "TORCH_CUDA_ARCH_LIST=7.5",
        ),
        (port_taken, "cannot be served", "set MASTER_PORT to a free port"),
        (missing_rank, "1", "start every rank"),
        (unwritable_shared_memory, "cannot be written to", "--shm-size"),
        (unknown_transport, "expected 'shm', 'gloo' or 'auto', got 'tcp'", "unset BMTRAIN_CPU_TRANSPORT"),
        (shared_memory_refused, "memory files are not allowed here", "unset BMTRAIN_CPU_TRANSPORT"),
        (forced_too_high, "BMTRAIN_CPU_ISA=avx512", "unset BMTRAIN_CPU_ISA"),
        (wrong_torch, "built for torch 2.1.0", "install torch 2.1.0"),
        (skewed_clocks, "differ by 100.", "timedatectl"),
        (little_memory, "100 MiB available", "fewer ranks"),
    ],
)
def test_injected_problem_is_found_with_its_remedy(inject, found: str, remedy: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        check = inject(tmp_path, stack)
    assert check.is_problem
    assert found in check.found
    assert remedy in check.remedy


def healthy() -> list[Check]:
    return [check for check in check_up(here(sources=Path("/nowhere"))) if check.is_problem]


@pytest.mark.parametrize("world", [1, 2])
def test_healthy_ranks_have_no_problem(world: int) -> None:
    assert run_ranks(world, healthy) == [[]] * world


def carriers() -> list[str]:
    return [check.found for check in check_up(here()) if check.name in ("CPU transport", "ranks")]


def test_the_transport_is_told() -> None:
    for rank, found in enumerate(run_ranks(2, carriers)):
        assert found == [
            "shared memory between ranks of one host, Gloo between hosts",
            f"rank {rank} of 2, gloo over shm, cpu",
        ]
    forced = run_ranks(2, carriers, environment={"BMTRAIN_CPU_TRANSPORT": "gloo"})
    assert [found[1] for found in forced] == ["rank 0 of 2, gloo, cpu", "rank 1 of 2, gloo, cpu"]


@pytest.fixture
def one_failing_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def checks(surroundings: Surroundings) -> Iterator[Check]:
        yield Check("memory", "enough")
        yield Check("port", "taken", "take another")

    monkeypatch.setattr("bmtrain._tools.doctor.check_up", checks)
    yield


@pytest.mark.usefixtures("one_failing_check")
def test_a_problem_is_printed_with_its_remedy_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_checks(here()) == 1
    output = capsys.readouterr().out
    assert "ok      memory" in output
    assert "PROBLEM port           taken" in output
    assert "remedy:        take another" in output
    assert output.endswith("1 problem\n")


def proof() -> list[Check]:
    return list(prove(30.0))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_proof_of_devices(num_ranks: int) -> None:
    for checks in run_ranks(num_ranks, proof):
        assert [check.name for check in checks] == ["ranks", "kernels", "exchanges", "training"]
        assert not any(check.is_problem for check in checks), checks


def test_what_one_rank_finds_wrong_all_report() -> None:
    """... and none goes on alone."""
    for checks in run_ranks(2, proof_with_a_wrong_sum):
        assert [check.name for check in checks if check.is_problem] == ["kernels"]


def proof_with_a_wrong_sum() -> list[Check]:
    require = gpus._require
    gpus._require = lambda problems: require([*problems, *(["a wrong sum"] if bmtrain.rank() == 1 else [])])
    try:
        return proof()
    finally:
        gpus._require = require


def test_gpus_are_needed_for_their_proof() -> None:
    done = run_process(
        [sys.executable, "-m", "bmtrain", "doctor", "--gpus"],
        environment={"CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 1
    assert "no usable GPU" in done.stdout
