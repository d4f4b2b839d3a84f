"""Conversion between layouts: who loads the result computes what the first model did, and all ways lead back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_gpt import ReferenceGPT

from bmtrain.__main__ import main
from bmtrain.convert import convert
from bmtrain.convert.layouts import LAYOUTS
from bmtrain.errors import UnreadableFileError

IDS = torch.arange(24).reshape(2, 12) % 50

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

GPT = {"num_layers": 2, "vocab_size": 50, "dim_model": 24, "dim_head": 8, "num_heads": 3, "dim_ff": 40}
HF_GPT = {"vocab_size": 50, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_inner": 40}
LLAMA = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip


def make_gpt(tied: bool) -> torch.nn.Module:
    torch.manual_seed(1)
    model = ReferenceGPT(**GPT, max_distance=16, dtype=torch.float32, tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def make_hf(family: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(2)
    values = {"gpt2": HF_GPT, "llama": LLAMA, "phi3": LLAMA}[family]
    config = transformers.AutoConfig.for_model(family, **{**values, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def logits_from(folder: Path, model: Any) -> torch.Tensor:
    """What `from_pretrained` makes of the files, with the configuration of a model."""
    import transformers

    model.config.save_pretrained(folder)
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    with torch.no_grad():
        return loaded.eval()(IDS).logits


def reference_logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        pos = torch.arange(IDS.shape[1]).expand_as(IDS)
        return model(IDS, pos, torch.ones_like(IDS, dtype=torch.bool))


def assert_same(path: Path, expected: Mapping[str, torch.Tensor]) -> None:
    found = torch.load(path, weights_only=True)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gpt2_of_the_example_and_of_hugging_face(tied: bool, tmp_path: Path) -> None:
    model = make_gpt(tied)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    folder = tmp_path / "b"
    convert(tmp_path / "a.pt", folder, "safetensors", layout="hf-gpt2", max_shard_size=8_000)
    assert (folder / "model.safetensors.index.json").exists()
    logits = logits_from(folder, make_hf("gpt2", tie_word_embeddings=tied))
    torch.testing.assert_close(logits, reference_logits(model), rtol=1e-5, atol=1e-5)
    convert(folder, tmp_path / "c", "checkpoint", layout="gpt2")
    convert(tmp_path / "c", tmp_path / "d.pt")
    assert_same(tmp_path / "d.pt", model.state_dict())


def test_gpt2_of_hugging_face_with_all_names_of_its_state(tmp_path: Path) -> None:
    """`torch.save` keeps the second name of a tied weight; older files hold masks, and bare models no prefix."""
    model = make_hf("gpt2")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "same.pt", layout="hf-gpt2")
    assert_same(tmp_path / "same.pt", model.state_dict())
    bare = dict(model.transformer.state_dict())
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16).tril() for i in range(2)}
    torch.save(bare, tmp_path / "bare.pt")
    expected = None
    for name in ("a.pt", "bare.pt"):
        convert(tmp_path / name, tmp_path / f"own-{name}", layout="gpt2")
        own = make_gpt(True)
        own.load_state_dict(torch.load(tmp_path / f"own-{name}", weights_only=True), strict=True)
        with torch.no_grad():
            expected = model(IDS).logits
        torch.testing.assert_close(reference_logits(own), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_llama_split_and_fused(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """A LLaMA with fused projections is a Phi-3, which computes the same."""
    model = make_hf("llama", tie_word_embeddings=tied).to(dtype)
    model.save_pretrained(tmp_path / "a", max_shard_size="6KB")
    convert(tmp_path / "a", tmp_path / "b", "safetensors", layout="hf-llama-fused")
    fused = make_hf("phi3", tie_word_embeddings=tied).to(dtype)
    with torch.no_grad():
        expected = model(IDS).logits
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits_from(tmp_path / "b", fused), expected, rtol=tolerance, atol=tolerance)
    convert(tmp_path / "b", tmp_path / "c", "checkpoint")
    convert(tmp_path / "c", tmp_path / "d", "safetensors", layout="hf-llama")
    assert torch.equal(logits_from(tmp_path / "d", model), expected)
    convert(tmp_path / "b", tmp_path / "e", "dcp")
    convert(tmp_path / "a", tmp_path / "first.pt", layout="hf-llama")
    for source, layout in (("d/model.safetensors", None), ("e", "hf-llama")):
        convert(tmp_path / source, tmp_path / "last.pt", layout=layout, overwrite=True)
        assert_same(tmp_path / "last.pt", torch.load(tmp_path / "first.pt", weights_only=True))


@pytest.mark.parametrize(
    ("change", "layout", "problem"),
    [
        ({}, "hf-llama", "the source is a GPT-2, and hf-llama is for a LLaMA"),
        ({"layers.1.attention_norm.bias": None}, "hf-gpt2", "needs transformer.h.1.ln_1.bias"),
        ({"token_embedding.weight": None}, "hf-gpt2", "has no token_embedding.weight"),
        ({"layers.0.gate": torch.ones(2)}, "hf-gpt2", "gpt2, has no layers.0.gate"),
        ({"layers.0.attention.project_out.weight": torch.ones(24, 32)}, "hf-gpt2", r"heads .* \(32, 24\)"),
        ({"layers.0.feedforward.w_in.weight": torch.ones(24)}, "hf-gpt2", "expected a matrix"),
    ],
)
def test_what_has_no_place_is_named(
    change: dict[str, Any], layout: str, problem: str, tmp_path: Path
) -> None:
    state = {**make_gpt(True).state_dict(), **change}
    torch.save({name: value for name, value in state.items() if value is not None}, tmp_path / "a.pt")
    with pytest.raises(UnreadableFileError, match=problem):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", layout=layout)
    assert not (tmp_path / "b.pt").exists()


def test_projections_that_cannot_be_fused_or_divided(tmp_path: Path) -> None:
    model = make_hf("llama", attention_bias=True)
    torch.save(model.state_dict(), tmp_path / "biases.pt")
    with pytest.raises(UnreadableFileError, match=r"no place for model.layers.\d.self_attn.\w_proj.bias"):
        convert(tmp_path / "biases.pt", tmp_path / "b.pt", layout="hf-llama-fused")
    name = "model.layers.0.self_attn.k_proj.weight"
    for change in (lambda value: value.bfloat16(), lambda value: value[:, 1:]):
        state = dict(make_hf("llama").state_dict())
        state[name] = change(state[name])
        torch.save(state, tmp_path / "mixed.pt")
        with pytest.raises(UnreadableFileError, match="qkv_proj.weight: its parts differ in dtype or in the"):
            convert(tmp_path / "mixed.pt", tmp_path / "b.pt", layout="hf-llama-fused")
    state = dict(make_hf("phi3").state_dict())
    state["model.layers.0.self_attn.qkv_proj.weight"] = torch.ones(41, 24)
    torch.save(state, tmp_path / "odd.pt")
    with pytest.raises(UnreadableFileError, match="cannot be divided into 3 matrices"):
        convert(tmp_path / "odd.pt", tmp_path / "b.pt", layout="hf-llama")


def test_the_command_says_what_is_wrong_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--layout", "hf-gpt2"]) == 1
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and all(layout in told for layout in LAYOUTS)
    assert main(["convert", str(tmp_path), str(tmp_path / "b.pt")]) == 1
    assert "expected a checkpoint, or" in capsys.readouterr().err
    with pytest.raises(ValueError, match="layout: expected one of gpt2"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", layout="bert")


_WATCHED = """
import json, re, sys
from pathlib import Path
from bmtrain.convert import convert
peaks = []
def look(done, total):
    peaks.append(int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10)
convert(sys.argv[1], sys.argv[2], "safetensors", layout=sys.argv[3], report=look)
print(json.dumps(max(peaks) - peaks[0]))
"""


@pytest.mark.parametrize(("source", "layout"), [("llama", "hf-llama-fused"), ("phi3", "hf-llama")])
def test_memory_is_bounded_by_a_few_tensors(source: str, layout: str, tmp_path: Path) -> None:
    """24 layers of 7 MB each; what is held at one time is at most three of their matrices."""
    model = make_hf(source, hidden_size=384, intermediate_size=1024, num_hidden_layers=24)
    model.save_pretrained(tmp_path / "a")
    largest = 2 * 1024 * 384 * 4
    total = json.loads(
        subprocess.run(
            [sys.executable, "-c", _WATCHED, tmp_path / "a", tmp_path / "b", layout],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    assert sum(parameter.nbytes for parameter in model.parameters()) > 40 * largest
    assert total <= 3 * largest + 2**20  # what the interpreter takes beside tensors
