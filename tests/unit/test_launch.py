"""What the launchers' variables mean (read without touching them)."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from types import MappingProxyType

import pytest
import torch

from bmtrain import _C
from bmtrain._ranks.launch import Launch, read_launch
from bmtrain._ranks.rendezvous import Peer
from bmtrain._ranks.rendezvous_store import _listen_on, _listens_on
from bmtrain.init import _share_processors

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "3",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "node[07-09],other",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "master",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def read(
    environ: dict[str, str], argv: tuple[str, ...] = ("train.py",), init_method: str = "env://"
) -> Launch:
    return read_launch(init_method, MappingProxyType(environ), argv)


def place(launch: Launch) -> tuple[int, int, int | None, int | None]:
    return launch.rank, launch.world_size, launch.local_rank, launch.local_size


@pytest.mark.parametrize(
    ("environ", "source", "meeting"),
    [
        (TORCHRUN, "torchrun", "master:1234"),
        (OPEN_MPI, "Open MPI", "localhost:10010"),
        (HYDRA, "MPICH", "localhost:10010"),
        (MVAPICH, "MVAPICH", "localhost:10010"),
        (SLURM, "Slurm", "node07:10010"),
    ],
)
def test_every_launcher(environ: dict[str, str], source: str, meeting: str) -> None:
    launch = read(environ)
    assert place(launch) == (3, 8, 1, 2)
    assert launch.source == source
    assert str(launch.meeting) == meeting
    assert launch.meeting.served == (source == "torchrun")


def test_without_a_launcher_it_is_one_process() -> None:
    launch = read({})
    assert place(launch) == (0, 1, 0, 1)
    assert str(launch.meeting) == "localhost:10010"


def test_the_first_source_wins() -> None:
    assert place(read({**SLURM, **HYDRA, "PMI_RANK": "5"})) == (5, 8, 1, 2)
    assert place(read({**SLURM, **OPEN_MPI, "RANK": "0", "WORLD_SIZE": "2"})) == (0, 2, None, None)


def test_slurm_counts_only_inside_a_step() -> None:
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert place(read(batch)) == (0, 1, 0, 1)


@pytest.mark.parametrize("text", ["2(x3)", "", "4,2"])
def test_slurm_tasks_per_node_that_say_nothing_about_this_host(text: str) -> None:
    assert read({**SLURM, "SLURM_NTASKS_PER_NODE": text}).local_size is None


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"),
    [("2", "0", 2), ("2(x3)", "2", 2), ("3(x2),2", "2", 2), ("3(x2),2", "1", 3), ("2(x3)", "3", None)],
)
def test_slurm_ranks_of_a_host_are_those_of_the_step(tasks: str, node: str, local_size: int | None) -> None:
    """The job's ``--ntasks-per-node`` holds no longer where a step has other numbers."""
    step = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node, "SLURM_NTASKS_PER_NODE": "1"}
    assert read(step).local_size == local_size


def test_pmi_variables_of_srun_are_slurms() -> None:
    launch = read({**SLURM, "PMI_RANK": "3", "PMI_SIZE": "8"})
    assert (launch.source, launch.meeting.host, place(launch)) == ("Slurm", "node07", (3, 8, 1, 2))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[07-09],other", "node07"),
        ("a,b", "a"),
        ("gpu-[3,5-7]", "gpu-3"),
        ("r[1-2]n[08,11]-ib,x", "r1n08-ib"),
        ("", "localhost"),
    ],
)
def test_slurm_meets_at_the_first_host(nodes: str, first: str) -> None:
    assert read({**SLURM, "SLURM_STEP_NODELIST": nodes}).meeting.host == first
    assert read({**SLURM, "SLURM_STEP_NODELIST": nodes, "MASTER_ADDR": "chosen"}).meeting.host == "chosen"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--local_rank=1",),
        ("--local-rank=1",),
        ("--local_rank", "1"),
        ("--lr", "2", "--local-rank", "1", "x"),
    ],
)
def test_local_rank_from_the_command_line(arguments: tuple[str, ...]) -> None:
    assert read({"RANK": "3", "WORLD_SIZE": "8"}, ("train.py", *arguments)).local_rank == 1
    assert read({**TORCHRUN, "LOCAL_RANK": "0"}, ("train.py", *arguments)).local_rank == 0


def test_a_local_rank_of_minus_one_is_the_default_of_an_option() -> None:
    assert read({"RANK": "3", "WORLD_SIZE": "8"}, ("train.py", "--local_rank=-1")).local_rank is None


def test_init_method_says_where() -> None:
    assert str(read(TORCHRUN, init_method="tcp://other:77").meeting) == "other:77"
    assert not read(TORCHRUN, init_method="tcp://other:77").meeting.served
    assert read(TORCHRUN, init_method="tcp://master:1234").meeting.served
    assert str(read(TORCHRUN, init_method="tcp://[::1]:77").meeting) == "[::1]:77"
    assert str(read(TORCHRUN, init_method="file:///tmp/meet").meeting) == "/tmp/meet"


