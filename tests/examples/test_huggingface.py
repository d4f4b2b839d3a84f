"""The fine-tuning example as a user starts it, with and without adapters."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from harness import run_process, run_ranks

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "example" / "huggingface" / "fine_tune.py"
PRELOAD = ("transformers.trainer_seq2seq", "transformers.models.llama.modeling_llama", "peft")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)


def gpt2_folder(folder: Path) -> Path:
    """A small random GPT-2 in files."""
    import transformers

    config = transformers.GPT2Config(vocab_size=256, n_positions=64, n_embd=48, n_layer=3, n_head=4)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def fine_tune(options: list[str]) -> None:
    """The program on a rank of the harness, which has transformers imported."""
    sys.argv = [str(SCRIPT), *options]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", []), ("gpt2", []), ("llama", ["--lora", "4", "--lr", "0.02"])],
    ids=["llama", "gpt2", "lora"],
)
def test_fine_tuning(
    family: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun the first; the others are spared the imports of three processes."""
    import safetensors.torch
    import transformers

    if options:
        pytest.importorskip("peft")
    out = tmp_path / "tuned"
    model = ["--model", str(gpt2_folder(tmp_path / "start"))] if family == "gpt2" else []
    arguments = ["--steps", "12", "--out", str(out), *model, *options]
    if not model and not options:
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        printed = run_process([*TORCHRUN, SCRIPT, *arguments], environment=environment, timeout=200).stdout
    else:
        run_ranks(2, fine_tune, arguments, init=False, fresh=True, timeout=200)
        printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)$", printed, re.MULTILINE)]
    assert len(losses) == 12 and losses[-1] < losses[0] - 0.1
    text = torch.tensor(list(SCRIPT.read_bytes()[:64]))[None]
    if options:
        adapter = json.loads((out / "adapter_config.json").read_text())
        assert adapter["r"] == 4
        names = safetensors.torch.load_file(out / "adapter_model.safetensors")
        assert names and all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(out)
        with torch.no_grad():
            assert model(input_ids=text, labels=text).loss.item() < losses[0]


def test_paths_that_are_not_there_are_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = runpy.run_path(str(SCRIPT))["parse"]
    for option in ("--model", "--data"):
        monkeypatch.setattr(sys, "argv", ["fine_tune.py", option, "/nowhere"])
        with pytest.raises(SystemExit, match="2"):
            parse()
        assert f"{option}: expected a" in capsys.readouterr().err
