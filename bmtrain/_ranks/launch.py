"""The launcher's environment variables: rank, world size, local rank, address of the rendezvous."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, urlsplit

DEFAULT_PORT = 10010


@dataclass(frozen=True)
class Meeting:
    """The address at which ranks exchange addresses before they are connected.

    Attributes:
        scheme: ``"tcp"`` (a key-value server at host:port) or ``"file"`` (a file that all ranks see).
        host: host of rank 0, or of the launcher's server.
        port: its port.
        path: the file, for ``"file"``.
        served: whether the launcher already serves host:port, so that every rank joins as a client.
    """

    scheme: str
    host: str = "localhost"
    port: int = DEFAULT_PORT
    path: str = ""
    served: bool = False

    def __str__(self) -> str:
        if self.scheme == "file":
            return self.path
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Launch:
    """The place of this process in its job, from the environment.

    Attributes:
        source: the launcher, for messages.
        rank: number of this process.
        world_size: number of processes.
        local_rank: number among the processes of its host; None if unknown.
        local_size: processes on its host; None if unknown.
        meeting: the address of the rendezvous.
        job: distinguishes this attempt of this job from others that use the same address.
    """

    source: str
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    meeting: Meeting
    job: str

    @property
    def serves(self) -> bool:
        """Whether the store of the meeting is served by this process."""
        return self.meeting.scheme == "tcp" and self.rank == 0 and not self.meeting.served


@dataclass(frozen=True)
class _Source:
    """The variables of one launcher; the first source with any of its rank and size variables wins."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    marker: str | None = None  # the source counts only where this variable is set
    job: tuple[str, ...] = ()  # variables that name the job, equal on all its ranks


