"""Weights in and out as safetensors: Hugging Face models from their files, and back to files that they load."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run_ranks
from harness.peaks import GIVE_BACK, peak_of

import bmtrain as bmt
from bmtrain._files import safetensors
from bmtrain._files.safetensors import SafetensorsFile, write_safetensors

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

PRELOAD = ("transformers.trainer_seq2seq", "transformers.models.llama.modeling_llama", "peft")
CONFIGS = {
    "gpt2": {
        "vocab_size": 96, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip


def config_of(family: str, **options: Any) -> Any:
    import transformers

    return transformers.AutoConfig.for_model(family, **{**CONFIGS[family], **options})


def make_plain(family: str, **options: Any) -> torch.nn.Module:
    import transformers

    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config_of(family, **options)).train()


def make_sharded(family: str, device: str = "meta", **options: Any) -> torch.nn.Module:
    import transformers

    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config_of(family, **options))
    return bmt.BMTrainModelWrapper(model.train())


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(96, (4, 8), generator=generator) for _ in range(5)]


def train(model: torch.nn.Module, parts: slice) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for ids in batches():
        optimizer.zero_grad()
        loss = model(input_ids=ids[parts], labels=ids[parts]).loss
        (loss / bmt.world_size()).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fine_tune(family: str, files: str, out: str) -> list[float]:
    model = make_sharded(family)
    assert bmt.weights.load(model, files) == ([], [])
    size = 4 // bmt.world_size()
    losses = train(model, slice(bmt.rank() * size, (bmt.rank() + 1) * size))
    bmt.weights.save(model, out, max_shard_size=20_000)
    if bmt.rank() == 0:
        model.config.save_pretrained(out)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("world", (1, 2, 4))
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_of_hugging_face_from_its_files_and_back(family: str, world: int, tmp_path: Path) -> None:
    import transformers

    plain = make_plain(family)
    plain.save_pretrained(tmp_path / "start", max_shard_size="20KB")
    assert (tmp_path / "start" / "model.safetensors.index.json").exists()
    losses = run_ranks(world, fine_tune, family, str(tmp_path / "start"), str(tmp_path / "tuned"))
    expected = train(plain, slice(None))
    for step, want in enumerate(expected):
        assert sum(rank[step] for rank in losses) / world == pytest.approx(want, rel=1e-6)
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    ids = batches()[0]
    with torch.no_grad():
        torch.testing.assert_close(tuned(ids).logits, plain.eval()(ids).logits, rtol=1e-5, atol=1e-6)


def load_and_compare(family: str, files: str) -> dict[str, int]:
    from bmtrain._files import safetensors

    read = 0
    original = safetensors.SafetensorsFile.read

    def counting(self: Any, *args: Any) -> torch.Tensor:
        nonlocal read
        values = original(self, *args)
        read += values.nbytes
        return values

    model = make_sharded(family)
    safetensors.SafetensorsFile.read = counting  # type: ignore[method-assign]
    try:
        bmt.weights.load(model, files)
    finally:
        safetensors.SafetensorsFile.read = original  # type: ignore[method-assign]
    state, expected = model.state_dict(), make_plain(family).state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    buffers, wanted = dict(model.named_buffers()), dict(make_plain(family).named_buffers())
    assert all(torch.equal(buffers[key], value) for key, value in wanted.items())
    sizes = [p.numel() * 4 for p in make_plain(family).parameters()]
    return {"read": read, "whole": sum(sizes), "parameters": len(sizes)}


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("family", CONFIGS)
def test_each_rank_reads_its_shards_alone(family: str, world: int, tmp_path: Path) -> None:
    make_plain(family).save_pretrained(tmp_path)
    found = run_ranks(world, load_and_compare, family, str(tmp_path))
    assert sum(rank["read"] for rank in found) == found[0]["whole"]
    # Each parameter is divided for itself, rounded up to its partition.
    assert max(rank["read"] for rank in found) <= found[0]["whole"] / world + 64 * found[0]["parameters"]


def load_under_watch(family: str, files: str, options: dict[str, Any]) -> dict[str, int]:
    model = make_sharded(family, **options)
    small = make_sharded(family)
    bmt.weights.load(small, f"{files}-small")  # code that is loaded when it is first used
    # What is free at the end of the heap would be used, and kept, by some ranks.
    peak = peak_of(lambda: bmt.weights.load(model, files))
    sizes = [p._original_shape.numel() * 4 for p in model.parameters()]
    found = {"peak": peak, "whole": sum(sizes), "largest": max(sizes), "written": 0}
    writers: tuple[Callable[..., object], ...] = (bmt.weights.save, bmt.save)
    max(model.parameters(), key=lambda p: p._original_shape.numel()).gather()  # buffers of the transport
    for save in writers:
        save(small, f"{files}-saved/small.safetensors")
        written = peak_of(lambda save=save: save(model, f"{files}-saved/model.safetensors"))  # type: ignore[misc]
        found["written"] = max(found["written"], written)
    return found


LARGE = {
    "gpt2": {"n_embd": 1024, "n_layer": 3, "vocab_size": 4096},
    "llama": {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 4096},
}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "world"), [("llama", 1), ("llama", 2), ("llama", 4), ("gpt2", 4)])
def test_peak_memory_is_the_shards_and_one_tensor(family: str, world: int, tmp_path: Path) -> None:
    options = LARGE[family]
    files = tmp_path / "start"
    make_plain(family, **options).save_pretrained(files)
    make_plain(family).save_pretrained(f"{files}-small")
    watched = run_ranks(
        world, load_under_watch, family, str(files), options, environment=GIVE_BACK, fresh=True
    )
    for found in watched:
        assert found["whole"] > 100 << 20
        assert found["peak"] <= found["whole"] / world + found["largest"] + (8 << 20)
        # Two tensors and the buffers of the transport, which grow with the number of ranks.
        assert found["written"] <= 0.75 * found["whole"]


def tune_low_rank(files: str, out: str) -> dict[str, Any]:
    import peft

    model = make_sharded("llama", "cpu")
    bmt.weights.load(model, files)
    plain = make_plain("llama")
    adapters = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False
    )
    models = []
    for inner in (plain, model):
        torch.manual_seed(7)
        models.append(peft.get_peft_model(inner, adapters))
    plain = models[0]
    model = bmt.BMTrainModelWrapper(models[1])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    size = 4 // bmt.world_size()
    losses = train(model, slice(bmt.rank() * size, (bmt.rank() + 1) * size))
    bmt.weights.save(model, out)
    return {"losses": losses, "plain": [loss * bmt.world_size() for loss in train_plain(plain)]}


def train_plain(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for ids in batches():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("world", (1, 2, 4))
def test_low_rank_adapters_of_peft(world: int, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    make_plain("llama").save_pretrained(tmp_path / "start")
    found = run_ranks(world, tune_low_rank, str(tmp_path / "start"), str(tmp_path / "tuned"))
    for step in range(5):
        assert sum(rank["losses"][step] for rank in found) == pytest.approx(found[0]["plain"][step], rel=1e-6)
    assert (tmp_path / "tuned" / "model.safetensors").exists()


# ---- what cannot be


class Table(torch.nn.Module):
    """A buffer that no file holds, and nobody computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 5))
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


