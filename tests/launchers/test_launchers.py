"""Slurm, Open MPI, Ray and what pods of Kubernetes run: real launchers, the losses of torchrun, and how jobs end."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import free_port, run_process
from harness.slurm import slurm_cluster

ROOT = Path(__file__).parents[2]
LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TRAIN = [
    *(sys.executable, str(ROOT / "example" / "train.py"), "--data", str(ROOT / "example" / "train.py")),
    *("--num-layers", "2", "--dim-model", "32", "--num-heads", "2", "--seq-len", "32", "--steps", "4"),
    *("--log-every", "1", "--no-tensorboard", "--no-plot"),
]
DIES = """
import os, signal, sys
import bmtrain as bmt

bmt.init_distributed()
bmt.synchronize()
if bmt.rank() == 1 and sys.argv[1] == "raises":
    raise ValueError("no such word")
if bmt.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
bmt.synchronize()
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """Of all launchers: this tree, no GPU, one thread for each rank, and no launcher around the test run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name in LAUNCH_VARIABLES or name.startswith(
                ("OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "RAY_")
            ):
                patch.delenv(name)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def numbers(out: Path) -> list[tuple[float, float]]:
    """The loss and the norm of the gradient of each step, with all digits."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(record["loss"], record["grad_norm"]) for record in records if "loss" in record]


@pytest.fixture(scope="module")
def of_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    out = tmp_path_factory.mktemp("torchrun")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run_process([*launcher, *TRAIN[1:], "--out", out], timeout=180)
    losses = numbers(out)
    assert len(losses) == 4
    return losses


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield {**environment, "MASTER_PORT": str(free_port())}


def test_slurm(cluster: Mapping[str, str], of_torchrun: list[tuple[float, float]], tmp_path: Path) -> None:
    """The ranks meet at the first node of the step: no variable has its address."""
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1"]
    run_process([*srun, *TRAIN, "--out", tmp_path], environment=cluster, timeout=180)
    assert numbers(tmp_path) == of_torchrun


# A step of other numbers than its job has, and with the variables of MPICH.
STEP = ["salloc", "--nodes=2", "--ntasks-per-node=1", "srun", "--mpi=pmi2", "--nodes=1", "--ntasks=2"]


@pytest.mark.parametrize(
    ("srun", "end", "status"),
    [
        (["srun", "--nodes=2", "--ntasks=2"], "is killed", 128 + 9),
        ([*STEP, "--overcommit"], "raises", 1),
    ],
)
def test_a_rank_ends_a_job_of_slurm(
    srun: list[str], end: str, status: int, cluster: Mapping[str, str], tmp_path: Path
) -> None:
    assert_reported([*srun], cluster, end, status, tmp_path)


MPIRUN = ["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", "--allow-run-as-root"]
LOOPBACK = ["--mca", "btl_tcp_if_include", "lo", "--mca", "oob_tcp_if_include", "lo"]


@pytest.fixture
def mpirun() -> list[str]:
    if shutil.which("mpirun") is None or "Open MPI" not in run_process(["mpirun", "--version"]).stdout:
        pytest.skip("Open MPI is not installed: no mpirun (Debian: openmpi-bin)")
    return [*MPIRUN, *LOOPBACK, "-x", f"MASTER_PORT={free_port()}"]


def test_open_mpi(mpirun: list[str], of_torchrun: list[tuple[float, float]], tmp_path: Path) -> None:
    run_process([*mpirun, *TRAIN, "--out", tmp_path], timeout=180)
    assert numbers(tmp_path) == of_torchrun


@pytest.mark.parametrize(("end", "status"), [("is killed", 128 + 9), ("raises", 1)])
def test_a_rank_ends_a_job_of_open_mpi(mpirun: list[str], end: str, status: int, tmp_path: Path) -> None:
    assert_reported(mpirun, {}, end, status, tmp_path)


def assert_reported(
    launcher: list[str], environment: Mapping[str, str], end: str, status: int, folder: Path
) -> None:
    """The launcher's status is that of the rank that failed first, and the other rank's report says why."""
    script = folder / "dies.py"
    script.write_text(DIES)
    command = [*launcher, sys.executable, str(script), end]
    done = run_process(command, environment=environment, timeout=180, check=False)
    reasons = {"is killed": "rank 1 died", "raises": "rank 1 raised ValueError: no such word"}
    assert done.returncode == status
    assert f"bmtrain: rank 0 of 2 gives up: {reasons[end]}" in done.stdout


PAGE = ROOT / "docs" / "howto" / "clusters.md"


def block(language: str, start: str) -> str:
    """The page's only block of this language that begins so."""
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    [found] = [block for block in blocks if block.startswith(start)]
    return found


