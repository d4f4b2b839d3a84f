"""A Slurm cluster on this machine: a controller and two node daemons, each with a loopback address of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .group import free_port

__all__ = ["slurm_cluster"]

_NODES = ("127.0.0.1", "127.0.0.2")
_PROGRAMS = ("slurmctld", "slurmd", "srun", "salloc", "scancel", "sinfo")
# Without munge, cgroups and accounting, which need services of the whole machine.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
"""


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yields the environment in which srun uses the cluster. Skips the test where Slurm is not installed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if missing := [name for name in _PROGRAMS if shutil.which(name, path=path) is None]:
        pytest.skip(
            f"Slurm is not installed: no {', '.join(missing)} (Debian: slurmctld, slurmd, slurm-client)"
        )
    (folder / "state").mkdir(parents=True)
    for node in _NODES:
        (folder / f"spool-{node}").mkdir()
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            folder=folder,
            user=getpass.getuser(),
            controller_port=free_port(),
            nodes="\n".join(
                f"NodeName={node} NodeHostname=localhost CPUs=2 Port={free_port()}" for node in _NODES
            ),
        )
    )
    environment = {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in _NODES)]
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        for command in commands:
            stack.enter_context(_daemon(command, environment, log.fileno()))
        _await_nodes(folder, environment)
        yield environment
        subprocess.run(
            ["scancel", "--full", f"--user={getpass.getuser()}"], env={**os.environ, **environment}
        )


@contextlib.contextmanager
def _daemon(command: list[str], environment: dict[str, str], log: int) -> Iterator[None]:
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_nodes(folder: Path, environment: dict[str, str]) -> None:
    """Until the controller has heard from both nodes."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        seen = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if seen.stdout.split() == ["idle"] * len(_NODES):
            return
        time.sleep(0.2)
    pytest.fail(
        f"the nodes of Slurm did not start: {seen.stdout}{seen.stderr}\n{(folder / 'log').read_text()}"
    )