_OPEN_MPI, _MVAPICH = "OMPI_COMM_WORLD", "MV2_COMM_WORLD"
_SOURCES = (
    _Source("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", job=("TORCHELASTIC_RUN_ID",)),
    _Source("Open MPI", f"{_OPEN_MPI}_RANK", f"{_OPEN_MPI}_SIZE", f"{_OPEN_MPI}_LOCAL_RANK",
            f"{_OPEN_MPI}_LOCAL_SIZE", job=("PMIX_NAMESPACE",)),
    _Source("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Source("MVAPICH", f"{_MVAPICH}_RANK", f"{_MVAPICH}_SIZE", f"{_MVAPICH}_LOCAL_RANK", f"{_MVAPICH}_LOCAL_SIZE"),
    _Source("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
            marker="SLURM_STEP_ID", job=("SLURM_JOB_ID", "SLURM_STEP_ID")),
)  # fmt: skip
_TORCHRUN, _, _MPICH, _, _SLURM = _SOURCES


def read_launch(init_method: str, environ: Mapping[str, str], argv: Sequence[str]) -> Launch:
    """Reads this process's place from the launcher's variables; changes neither ``environ`` nor ``argv``.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``; ``?rank=R&world_size=W`` in it wins
            over the environment.
        environ: the environment variables.
        argv: command line, searched for ``--local_rank=N`` (``torch.distributed.launch`` passes it).

    Raises:
        ValueError: a variable or URL that makes no sense, naming it.

    Example:
        >>> launch = read_launch("env://", {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, [])
        >>> launch.rank, launch.world_size, str(launch.meeting)
        (1, 2, 'localhost:10010')
    """
    url, query = _parse_url(init_method)
    source = _find_source(environ)
    rank, world_size = query.get("rank"), query.get("world_size")
    if source is not None:
        # What the URL says is not looked up: a variable it overrides may be absent.
        rank = _integer(environ, source.rank, source, minimum=0) if rank is None else rank
        world_size = (
            _integer(environ, source.world_size, source, minimum=1) if world_size is None else world_size
        )
    elif (rank is None) != (world_size is None):
        raise ValueError(
            f"init_method: expected both rank and world_size in the query, or a launcher, got {init_method!r}"
        )
    rank = 0 if rank is None else rank
    world_size = 1 if world_size is None else world_size
    if rank >= world_size:
        name = source.name if source else "init_method"
        raise ValueError(f"rank ({name}): expected 0 <= rank < world size {world_size}, got {rank}")

    local_rank, local_size = _read_local(source, environ, argv)
    if world_size == 1:
        local_rank, local_size = local_rank or 0, 1
    if local_rank is not None and local_size is not None and local_rank >= local_size:
        raise ValueError(
            f"local rank: expected less than the {local_size} ranks of this host, got {local_rank} "
            f"(rank {rank} of {world_size})"
        )
    return Launch(
        source=source.name if source else "no launcher",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        meeting=_read_meeting(url, init_method, source, environ),
        job=_job(source, environ),
    )


def _find_source(environ: Mapping[str, str]) -> _Source | None:
    for source in _SOURCES:
        if source.marker is not None and not environ.get(source.marker):
            continue
        if environ.get(source.rank) or environ.get(source.world_size):
            return _SLURM if source is _MPICH and _srun_sets_pmi(environ) else source
    return None


def _srun_sets_pmi(environ: Mapping[str, str]) -> bool:
    """Whether ``srun --mpi=pmi2`` has set the PMI variables; the launcher of MPICH may run inside a step too."""
    pairs = ((_MPICH.rank, _SLURM.rank), (_MPICH.world_size, _SLURM.world_size))
    return bool(environ.get("SLURM_STEP_ID")) and all(environ.get(a) == environ.get(b) for a, b in pairs)


def _integer(environ: Mapping[str, str], name: str, source: _Source, minimum: int) -> int:
    text = environ.get(name)
    if not text:
        other = source.world_size if name == source.rank else source.rank
        raise ValueError(
            f"environment variable {name}: expected an integer because {other} is set ({source.name}), "
            "got nothing"
        )
    return _parse_integer(text, f"environment variable {name}", minimum)


def _parse_integer(text: str, what: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"{what}: expected an integer, got {text!r}") from None
    if value < minimum:
        raise ValueError(f"{what}: expected at least {minimum}, got {value}")
    return value


def _read_local(
    source: _Source | None, environ: Mapping[str, str], argv: Sequence[str]
) -> tuple[int | None, int | None]:
    """Local rank and size; None where only a comparison of host names can determine them."""
    if source is None:
        return _local_rank_argument(argv), None
    local_rank = local_size = None
    if environ.get(source.local_rank):
        local_rank = _integer(environ, source.local_rank, source, minimum=0)
    elif source is _TORCHRUN:
        local_rank = _local_rank_argument(argv)
    text = environ.get(source.local_size, "")
    if source is _SLURM:
        local_size = _tasks_of_node(environ)
    elif text:
        local_size = _parse_integer(text, f"environment variable {source.local_size}", minimum=1)
    return local_rank, local_size


def _tasks_of_node(environ: Mapping[str, str]) -> int | None:
    """Tasks of a Slurm step on this node: its place in a list such as ``2(x3),1``, which counts the step's nodes.

    ``SLURM_NTASKS_PER_NODE`` is the request of the job: a step may have been given other numbers.

    >>> _tasks_of_node({"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"})
    1
    """
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        counts += [int(count)] * int(times or 1)
    node, asked = environ.get("SLURM_NODEID", ""), environ.get(_SLURM.local_size, "")
    if counts:
        return counts[int(node)] if node.isdigit() and int(node) < len(counts) else None
    return int(asked) if asked.isdigit() else None


def _local_rank_argument(argv: Sequence[str]) -> int | None:
    for position, argument in enumerate(argv):
        name, equals, text = argument.partition("=")
        if name not in ("--local_rank", "--local-rank"):
            continue
        if not equals:
            text = argv[position + 1] if position + 1 < len(argv) else ""
        if text == "-1":  # the usual default of scripts that take the option
            continue
        return _parse_integer(text, f"command line option {name}", minimum=0)
    return None


def _parse_url(init_method: str) -> tuple[SplitResult, dict[str, int]]:
    schemes = "expected env://, tcp://host:port or file:///path"
    try:
        url = urlsplit(init_method)
    except ValueError as error:
        raise ValueError(f"init_method: {schemes}, got {init_method!r} ({error})") from None
    if url.scheme not in ("env", "tcp", "file"):
        raise ValueError(f"init_method: {schemes}, got {init_method!r}")
    query = {}
    for name, values in parse_qs(url.query).items():
        if name in ("rank", "world_size"):
            query[name] = _parse_integer(
                values[-1], f"{name} in init_method {init_method!r}", name == "world_size"
            )
    return url, query


def _read_meeting(
    url: SplitResult, init_method: str, source: _Source | None, environ: Mapping[str, str]
) -> Meeting:
    if url.scheme == "file":
        path = url.netloc + url.path
        if not path or path.endswith("/"):
            raise ValueError(f"init_method: expected the path of a file after file://, got {init_method!r}")
        return Meeting("file", path=path)
    master = environ.get("MASTER_ADDR") or _default_host(source, environ)
    master_port = _port(environ.get("MASTER_PORT") or str(DEFAULT_PORT))
    # torchrun's agent serves this address itself; the ranks must not try to.
    agent_serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if url.scheme == "env":
        return Meeting("tcp", master, master_port, served=agent_serves)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        port = None
        host = url.hostname
    if not host or not port:
        raise ValueError(
            f"init_method: expected tcp://host:port with a port from 1 to 65535, got {init_method!r}"
        )
    return Meeting("tcp", host, port, served=agent_serves and (host, port) == (master, master_port))


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise ValueError(f"environment variable MASTER_PORT: expected a port from 1 to 65535, got {text!r}")
    return int(text)


def _default_host(source: _Source | None, environ: Mapping[str, str]) -> str:
    if source is not None and source.name == "Slurm":
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or ""
        return _first_host(nodes) or "localhost"
    return "localhost"


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> _first_host("node[003-007,9],other"), _first_host("a1,a2"), _first_host("r[1-2]n[08,11]-ib")
    ('node003', 'a1', 'r1n08-ib')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    host = first.group(0) if first else ""
    return re.sub(r"\[([0-9A-Za-z]+)[^\]]*\]", r"\1", host).strip()


def _job(source: _Source | None, environ: Mapping[str, str]) -> str:
    """Names this attempt of this job: keys of an attempt are never read by the next one."""
    names = [environ.get(name) or "-" for name in source.job] if source else []
    return "/".join([*names, environ.get("TORCHELASTIC_RESTART_COUNT") or "0"])
