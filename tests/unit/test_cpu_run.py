"""`python -m bmtrain run --cpu`: scripts for GPUs run unchanged, with the losses of their twins for the CPU."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from harness import run_process, run_ranks

from bmtrain import cpu_run

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts" / "cuda"

kept: dict[
    str, object
] = {}  # globals of scripts: a process group that is dropped at once can wait for the GIL for ever


def run_for_gpu(name: str) -> None:
    cpu_run.run(argparse.Namespace(script=SCRIPTS / f"gpu_{name}.py", arguments=[]))


def run_for_cpu(name: str) -> None:
    kept.update(runpy.run_path(str(SCRIPTS / f"cpu_{name}.py"), run_name="__main__"))


def losses(output: str) -> list[str]:
    return re.findall(r"loss (\d\S*)", output)  # not a warning that quotes "loss = ..."


@pytest.mark.parametrize(
    ("name", "number", "world"), [("documented", 5, 1), ("documented", 5, 2), ("amp", 5, 1), ("ddp", 3, 1)]
)
def test_losses_are_those_of_the_same_script_for_the_cpu(
    name: str, number: int, world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(world, run_for_gpu, name, init=False, fresh=True, timeout=200)
    redirected = capsys.readouterr().out
    run_ranks(world, run_for_cpu, name, init=False, fresh=True, timeout=200)
    written = losses(capsys.readouterr().out)
    assert len(written) == number
    assert losses(redirected) == written
    assert redirected.count("ran on the CPU; redirected:") == 1


def test_the_command_passes_arguments_and_reports(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, helper\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--lr', '0.1', '--cpu'], sys.argv\n"
        "print(torch.ones(2, device='cuda').cuda().sum().item(), helper.NAME)\n"
        "if '--cpu' in sys.argv: sys.exit(3)\n"
    )
    (tmp_path / "helper.py").write_text("NAME = 'beside the script'\n")
    command = [sys.executable, "-m", "bmtrain", "run", "--cpu", script, "--lr", "0.1", "--cpu"]
    done = run_process(command, environment={"PYTHONPATH": str(ROOT)}, check=False, timeout=120)
    assert done.returncode == 3
    assert "2.0 beside the script" in done.stdout
    assert re.search(
        r'script.py ran on the CPU; redirected:\n  1 x ones\(device="cuda"\)\n  1 x .cuda\(\)', done.stdout
    )


def test_globals_of_a_script_live_until_the_interpreter_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "class Last:\n"
        "    def __del__(self, write=sys.stderr.write):\n"
        "        write('dropped\\n')\n"
        "last = Last()\n"
    )
    command = [sys.executable, "-m", "bmtrain", "run", "--cpu", script]
    done = run_process(command, environment={"PYTHONPATH": str(ROOT)}, timeout=120)
    assert re.search(r"asked for nothing of CUDA\ndropped", done.stdout), done.stdout


def test_nothing_is_left_redirected() -> None:
    before = {
        name: getattr(torch.cuda, name)
        for name in ("Stream", "Event", "is_available", "synchronize", "device")
    }
    owned = [
        torch.load,
        torch.Generator,
        torch.Tensor.__dict__.get("record_stream"),
        torch.amp.autocast.__init__,
    ]
    with cpu_run.Redirection():
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.device("cuda:1") == torch.device("cpu")
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert owned == [
        torch.load,
        torch.Generator,
        torch.Tensor.__dict__.get("record_stream"),
        torch.amp.autocast.__init__,
    ]
    assert torch.device("cuda:1").type == "cuda"


@pytest.mark.parametrize(
    "expression",
    [
        "torch.zeros(1).to(0)",
        "torch.nn.Linear(1, 1).to('cuda:0').weight",
        "torch.nn.Linear(1, 1, device='cuda').cuda().weight",
        "torch.zeros_like(torch.zeros(1), device=torch.device(0))",
        "torch.zeros(1).new_ones(2, device='cuda')",
        "torch.empty(3, pin_memory=True).pin_memory()",
        "torch.cuda.FloatTensor(2).cuda()",
        "torch.randn(2).type('torch.cuda.HalfTensor')",
        "torch.arange(3).to(device='cuda', dtype=torch.float32)",
        "torch.rand(2, generator=torch.Generator('cuda'), device='cuda')",
    ],
)
def test_tensors_are_on_the_cpu(expression: str) -> None:
    with cpu_run.Redirection() as redirection:
        assert eval(expression).device == torch.device("cpu")
    assert redirection.counts


@pytest.mark.parametrize(
    ("device", "current"), [("2", 2), ("'cuda:3'", 3), ("'cuda'", 1), ("torch.device('cuda', 1)", 1)]
)
def test_the_device_that_a_script_chooses(device: str, current: int) -> None:
    with cpu_run.Redirection():
        torch.cuda.set_device(1)
        torch.cuda.set_device(eval(device))
        assert torch.cuda.current_device() == current


def test_what_a_script_reads() -> None:
    with cpu_run.Redirection():
        names = {"torch": torch, "__name__": "__main__"}
        assert eval("torch.ones(1).is_cuda", names)
        x = torch.ones(1)
        assert eval("x.cpu()", {**names, "x": x}).data_ptr() != x.data_ptr()
        assert torch.cuda.mem_get_info()[1] >= torch.cuda.memory_allocated() > 0
        assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 0
        with torch.cuda.amp.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)) as _, torch.cuda.device(0):
            assert torch.cuda.current_stream().query()
        event = torch.cuda.current_stream().record_event()
        assert event.query()


def test_a_script_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu_run.run(argparse.Namespace(script=tmp_path / "nothing.py", arguments=[])) == 2
    assert "nothing.py" in capsys.readouterr().err
