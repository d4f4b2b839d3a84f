"""The trainers of transformers with the class replaced, on 2 ranks, beside the plain ones in one process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from harness import RankError, run_ranks

import bmtrain as bmt

if any(importlib.util.find_spec(name) is None for name in ("transformers", "peft")):
    pytest.skip("transformers or peft is not installed", allow_module_level=True)

from integrations import trainer_script

PRELOAD = ("transformers.trainer_seq2seq", "transformers.models.llama.modeling_llama", "peft")
SCRIPT = Path(trainer_script.__file__)
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
#: What has to be equal; times and sizes of a run are left out.
FIGURES = {"loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos", "train_loss"}
#: Of sums in another order: 1e-5 in fp32, and more where autocast rounds to 16 bits.
TOLERANCE = {"bf16": 2e-2, "fp16": 1e-3, "cosine-sgd": 1e-4}


def run_script(*arguments: str) -> None:
    """The script as a program, on ranks that have transformers imported; one rank has no launcher."""
    if os.environ["WORLD_SIZE"] == "1":
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def run(world: int, *arguments: str) -> None:
    run_ranks(world, run_script, *arguments, init=False, fresh=True, timeout=600)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a plain run, of a sharded one by torchrun, and of ones resumed at two thirds, on 2 ranks and on 1."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("plain", "sharded", "resumed", "alone")}
    run(1, "plain", str(folders["plain"]))
    command = [*LAUNCH, str(SCRIPT), "sharded", str(folders["sharded"])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-8000:]
    for name, world in {"resumed": 2, "alone": 1}.items():
        shutil.copytree(folders["sharded"], folders[name], dirs_exist_ok=True)
        run(world, "sharded", str(folders[name]), "--resume")
    return folders


def history(folder: Path, name: str) -> list[dict[str, Any]]:
    logs: dict[str, list[dict[str, Any]]] = json.loads((folder / "log.json").read_text())
    return logs[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", trainer_script.VARIANTS)
def test_figures_and_weights_are_those_of_the_plain_trainer(runs: dict[str, Path], name: str) -> None:
    tolerance = TOLERANCE.get(name, 1e-5)
    expected, got = history(runs["plain"], name), history(runs["sharded"], name)
    assert len(got) == len(expected)
    for theirs, ours in zip(expected, got, strict=True):
        assert theirs.keys() == ours.keys()
        for key in theirs:
            if key in FIGURES or key in ("eval_loss", "eval_accuracy", "eval_generated"):
                assert ours[key] == pytest.approx(theirs[key], abs=tolerance, nan_ok=True), (
                    theirs["step"],
                    key,
                )
    weights, ours = (tensors(runs[kind] / name / "final") for kind in ("plain", "sharded"))
    assert ours.keys() == weights.keys()
    for key, tensor in weights.items():
        assert ours[key].dtype == tensor.dtype
        torch.testing.assert_close(ours[key], tensor, rtol=0, atol=50 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", trainer_script.RESUMED)
def test_a_resumed_run_continues_loss_by_loss(runs: dict[str, Path], name: str) -> None:
    whole, resumed = (
        [entry["loss"] for entry in history(runs[kind], name) if "loss" in entry]
        for kind in ("sharded", "resumed")
    )
    assert resumed == whole
    final = [tensors(runs[kind] / name / "final") for kind in ("sharded", "resumed")]
    assert all(torch.equal(final[0][key], final[1][key]) for key in final[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", trainer_script.RESUMED)
def test_a_checkpoint_of_two_ranks_continues_on_one(runs: dict[str, Path], name: str) -> None:
    whole, alone = (
        [entry["loss"] for entry in history(runs[kind], name) if "loss" in entry]
        for kind in ("sharded", "alone")
    )
    assert alone == pytest.approx(whole, abs=TOLERANCE.get(name, 1e-5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "fp16", "lora"])
def test_a_checkpoint_of_the_plain_trainer_continues(
    runs: dict[str, Path], name: str, tmp_path: Path
) -> None:
    shutil.copytree(runs["plain"] / name, tmp_path / name)
    run(2, "sharded", str(tmp_path), "--resume", "--only", name)
    expected, got = (
        [entry["loss"] for entry in history(folder, name) if "loss" in entry]
        for folder in (runs["plain"], tmp_path)
    )
    assert got == pytest.approx(expected, abs=TOLERANCE.get(name, 1e-5))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    [file] = folder.glob("*.safetensors")
    return safetensors.torch.load_file(file)


REFUSED: dict[str, dict[str, Any]] = {
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "bf16_full_eval": {"bf16_full_eval": True},
    "fp16_full_eval": {"fp16_full_eval": True},
}


def refusal(options: dict[str, Any]) -> str:
    import transformers

    from bmtrain.integrations.transformers import Trainer

    args = transformers.TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to=[], **options)
    with pytest.raises(ValueError) as caught:
        Trainer(model=torch.nn.Linear(2, 1), args=args)
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_a_sharded_model_cannot_follow_are_named(name: str) -> None:
    [message] = run_ranks(1, refusal, REFUSED[name], timeout=120)
    assert message.startswith(f"TrainingArguments({name}=True): not with a sharded model: ")


def refused_optimizers() -> list[str]:
    import transformers

    from bmtrain.integrations.accelerate import Accelerator
    from bmtrain.integrations.transformers import Trainer

    args = transformers.TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, report_to=[], optim="adafactor", disable_tqdm=True
    )
    ids = torch.arange(16)
    trainer = Trainer(
        model=trainer_script.llama(), args=args, train_dataset=[{"input_ids": ids, "labels": ids}]
    )
    model = bmt.BMTrainModelWrapper(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adafactor(model.parameters())
    said = []
    for train in (trainer.train, lambda: Accelerator(cpu=True).prepare(model, optimizer)):
        with pytest.raises(ValueError) as caught:
            train()
        said.append(str(caught.value))
    return said


def test_optimizers_over_whole_tensors_are_refused() -> None:
    for said in run_ranks(1, refused_optimizers, timeout=120)[0]:
        assert said.startswith("optimizer: Adafactor computes over whole tensors")


def refused_plugin() -> str:
    from accelerate import DistributedType

    from bmtrain.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    kind, accelerator.state.distributed_type = accelerator.distributed_type, DistributedType.FSDP
    with pytest.raises(ValueError) as caught:
        accelerator.adopt()
    accelerator.state.distributed_type = kind
    return str(caught.value)


def test_plugins_of_accelerate_that_shard_are_refused() -> None:
    [said] = run_ranks(1, refused_plugin, timeout=120)
    assert said == "Accelerator: expected plain data parallelism, got FSDP; leave its plugin out"


class Processing:
    """In place of a tokenizer."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "processing.json").write_text("{}")