def test_init_method_may_say_who() -> None:
    assert place(read({}, init_method="tcp://h:77?rank=1&world_size=4")) == (1, 4, None, None)
    assert place(read(TORCHRUN, init_method="env://?rank=2&world_size=4")) == (2, 4, 1, 2)
    assert place(read({"WORLD_SIZE": "4"}, init_method="env://?rank=2")) == (2, 4, None, None)


def test_a_restart_has_keys_of_its_own() -> None:
    again = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}
    other = {**TORCHRUN, "TORCHELASTIC_RUN_ID": "another"}
    assert len({read(environ).job for environ in (TORCHRUN, again, other)}) == 3


@pytest.mark.parametrize(
    ("environ", "init_method", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "env://", "variable RANK: expected an integer, got 'x'"),
        ({"RANK": "0"}, "env://", "variable WORLD_SIZE: expected an integer because RANK is set (torchrun)"),
        ({"WORLD_SIZE": "2"}, "env://", "variable RANK: expected an integer because WORLD_SIZE is set"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "env://", "variable RANK: expected at least 0, got -1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "env://", "variable WORLD_SIZE: expected at least 1, got 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "env://", "expected 0 <= rank < world size 2, got 2"),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, "env://", "expected less than the 2 ranks of this host, got 2"),
        ({**TORCHRUN, "MASTER_PORT": "65536"}, "env://", "MASTER_PORT: expected a port from 1 to 65535"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "env://", "MASTER_PORT: expected a port from 1 to 65535"),
        ({}, "http://h:1", "init_method: expected env://, tcp://host:port or file:///path, got 'http://h:1'"),
        ({}, "", "init_method: expected env://"),
        ({}, "tcp://h", "init_method: expected tcp://host:port with a port from 1 to 65535, got 'tcp://h'"),
        ({}, "tcp://h:99999", "init_method: expected tcp://host:port with a port"),
        ({}, "tcp://:5", "init_method: expected tcp://host:port with a port"),
        ({}, "file://", "init_method: expected the path of a file"),
        ({}, "tcp://h:5?rank=0", "init_method: expected both rank and world_size in the query"),
        (
            {},
            "tcp://h:5?rank=a&world_size=2",
            "'tcp://h:5?rank=a&world_size=2': expected an",
        ),
    ],
)
def test_what_makes_no_sense_is_named(environ: dict[str, str], init_method: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(environ, init_method=init_method)


def test_a_bad_local_rank_option_is_named() -> None:
    with pytest.raises(ValueError, match="command line option --local_rank: expected an integer, got 'a'"):
        read({"RANK": "0", "WORLD_SIZE": "2"}, ("train.py", "--local_rank", "a"))


def test_whether_this_process_listens_on_a_port() -> None:
    listen = "import socket, sys; s = socket.create_server(('', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", listen], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        foreign = int(other.stdout.readline())
        with socket.create_server(("127.0.0.1", 0)) as server:
            mine = server.getsockname()[1]
            before = len(os.listdir("/proc/self/fd"))
            assert _listens_on(mine)
            assert not _listens_on(foreign)
            assert len(os.listdir("/proc/self/fd")) == before
        assert not _listens_on(mine)
        other.communicate("\n", timeout=30)


@pytest.mark.parametrize(
    ("host", "one_host", "interfaces"),
    [
        ("127.0.0.1", False, {"127.0.0.1"}),
        ("localhost", False, {"::", "0.0.0.0"}),  # a name may lead to several
        ("localhost", True, {"::1", "127.0.0.1"}),  # for this host alone
        ("192.0.2.1", False, {"::", "0.0.0.0"}),  # of no host: reserved for documents
    ],
)
def test_the_rendezvous_is_served_where_the_launcher_says(
    host: str, one_host: bool, interfaces: set[str]
) -> None:
    with _listen_on(host, 0, one_host) as server:
        assert server.getsockname()[0] in interfaces


@pytest.mark.parametrize(
    ("environment", "workers"),
    [
        (
            {"TORCHELASTIC_RUN_ID": "job", "OMP_NUM_THREADS": "1"},
            5,
        ),  # torchrun's default: its share of 12 by 2
        ({"TORCHELASTIC_RUN_ID": "job", "OMP_NUM_THREADS": "8"}, 2),  # chosen: a quarter of torch's threads
        ({"OMP_NUM_THREADS": "1"}, 1),
    ],
)
def test_offloaded_updates_have_the_ranks_share_of_processors_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], workers: int
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cpus = ",".join(map(str, range(12)))
    peers = [Peer(rank, "host", 1, rank, cpus, [], 0) for rank in range(2)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
        _share_processors(peers[0], peers)
        assert _C.num_update_workers() == workers
        assert torch.get_num_threads() == int(environment["OMP_NUM_THREADS"])
    finally:
        torch.set_num_threads(before)
        _C.set_processor_share(len(os.sched_getaffinity(0)))
        _C.set_update_threads(0)
