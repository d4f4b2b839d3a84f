"""The script of example/nanogpt as the page converts it: few lines, other samples on each rank, equal losses."""

from __future__ import annotations

import difflib
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from harness import run_process, run_ranks

ROOT = Path(__file__).parents[2]
PLAIN = ROOT / "example" / "nanogpt" / "plain.py"
PAGE = ROOT / "docs" / "howto" / "migrate-from.md"
LIBRARIES = ("bmtrain", "DDP", "FSDP2", "DeepSpeed", "accelerate")
DEEPSPEED = ROOT / "build" / "deepspeed"


def diffs(page: Path) -> dict[str, list[str]]:
    """The diffs of a page, by library."""
    fences = re.findall(r"^```diff\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return dict(zip(LIBRARIES, (fence.splitlines() for fence in fences), strict=True))


def converted(diff: list[str]) -> str:
    """The plain script with a diff applied: lines with a blank in front say where, others are found by themselves."""
    lines, at = PLAIN.read_text(encoding="utf-8").splitlines(), 0
    for line in diff:
        if line[0] == "+":
            lines.insert(at, line[1:])
            at += 1
        else:
            at = lines.index(line[1:], at)
            if line[0] == "-":
                del lines[at]
            else:
                at += 1
    return "\n".join(lines) + "\n"


def run(program: str, library: str, folder: str) -> None:
    os.chdir(folder)
    sys.argv = ["train.py"]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if library == "DeepSpeed":
        sys.path.append(str(DEEPSPEED))
        import deepspeed

        deepspeed.ops.__compatible_ops__.clear()  # it would compile its all-reduce in shared memory
    exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})


def write_text(folder: Path) -> None:
    (folder / "input.txt").write_text(Path(difflib.__file__).read_text(encoding="utf-8")[:20000])


def losses(library: str, program: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[list[float]]:
    """Each rank's, every tenth step of 50. Leaves the model in the folder."""
    if library == "accelerate":
        pytest.importorskip("accelerate")
    elif library == "DeepSpeed" and not DEEPSPEED.exists():
        pytest.skip("DeepSpeed is not installed in build/deepspeed (tests/environment.py does it)")
    write_text(folder)
    run_ranks(2, run, program, library, str(folder), init=False, fresh=True, timeout=120)
    output = capsys.readouterr().out
    assert "bit for bit" not in output
    found = [re.findall(rf"rank {rank}\] step \d+: loss (\S+)", output) for rank in (0, 1)]
    assert len(found[0]) == len(found[1]) == 5, output
    return [[float(loss) for loss in of_rank] for of_rank in found]


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_rank_has_its_own_samples(
    library: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = losses(library, converted(diffs(PAGE)[library]), tmp_path, capsys)
    assert first[0] != second[0]
    assert first[-1] < first[0] - 0.3
    names = torch.load(tmp_path / "model.pt", weights_only=True)
    assert names["layers.1.up.weight"].shape == (256, 64)


#: In place of the loader: batches that depend on nothing but the step and the ranks that they are for.
SAME_SAMPLES = """
def batches(ranks):
    generators = [torch.Generator().manual_seed(rank) for rank in ranks]
    while True:
        starts = [torch.randint(len(Windows()), (batch_size,), generator=generator) for generator in generators]
        yield torch.utils.data.default_collate([Windows()[start] for start in torch.cat(starts).tolist()])


loader = batches({ranks})
"""


def on_same_samples(program: str, ranks: str) -> str:
    loader = SAME_SAMPLES.replace("{ranks}", ranks)
    program, found = re.subn(r"^loader = .*$", loader, program, flags=re.MULTILINE)
    assert found == 1
    return "import os\n" + program.replace("loss.item():.4f", "loss.item():.9g")


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The plain script's losses on the samples of both ranks."""
    program = on_same_samples(PLAIN.read_text(encoding="utf-8"), "range(2)")
    folder = tmp_path_factory.mktemp("plain")
    write_text(folder)
    (folder / "plain.py").write_text(program)
    done = run_process(
        [sys.executable, "plain.py"], directory=folder, environment={"CUDA_VISIBLE_DEVICES": ""}
    )
    return [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", done.stdout)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_same_samples_give_the_losses_of_one_process(
    library: str, of_one_process: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = on_same_samples(converted(diffs(PAGE)[library]), '[int(os.environ["RANK"])]')
    of_ranks = losses(library, program, tmp_path, capsys)
    means = [sum(pair) / 2 for pair in zip(*of_ranks, strict=True)]
    assert means == pytest.approx(of_one_process, rel=1e-5)


def test_the_page_counts_the_lines_to_add() -> None:
    table = re.findall(
        r"^\| (?:PyTorch )?(\w+).* \| (\d+) \| ", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    counts = {library: sum(line[0] == "+" for line in diff) for library, diff in diffs(PAGE).items()}
    assert dict(table) == {library: str(count) for library, count in counts.items()}
    assert len(PLAIN.read_text(encoding="utf-8").splitlines()) == 68


def test_the_chinese_page_has_the_same_diffs() -> None:
    assert diffs(ROOT / "docs" / "zh" / "howto" / "migrate-from.md") == diffs(PAGE)