def save_model_alone(folder: str) -> tuple[int, set[str]]:
    import transformers

    from bmtrain.integrations.transformers import Trainer

    args = transformers.TrainingArguments(
        folder, use_cpu=True, report_to=[], max_steps=2, save_steps=1, save_only_model=True, disable_tqdm=True
    )
    ids = torch.arange(16)
    data = [{"input_ids": ids, "labels": ids}] * 4
    for resumed in (None, f"{folder}/checkpoint-1"):
        trainer = Trainer(
            model=trainer_script.llama(), args=args, train_dataset=data, processing_class=Processing()
        )
        trainer.train(resume_from_checkpoint=resumed)
    return trainer.state.global_step, {path.name for path in Path(folder, "checkpoint-2").iterdir()}


def test_a_run_that_saves_the_model_alone_continues(tmp_path: Path) -> None:
    for step, files in run_ranks(2, save_model_alone, str(tmp_path), timeout=120):
        assert step == 2 and {"processing.json", "model.safetensors", "config.json"} <= files
        assert "optimizer" not in files


def train_by_own_optimizer(cls: Any, folder: str, resumed: str | None) -> dict[str, torch.Tensor]:
    """Weights after three steps, of samples that are all alike."""
    import transformers

    torch.manual_seed(3)
    model = trainer_script.llama(tie_word_embeddings=True)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(trainer_script.VOCABULARY))
    groups = [{"params": list(model.model.parameters())}, {"params": [model.lm_head.bias], "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    args = transformers.TrainingArguments(
        folder, use_cpu=True, report_to=[], max_steps=3, save_steps=1, disable_tqdm=True, seed=1
    )
    ids = torch.arange(16)
    data = [{"input_ids": ids, "labels": ids}] * 32
    trainer = cls(model=model, args=args, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.train(resume_from_checkpoint=resumed)
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def train_plain(folder: str) -> dict[str, torch.Tensor]:
    import transformers

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return train_by_own_optimizer(transformers.Trainer, folder, None)


def train_sharded(folder: str, resumed: str | None) -> dict[str, torch.Tensor]:
    from bmtrain.integrations.transformers import Trainer

    return train_by_own_optimizer(Trainer, folder, resumed)


def test_an_optimizer_of_the_script_continues_the_plain_trainer(tmp_path: Path) -> None:
    plain, sharded = str(tmp_path / "plain"), str(tmp_path / "sharded")
    [expected] = run_ranks(1, train_plain, plain, init=False, fresh=True)
    for resumed in (None, f"{plain}/checkpoint-2"):
        for got in run_ranks(2, train_sharded, sharded, resumed, init=False, fresh=True):
            for name, value in expected.items():
                torch.testing.assert_close(got[name], value, rtol=0, atol=1e-5)


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def losses(model: Any, optimizer: Any, backward: Any, number: int) -> list[float]:
    x = torch.linspace(-1, 2, 40).view(8, 5).sin()
    found = []
    for _ in range(number):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        backward(loss)
        optimizer.step()
        found.append(loss.item())
    return found


def prepared_together(kind: Any) -> list[float]:
    """Losses where the optimizer is made of the plain model, which it has trained for two steps."""
    from bmtrain.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = kind(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = losses(model, optimizer, torch.Tensor.backward, 2)
    model, optimizer, _ = accelerator.prepare(model, optimizer, schedule)
    return found + losses(model, optimizer, accelerator.backward, 3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_a_model_and_its_optimizer_are_prepared_together(kind: Any) -> None:
    model = net()
    expected = losses(model, kind(model.parameters(), lr=0.01), torch.Tensor.backward, 5)
    for found in run_ranks(2, prepared_together, kind, timeout=120):
        assert found == pytest.approx(expected, abs=1e-6)


def train_two_models(shares: bool, is_sharded: bool) -> list[float]:
    """Losses of two models; the optimizers, or the one that both share, have trained for two steps before."""
    models = [net(), torch.nn.Sequential(net(), torch.nn.Linear(1, 1))]
    params = [list(model.parameters()) for model in models]
    optimizers = [
        torch.optim.AdamW(part, lr=0.01) for part in ([params[0] + params[1]] if shares else params)
    ]
    backward, found = torch.Tensor.backward, []
    for number in (2, 3):
        for model, optimizer in zip(models, optimizers * (1 + shares), strict=True):
            found += losses(model, optimizer, backward, number)
        if is_sharded and number == 2:
            from bmtrain.integrations.accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            prepared = list(accelerator.prepare(*models, *optimizers))
            models, optimizers, backward = prepared[:2], prepared[2:], accelerator.backward
    return found


@pytest.mark.parametrize("shares", [False, True])
def test_two_models_are_prepared_together(shares: bool) -> None:
    expected = train_two_models(shares, False)
    for found in run_ranks(2, train_two_models, shares, True, timeout=120):
        assert found == pytest.approx(expected, abs=1e-6)


def prepared_layer(wrap: str, is_set: bool) -> tuple[int, str, float]:
    """Level and recomputation of a Block that is made for a trainer, and the largest value of a buffer of rank 1."""
    from bmtrain.integrations.accelerate import Accelerator
    from bmtrain.integrations.sharding import shard_model

    policy = bmt.BlockPolicy(level=0, recompute="selective")
    with bmt.default_policy(policy) if is_set else contextlib.nullcontext():
        model = torch.nn.ModuleList([torch.nn.Linear(3, 3)])
        model[0].register_buffer("mean", torch.zeros(3))
        if wrap == "trainer":
            shard_model(model)
        elif wrap == "before":
            bmt.BMTrainModelWrapper(model)
        model[0].mean.fill_(bmt.rank())
        Accelerator(cpu=True).prepare(model)
    return model[0]._policy.level, model[0]._policy.recompute.value, model[0].mean.max().item()


@pytest.mark.parametrize("sp_size", [1, 2])
@pytest.mark.parametrize(
    ("wrap", "recompute", "mean"), [("trainer", "off", 1), ("before", "whole", 1), ("prepare", "whole", 0)]
)
def test_a_policy_of_the_script_and_a_wrapped_model_stay(
    wrap: str, recompute: str, mean: float, sp_size: int
) -> None:
    if sp_size == 2 and wrap != "before":
        with pytest.raises(RankError, match="sp_size 2: expected 1 with a trainer"):
            run_ranks(2, prepared_layer, wrap, False, init={"sp_size": 2}, timeout=120)
        return
    options = {"sp_size": sp_size, "zero_level": 2}
    for is_set, expected in ((True, (0, "selective")), (False, (2, recompute))):
        found = run_ranks(2, prepared_layer, wrap, is_set, init=options, timeout=120)
        assert found[1] == (*expected, mean)


def states_of_accelerate(folder: str, is_ours: bool, first: int) -> list[float]:
    """Losses of some steps, if any, of some that are lost, and of those after ``load_state``."""
    import accelerate

    from bmtrain.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = bmt.BMTrainModelWrapper(net())
    parameters = model.parameters()
    adam = (
        bmt.optim.AdamOptimizer(parameters, lr=0.01, weight_decay=0.01, decoupled=True)
        if is_ours
        else accelerate.Accelerator(cpu=True).prepare_optimizer(torch.optim.AdamW(parameters, lr=0.01))
    )
    model, optimizer = accelerator.prepare(*accelerator.prepare(model, adam))  # as trainers that train twice
    found = losses(model, optimizer, accelerator.backward, first)
    if first:
        accelerator.save_state(folder)
    losses(model, optimizer, accelerator.backward, 2)
    accelerator.load_state(folder)
    return found + losses(model, optimizer, accelerator.backward, 3)


@pytest.mark.parametrize("is_ours", [False, True])
def test_states_of_accelerate_continue_on_any_number_of_ranks(is_ours: bool, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = losses(model, optimizer, torch.Tensor.backward, 6)
    for found in run_ranks(2, states_of_accelerate, str(tmp_path), is_ours, 3, timeout=120):
        assert found == pytest.approx(expected, abs=1e-6)
    [alone] = run_ranks(1, states_of_accelerate, str(tmp_path), is_ours, 0, timeout=120)
    assert alone == pytest.approx(expected[3:], abs=1e-6)


def pretrained(folder: str) -> tuple[torch.Tensor, int]:
    from transformers import AutoModelForCausalLM

    from bmtrain.integrations.transformers import from_pretrained

    model = from_pretrained(AutoModelForCausalLM, folder)
    with torch.no_grad():
        logits = model(torch.arange(16)[None]).logits
    return logits, sum(p.numel() for p in model.parameters())


def test_from_pretrained_reads_shards(tmp_path: Path) -> None:
    model = trainer_script.llama()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.arange(16)[None]).logits
    found = run_ranks(2, pretrained, str(tmp_path), timeout=120)
    for logits, _ in found:
        torch.testing.assert_close(logits, expected)
    held = sum(numel for _, numel in found)
    assert model.num_parameters() <= held <= 1.05 * model.num_parameters()


def whole_counts() -> tuple[int, int]:
    model = bmt.BMTrainModelWrapper(trainer_script.llama())
    return model.num_parameters(), model.num_parameters(exclude_embeddings=True)


def test_num_parameters_counts_whole_parameters() -> None:
    model = trainer_script.llama()
    expected = (model.num_parameters(), model.num_parameters(exclude_embeddings=True))
    assert run_ranks(2, whole_counts, timeout=120) == [expected] * 2


def mixtral() -> tuple[Any, dict[str, torch.Tensor]]:
    """Files have the matrices of each expert, the model those of all experts in one parameter."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), {"input_ids": torch.arange(16)[None]}


def vit() -> tuple[Any, dict[str, torch.Tensor]]:
    """Names of layers differ."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28,
        patch_size=14, num_labels=3,
    )  # fmt: skip
    pixels = torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28)
    return transformers.ViTForImageClassification(config), {"pixel_values": pixels}


def llava() -> tuple[Any, dict[str, torch.Tensor]]:
    """Names of the parts differ."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    import transformers

    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(image_size=28, patch_size=14, projection_dim=32, **sizes),
        text_config=transformers.LlamaConfig(vocab_size=96, **sizes),
        image_token_id=95,
    )
    ids = torch.tensor([[1, 2, 95, 95, 95, 95, 3, 4]])
    pixels = torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28)
    return transformers.LlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values": pixels}


def train_and_save(cls: Any, inputs: dict[str, torch.Tensor], source: str, target: str) -> list[torch.Tensor]:
    """Logits of the model that each of the two ways loads; the Trainer's is trained for a step and saved."""
    import transformers

    from bmtrain.integrations.transformers import Trainer, from_pretrained

    labels = torch.zeros(1) if "input_ids" not in inputs else inputs["input_ids"][0]
    sample = {**{name: value[0] for name, value in inputs.items()}, "labels": labels.long().squeeze()}
    args = transformers.TrainingArguments(
        target, use_cpu=True, report_to=[], max_steps=1, save_strategy="no", per_device_train_batch_size=1,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=cls.from_pretrained(source), args=args, train_dataset=[sample] * 2)
    found = []
    with torch.no_grad():
        found.append(trainer.model.eval()(**inputs).logits)
        found.append(from_pretrained(cls, source)(**inputs).logits)
    trainer.train()
    trainer.save_model(target)
    with torch.no_grad():
        found.append(trainer.model.eval()(**inputs).logits)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("make", [mixtral, vit, llava])
def test_names_that_transformers_converts(make: Any, tmp_path: Path) -> None:
    """Weights whose names in files differ from the model's are read, and saved so that plain models read them."""
    model, inputs = make()
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    model.save_pretrained(source)
    with torch.no_grad():
        expected = model.eval()(**inputs).logits
    assert not tensors(Path(source)).keys() <= model.state_dict().keys()
    for by_trainer, by_shards, trained in run_ranks(2, train_and_save, type(model), inputs, source, target):
        torch.testing.assert_close(by_trainer, expected)
        torch.testing.assert_close(by_shards, expected)
        assert not torch.equal(trained, expected)
    again, report = type(model).from_pretrained(target, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(**inputs).logits, trained)