RAY = """
import os, signal, sys
import ray
import ray.train
import train as page

def train_and_die(config):
    page.train(config)
    if page.bmt.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    page.bmt.synchronize()

if __name__ == "__main__":
    folder, out = sys.argv[1:]
    ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=folder)
    trainer = page.TorchTrainer(
        train_and_die,
        train_loop_config={"steps": 3, "out": out},
        scaling_config=page.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=page.RunConfig(storage_path=folder),
    )
    try:
        trainer.fit()
    except ray.train.WorkerGroupError as error:
        sys.stdout.write("failed: " + str(error).replace("\\n", " ") + "\\n")
    ray.shutdown()
"""


def test_ray(tmp_path: Path) -> None:
    """The page's function gives the model that it gives under torchrun, bit for bit; then a worker is killed."""
    pytest.importorskip("ray.train")
    (tmp_path / "train.py").write_text(block("python", "import torch\nfrom ray.train"))
    (tmp_path / "ray_run.py").write_text(RAY)
    alone = "import sys, train; train.train({'steps': 3, 'out': sys.argv[1]})"
    (tmp_path / "alone.py").write_text(alone)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run_process([*launcher, tmp_path / "alone.py", tmp_path / "torchrun.pt"], environment=path, timeout=180)

    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # a short path: sockets are in it
        lean = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0"}  # no idle workers
        variables = {**path, **lean, "HOME": folder}
        command = [sys.executable, tmp_path / "ray_run.py", folder, tmp_path / "ray.pt"]
        done = run_process(command, environment=variables, timeout=300)
    assert "failed: " in done.stdout
    assert "rank 1 died" in done.stdout.partition("failed: ")[2]
    ours, theirs = (torch.load(tmp_path / name) for name in ("ray.pt", "torchrun.pt"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


POD = """
import os, sys
import bmtrain as bmt

bmt.init_distributed(timeout=60)
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if "--die" in sys.argv and bmt.rank() == 1 and restarts == 0:
    raise ValueError("no such word")
bmt.synchronize()
sys.stdout.write(f"rank {bmt.rank()} of {bmt.world_size()} after {restarts} restarts\\n")
"""
ADDRESS = "train-node-0-0.train"  # of the first pod


def manifest(kind: str, model: str) -> dict[str, Any]:
    """A manifest of the page that has passed through the published model: what the model does not know is lost."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    yaml = pytest.importorskip("yaml")
    text = yaml.safe_load(block("yaml", f"apiVersion: {kind}"))
    known: dict[str, Any] = getattr(models, model).from_dict(text).to_dict()
    assert known == text
    return known


def run_pods(folder: Path, pods: list[str], environment: Mapping[str, str]) -> list[str]:
    """What the ranks print when these command lines run beside each other, one rank in each instead of 8."""
    (folder / "train.py").write_text(POD)
    port = str(free_port())
    shell = (
        "pods=; "
        + " ".join(f'{pod} & pods="$pods $!";' for pod in pods)
        + " for p in $pods; do wait $p || exit; done"
    )
    for written, here in ((ADDRESS, "localhost"), ("29400", port), ("nproc_per_node=8", "nproc_per_node=1")):
        shell = shell.replace(written, here)
        environment = {name: value.replace(written, here) for name, value in environment.items()}
    environment = {**environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run_process(["bash", "-c", shell], environment=environment, directory=folder, timeout=180)
    return sorted(re.findall("rank . of . after .*", done.stdout))


def test_pods_of_a_train_job(tmp_path: Path) -> None:
    """With the variables of the runtime torch-distributed. The ranks of both pods start again after a failure."""
    trainer = manifest("trainer", "TrainerV1alpha1TrainJob")["spec"]["trainer"]
    runtime = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": ADDRESS,
        "PET_MASTER_PORT": "29400",
    }
    command = shlex.join([*trainer["command"], "--die"])
    pods = [f"PET_NODE_RANK={node} {command}" for node in range(trainer["numNodes"])]
    ranks = run_pods(tmp_path, pods, runtime)
    assert ranks == [f"rank {rank} of 2 after 1 restarts" for rank in range(2)]


def test_pods_of_a_job_set(tmp_path: Path) -> None:
    whole = manifest("jobset", "JobsetV1alpha2JobSet")
    [replicated] = whole["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert f"{whole['metadata']['name']}-{replicated['name']}-0-0.{whole['metadata']['name']}" == ADDRESS
    [container] = job["template"]["spec"]["containers"]
    command = shlex.join([*container["command"], *container["args"]])
    pods = [f"JOB_COMPLETION_INDEX={index} {command}" for index in range(job["completions"])]
    assert run_pods(tmp_path, pods, {}) == [f"rank {rank} of 2 after 0 restarts" for rank in range(2)]
