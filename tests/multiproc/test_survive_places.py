"""Ranks are replaced by new processes, or lost with their host: the bits are those of a run without a loss."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import run_process, run_ranks
from harness.namespaces import ip, joined_hosts

import bmtrain as bmt
from bmtrain._survive.joining import Joining, digest_of
from bmtrain.global_var import context

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "scripts" / "survive.py"


def ends(output: str) -> list[list[str]]:
    return [line.split()[1:] for line in output.splitlines() if line.startswith("end ")]


def undisturbed(steps: str) -> list[str]:
    """What one process prints, but for the number of ranks."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    [end] = ends(run_process([sys.executable, SCRIPT, steps], environment=environment).stdout)
    return end[1:]


def test_new_processes_take_the_places_of_lost_ranks(tmp_path: Path) -> None:
    """From four ranks to two, and back to four."""
    command = ["launch", "--nproc", "4", "--survive", "1", "--restarts", "2", SCRIPT, "grow"]
    done = run_process([sys.executable, "-m", "bmtrain", *command], timeout=280)
    found = ends(done.stdout)
    assert len(found) == 4
    assert done.stdout.count("bmtrain: a process has joined") == 2
    assert found == [["4", *undisturbed(found[0][1])]] * 4


def digests() -> list[str]:
    """Of one model with optimizers of several groups and arrays, which are the same each time but for one change."""
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)))
    first, second = (list(layer.parameters()) for layer in model)

    def sgd(*groups: list[torch.nn.Parameter], momentum: float = 0.0) -> bmt.optim.SGDOptimizer:
        made = bmt.optim.SGDOptimizer(groups[0], lr=1.0, momentum=momentum)
        for group in groups[1:]:
            made.add_param_group({"params": group})
        return made

    kinds = (
        sgd(first, second),
        sgd(first),
        sgd(second, first),
        sgd(first, second, momentum=0.5),
        sgd(first + second),
    )
    return [digest_of(context(), [optimizer]) for optimizer in (*kinds, sgd(first, second))]


def test_a_process_with_other_groups_is_told_apart() -> None:
    [(known, *others, again)] = run_ranks(1, digests)
    assert known == again
    assert len({known, *others}) == 5


def refused() -> str:
    """What a process is told whose optimizer has another group."""
    parameters = list(bmt.BMTrainModelWrapper(torch.nn.Linear(3, 3)).parameters())
    optimizers = [bmt.optim.SGDOptimizer(parameters[:1], lr=1.0)]
    said: list[dict[str, str]] = []
    newcomers = [({"digest": "another"}, SimpleNamespace(send=said.append)), None]
    members = SimpleNamespace(newcomer=lambda: newcomers[0], drop_newcomer=lambda: newcomers.pop(0))
    keeper = SimpleNamespace(optimizers=lambda: optimizers)
    job: Any = SimpleNamespace(_members=members, _num_places=2, _keeper=keeper)
    assert Joining.waiting_at(job, context()) == 0
    return said[0]["why"]


def test_a_process_with_other_groups_is_told_where_to_add_them() -> None:
    [why] = run_ranks(1, refused)
    assert "adds groups" in why and "before survive.steps()" in why


@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the program ip (Debian: iproute2)")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs the program unshare (Debian: util-linux)")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
@pytest.mark.parametrize(("way", "of_ranks"), [("kill", (0, 0, 1, 1, 1)), ("cut", (0, 0, 0, 1, 1))])
def test_a_host_is_lost(way: str, of_ranks: tuple[int, ...], tmp_path: Path) -> None:
    """The smaller of two, with rank 0 or without: each of its ranks has its copy on the other one."""
    lost = [rank for rank, host in enumerate(of_ranks) if of_ranks.count(host) == 2]
    kept = [rank for rank in range(5) if rank not in lost]
    with joined_hosts() as hosts:
        processes = []
        for rank, host in enumerate(of_ranks):
            namespace, interface = hosts[host]
            environment = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": interface,
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29517",
                "RANK": str(rank),
                "WORLD_SIZE": "5",
            }
            own_name = ["ip", "netns", "exec", namespace, "unshare", "--uts"]
            command = [*own_name, sys.executable, str(SCRIPT), "hosts", namespace, str(tmp_path)]
            processes.append(
                subprocess.Popen(
                    command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        try:
            while len(list(tmp_path.glob("*.trains"))) < 5:
                assert all(process.poll() is None for process in processes)
                time.sleep(0.1)
            if way == "kill":
                # At once: a loss in the recovery of another ends the job.
                for number in (signal.SIGSTOP, signal.SIGKILL):
                    for rank in lost:
                        processes[rank].send_signal(number)
            else:
                ip("-n", hosts[1][0], "link", "set", hosts[1][1], "down")
            outputs = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    found = [end for rank in kept for end in ends(outputs[rank])]
    assert len(found) == 3, outputs
    assert found == [["3", *undisturbed(found[0][1])]] * 3, outputs
    for rank in lost:
        assert processes[rank].returncode != 0
        assert not ends(outputs[rank])