class Computing(Table):
    """Computes its buffer as models do: writes to it, puts another tensor or None in its place."""

    way = ""

    def _init_weights(self, module: torch.nn.Module) -> None:
        if self.way == "written":
            module.angles.copy_(torch.arange(3.0))
        else:
            module.angles = torch.arange(3.0) if self.way == "replaced" else None


def load_and_compute(folder: str) -> None:
    bmt.weights.save(Table(), folder)
    bmt.synchronize()
    for way in ("written", "replaced", "none"):
        with torch.device("meta"):
            model = Computing()
        model.way = way
        bmt.weights.load(bmt.BMTrainModelWrapper(model), folder)
        assert model.angles is None if way == "none" else model.angles.tolist() == [0, 1, 2]


def test_buffers_that_the_model_computes(tmp_path: Path) -> None:
    run_ranks(2, load_and_compute, str(tmp_path))


class Normalized(torch.nn.Module):
    """Buffers of all kinds: of a file, of the model and None."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("angles", torch.arange(3.0, device="cpu"), persistent=False)
        self.register_buffer("absent", None)


def load_buffers(folder: str) -> str:
    plain = Normalized()
    plain.norm(torch.arange(32.0).view(8, 4))
    bmt.weights.save(plain, folder)
    bmt.synchronize()
    with torch.device("meta"):
        model, other = Normalized(), Normalized()
    bmt.weights.load(bmt.BMTrainModelWrapper(model), folder)
    assert model.angles.tolist() == [0, 1, 2] and model.absent is None
    for name, buffer in plain.norm.named_buffers():
        assert torch.equal(getattr(model.norm, name), buffer), name
    bmt.BMTrainModelWrapper(other)
    with pytest.raises(RuntimeError) as raised:
        bmt.weights.load(other, folder, strict=False, rename=lambda name: None if "mean" in name else name)
    return str(raised.value)


def test_buffers_in_files_and_beside_them(tmp_path: Path) -> None:
    for said in run_ranks(2, load_buffers, str(tmp_path)):
        assert said == "weights.load: nothing fills the buffers norm.running_mean"


def load_problems(folder: str) -> list[str]:
    from safetensors.torch import save_file

    def problem(path: Path, build: Any) -> str:
        model = build()
        before = {key: value.clone() for key, value in model.state_dict().items() if not value.is_meta}
        with pytest.raises((RuntimeError, OSError, bmt.errors.UnreadableFileError)) as raised:
            bmt.weights.load(model, path)
        assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
        return f"{type(raised.value).__name__}: {raised.value}"

    def on(device: str) -> Any:
        def build() -> torch.nn.Module:
            with torch.device(device):
                return bmt.BMTrainModelWrapper(Table())

        return build

    root = Path(folder)
    if bmt.rank() == 0:
        save_file({"weight": torch.zeros(3, 5)}, root / "good.safetensors")
        save_file({"weight": torch.zeros(5, 3)}, root / "shape.safetensors")
        save_file({"other": torch.zeros(3, 5)}, root / "name.safetensors")
        (root / "cut.safetensors").write_bytes((root / "good.safetensors").read_bytes()[:-4])
    bmt.synchronize()
    here = root / ("good.safetensors" if bmt.rank() == 0 else "absent.safetensors")
    return [
        problem(root / "shape.safetensors", on("cpu")),
        problem(root / "name.safetensors", on("cpu")),
        problem(root / "cut.safetensors", on("cpu")),
        problem(root / "good.safetensors", on("meta")),
        problem(here, on("cpu")) if bmt.world_size() > 1 else "absent",
    ]


@pytest.mark.parametrize("world", (1, 2))
def test_problems_are_told_by_all_ranks_before_anything_changes(world: int, tmp_path: Path) -> None:
    for shape, name, cut, buffers, absent in run_ranks(world, load_problems, str(tmp_path)):
        assert "size mismatch for weight" in shape
        assert 'Missing key(s) in state_dict: "weight"' in name
        assert "UnreadableFileError" in cut and "cut.safetensors" in cut
        assert "angles" in buffers and "_init_weights" in buffers
        assert "absent" in absent


def rename_two_to_one(folder: str) -> list[str]:
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(8, 8))
    bmt.weights.save(model, folder)
    bmt.synchronize()
    before = model.weight.sum().item()
    said = []
    for call in (bmt.weights.load, bmt.weights.save):
        with pytest.raises(ValueError) as raised:
            call(model, folder, rename=lambda name: "weight")
        said.append(str(raised.value))
    assert model.weight.sum().item() == before
    return said


def test_two_names_must_not_become_one(tmp_path: Path) -> None:
    for said in run_ranks(2, rename_two_to_one, str(tmp_path)):
        for sentence in said:
            assert "rename makes 'weight' of both" in sentence and "'bias'" in sentence


def leave_out(folder: str) -> None:
    model, other = (bmt.BMTrainModelWrapper(torch.nn.Linear(8, 8)) for _ in range(2))
    weight, bias = model.weight.detach().clone(), other.bias.detach().clone()
    bmt.weights.save(model, f"{folder}/both")
    bmt.weights.save(model, f"{folder}/one", rename={"weight": "w"}.get)
    bmt.synchronize()
    assert safetensors.locate_tensors(Path(folder, "one")).keys() == {"w"}
    for file, name in (("both", "weight"), ("one", "w")):
        with torch.no_grad():
            other._parameters["weight"].zero_()
        found = bmt.weights.load(other, f"{folder}/{file}", strict=False, rename={name: "weight"}.get)
        assert found == (["bias"], [])
        assert torch.equal(other.weight, weight) and torch.equal(other.bias, bias)


def test_a_rename_leaves_tensors_out(tmp_path: Path) -> None:
    run_ranks(2, leave_out, str(tmp_path))


def slice_of_columns(folder: str) -> int:
    """How often the file is opened for the slices of a matrix that is cut along its columns."""
    layer = bmt.nn.RowParallelLinear(32, 64, bias=False)
    plain = torch.nn.Linear(32, 64, bias=False)
    if bmt.rank() == 0:
        write_safetensors(
            f"{folder}/model.safetensors", {"weight": (torch.float32, (64, 32))}, [plain.weight], {}
        )
    bmt.synchronize()
    opened = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        opened.append(args)
        return open(*args, **kwargs)

    safetensors.open = counting  # type: ignore[attr-defined]
    try:
        bmt.weights.load(layer, folder)
    finally:
        del safetensors.open  # type: ignore[attr-defined]
    assert torch.equal(layer.state_dict()["weight"], plain.weight)
    return len(opened)


@pytest.mark.parametrize("world", (2, 4))
def test_a_slice_of_columns_is_read_from_a_file_opened_once(world: int, tmp_path: Path) -> None:
    assert run_ranks(world, slice_of_columns, str(tmp_path), init={"tp_size": 2}) == [1] * world


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def tied_names(folder: str, is_wrapped: bool) -> list[str]:
    def make() -> torch.nn.Module:
        return bmt.BMTrainModelWrapper(Tied()) if is_wrapped else Tied()

    model, other = make(), make()
    bmt.weights.save(model, folder)
    bmt.synchronize()
    assert bmt.weights.load(other, folder) == ([], [])
    assert torch.equal(other.state_dict()["head.weight"], model.state_dict()["embed.weight"])
    return sorted(SafetensorsFile(Path(folder) / "model.safetensors").places)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_tied_weights_have_one_name_in_the_file(is_wrapped: bool, tmp_path: Path) -> None:
    assert run_ranks(2, tied_names, str(tmp_path), is_wrapped) == [["embed.weight"]] * 2


def save_nowhere(folder: str) -> str:
    model = bmt.BMTrainModelWrapper(Table())
    with pytest.raises(OSError) as raised:
        bmt.weights.save(model, Path(folder) / "file" / "below")
    return type(raised.value).__name__


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    names = run_ranks(2, save_nowhere, str(tmp_path))
    assert len(set(names)) == 1


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None: ...


def save_extra_state(folder: str) -> None:
    with pytest.raises(
        TypeError, match=r"weights.save: expected tensors alone, got other values in _extra_state"
    ):
        bmt.weights.save(bmt.BMTrainModelWrapper(WithExtraState(2, 2)), folder)
    assert not list(Path(folder).iterdir())


def test_other_values_than_tensors_are_refused(tmp_path: Path) -> None:
    run_ranks(2, save_extra_state, str(tmp_path))


def save_in_turn(folder: str) -> None:
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(8, 8))
    bmt.weights.save(model, folder, max_shard_size=100)
    bmt.synchronize()
    names = sorted(path.name for path in Path(folder).iterdir())
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((Path(folder) / names[2]).read_text())
    assert index["metadata"]["total_size"] == 4 * (8 * 8 + 8)
    bmt.synchronize()
    bmt.weights.save(model, folder)
    bmt.synchronize()
    assert not (Path(folder) / names[2]).exists()  # readers would believe the index
    bmt.weights.load(model, folder)
    bmt.synchronize()
    bmt.weights.save(model, folder, max_shard_size=100)
    bmt.synchronize()
    assert sorted(path.name for path in Path(folder).iterdir()) == names  # transformers reads one file first


def test_one_file_replaces_several_and_the_other_way_round(tmp_path: Path) -> None:
    run_ranks(2, save_in_turn, str(tmp_path))
