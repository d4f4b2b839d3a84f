"""Trains small models by a trainer of transformers, plain or sharded, each of `VARIANTS`; writes what it saw.

python tests/integrations/trainer_script.py plain FOLDER
torchrun --nproc-per-node 2 tests/integrations/trainer_script.py sharded FOLDER [--resume]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

BATCH = 8  # over all ranks
NUM_RANKS = int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY = 96


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        **options,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.AutoModelForSequenceClassification.from_config(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForSeq2SeqLM.from_config(config)


def lora() -> Any:
    import peft  # takes seconds, which tests that collect this file do without

    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(llama(), options)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def generated(prediction: Any) -> dict[str, float]:
    return {"generated": float(prediction.predictions.sum())}


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    return (
        torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        / num_items_in_batch
    )


def penalising(trainer: Any, is_used: bool) -> Any:
    """A subclass whose loss has the norm of a layer's weight as a term."""

    class Penalising(trainer):
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(model, *args, **kwargs)
            penalty = 0.1 * model.model.layers[1].mlp.up_proj.weight.norm()
            return (found[0] + penalty, *found[1:]) if isinstance(found, tuple) else found + penalty

    return Penalising if is_used else trainer


def stops() -> Any:
    """A callback that ends the training after 7 steps."""

    class Stops(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop = state.global_step >= 7

    return Stops()


#: Name -> model, arguments of the arguments, arguments of the trainer.
VARIANTS: dict[str, tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "causal": (llama, {}, {}),
    "tied": (lambda: llama(tie_word_embeddings=True), {}, {}),
    "classification": (bert, {}, {"compute_metrics": accuracy}),
    "accumulation": (llama, {"gradient_accumulation_steps": 2}, {}),
    "checkpointing": (llama, {"gradient_checkpointing": True}, {}),
    "label-smoothing": (llama, {"label_smoothing_factor": 0.1}, {}),
    "own-loss": (llama, {}, {"compute_loss_func": own_loss}),
    "penalty": (llama, {}, {}),
    "best": (llama, {"load_best_model_at_end": True, "metric_for_best_model": "loss"}, {}),
    "callback": (llama, {}, {"callbacks": [stops]}),
    "cosine-sgd": (llama, {"lr_scheduler_type": "cosine", "optim": "sgd", "learning_rate": 0.1}, {}),
    "bf16": (llama, {"bf16": True}, {}),
    "fp16": (llama, {"fp16": True, "optim": "adamw_torch"}, {}),
    "model-init": (llama, {}, {"model_init": lambda: llama()}),
    "lora": (lora, {"learning_rate": 1e-2}, {}),
    "seq2seq": (
        t5,
        {"predict_with_generate": True, "generation_max_length": 12},
        {"compute_metrics": generated},
    ),
}


#: Variants of 30 steps; the others have 12.
LONG = ("causal", "classification")
#: Variants that are also resumed from the checkpoint at two thirds.
RESUMED = ("causal", "bf16", "fp16", "accumulation", "lora", "seq2seq")
#: The loss scale of "fp16" in its first step, so large that gradients overflow.
FIRST_SCALE = 2.0**22


def dataset(name: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for _ in range(64):
        ids = torch.randint(1, VOCABULARY, (16,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids[0] % 3 if name == "classification" else ids.clone()})
    return samples


def compute_in_fp16(accelerator: Any) -> None:
    """Makes accelerate use fp16 on a CPU, as on a GPU."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=4)
    if hasattr(accelerator, "adopt"):
        accelerator.adopt()


def train(name: str, kind: str, folder: Path, resume: bool) -> list[dict[str, Any]]:
    make, options, extra = VARIANTS[name]
    if kind == "plain":
        import transformers as trainers
    else:
        import bmtrain.integrations.transformers as trainers
    if "callbacks" in extra:
        extra = {"callbacks": [make_callback() for make_callback in extra["callbacks"]]}
    num_steps = 30 if name in LONG else 12
    third = num_steps // 3
    seq2seq = "predict_with_generate" in options
    args = (transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments)(
        str(folder / name),
        **{
            "per_device_train_batch_size": BATCH
            // options.get("gradient_accumulation_steps", 1)
            // NUM_RANKS,
            "per_device_eval_batch_size": BATCH // NUM_RANKS,
            "max_steps": num_steps,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": third,
            "save_steps": third,
            "learning_rate": 1e-3,
            "warmup_steps": 5,
            "weight_decay": 0.01,
            "use_cpu": True,
            "report_to": [],
            "disable_tqdm": True,
            **options,
        },
    )
    transformers.set_seed(2)
    model = None if "model_init" in extra else make()
    data = dataset(name)
    trainer = penalising(trainers.Seq2SeqTrainer if seq2seq else trainers.Trainer, name == "penalty")(
        model=model, args=args, train_dataset=data, eval_dataset=data[:24], **extra
    )
    if args.fp16:
        compute_in_fp16(trainer.accelerator)
    trainer.train(resume_from_checkpoint=str(folder / name / f"checkpoint-{2 * third}") if resume else None)
    trainer.save_model(str(folder / name / "final"))
    return trainer.state.log_history


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["plain", "sharded"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        name: train(name, options.kind, options.folder, options.resume)
        for name in (RESUMED if options.resume else VARIANTS)
        if name.startswith(options.only)
    }
    if int(os.environ.get("RANK", "0")) == 0:
        (options.folder / "log.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
