"""``Trainer`` and ``Seq2SeqTrainer`` of transformers for sharded models."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from .. import weights
from .._files.safetensors import locate_tensors
from .._model.outline import outline_of
from .._ranks.agree import on_all_ranks, on_rank_0
from ..distributed import all_reduce, checkpoint
from ..global_var import config
from ..init import init_distributed
from ..wrapper import BMTrainModelWrapper
from .accelerate import Accelerator
from .sharding import shard_model, step_with_whole_parameters

__all__ = ["Seq2SeqTrainer", "Trainer", "from_pretrained"]

#: Folder, in a checkpoint of the trainer, of the optimizer's shards.
_OPTIMIZER_FOLDER = "optimizer"


def from_pretrained(cls: Any, folder: str | Path, **options: Any) -> torch.nn.Module:
    """A pretrained model of which each rank reads the bytes of its own shards only. Collective.

    Where names in the files differ from the model's, because transformers converts them while it loads (mixtures of
    experts, ``ViT``, ``Llava``), each rank reads the whole model on its host.

    Args:
        cls: a class of models, or an Auto class.
        folder: with ``config.json`` and safetensors.
        options: for ``AutoConfig.from_pretrained``, ``dtype`` for example.

    Returns:
        the sharded model in evaluation mode, as ``cls.from_pretrained`` gives it.

    Raises:
        OSError, RuntimeError: see :func:`bmtrain.weights.load`.
    """
    _initialize()
    settings = transformers.AutoConfig.from_pretrained(folder, **options)
    make = getattr(cls, "from_config", None) or cls._from_config
    with torch.device("meta"):
        model = BMTrainModelWrapper(make(settings).eval())
    stored = on_all_ranks(lambda: locate_tensors(folder), "from_pretrained")
    if stored.keys() <= outline_of(model).entries.keys():
        weights.load(model, folder)
        return model
    return BMTrainModelWrapper(cls.from_pretrained(folder, config=settings))


def _initialize() -> None:
    if not config["initialized"]:
        init_distributed()


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` that trains a sharded model: the class is replaced, and nothing else in a script.

    Under torchrun every rank holds its shards of parameters, gradients and optimizer state. Losses, learning rates and
    files are as from the plain trainer in one process with the same total batch. ``save_model`` and checkpoints hold
    safetensors that ``from_pretrained`` reads; a checkpoint resumes on any number of ranks.

    Args:
        args, kwargs: as ``transformers.Trainer`` takes them. A model that differs between ranks gets the values
            of rank 0.

    Raises:
        ValueError: naming an argument that a sharded model cannot follow: fp16_full_eval, bf16_full_eval,
            auto_find_batch_size, deepspeed, fsdp, parallelism_config, more than one GPU in a process.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _initialize()  # it seeds, so before the trainer does
        self._model_divides: bool | None = None
        super().__init__(*args, **kwargs)
        _check(self.args)
        if self.model_init is None:
            self._shard(self.model, self.optimizer)

    # ---- the model and the step

    def call_model_init(self, trial: Any = None) -> torch.nn.Module:
        model = super().call_model_init(trial).to(self.args.device)
        self._shard(model)
        return model

    def _shard(self, model: torch.nn.Module, *optimizers: Any) -> None:
        inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        name = getattr(type(inner), "_old_class", type(inner)).__name__
        shard_model(model, filter(None, optimizers))
        inner._get_name = functools.partial(str, name)  # trainers look up what a causal model is by this

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = Accelerator  # the trainer makes its own; the subclass adds no state
        self.accelerator.adopt()

    def compute_loss_context_manager(self) -> ExitStack:
        """A ``compute_loss`` of a subclass reads whole parameters."""
        stack = super().compute_loss_context_manager()
        stack.enter_context(step_with_whole_parameters())  # and leaves with the rest of the stack
        return stack

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean over all ranks' samples, also of a model that takes the mean of its own batch."""
        may_be_mean = (
            self.args.average_tokens_across_devices
            and num_items_in_batch is not None
            and self.model_accepts_loss_kwargs
            and self.label_smoother is None
            and self.compute_loss_func is None
        )
        # The trainer multiplies by the number of processes, as if the loss were a sum over all ranks' items.
        is_mean = may_be_mean and not self._divides_by_items(model, inputs)
        divisor = self.accelerator.num_processes if is_mean else 1
        found: Any = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return (found[0] / divisor, *found[1:]) if return_outputs else found / divisor

    def _divides_by_items(self, model: Any, inputs: Any) -> bool:
        """Tries whether the model's loss depends on ``num_items_in_batch``, once. Collective."""
        if self._model_divides is None:
            was_training = model.training
            model.eval()
            with torch.no_grad():
                outputs = [model(**inputs, num_items_in_batch=torch.tensor(n)) for n in (1.0, 2.0)]
            model.train(was_training)
            losses = [found["loss"] if isinstance(found, dict) else found[0] for found in outputs]
            differs = (losses[0] != losses[1]).to(torch.float32)
            self._model_divides = bool(all_reduce(differs, "max"))
        return self._model_divides

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Ranks continue to generate until all are done, as every forward gathers."""
        if hasattr(self, "_gen_kwargs"):
            self._gen_kwargs.setdefault("synced_gpus", self.args.world_size > 1)
        return super().prediction_step(model, inputs, *args, **kwargs)

    # ---- files

    model: Any  # of any class that the user gives
    lr_scheduler: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes safetensors and configuration, which ``from_pretrained`` of transformers and peft read. Collective."""
        folder = Path(output_dir or str(self.args.output_dir))
        names = _adapter_names(self.model)
        if names is None:
            weights.save(self.model, folder)
        else:
            weights.save(self.model, folder / "adapter_model.safetensors", rename=names.get)
        on_rank_0(lambda: self._save_settings(folder), "save_model")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_settings(self, folder: Path) -> None:
        model = self.model
        if _adapter_names(model) is not None:
            for settings in model.peft_config.values():
                settings.save_pretrained(folder)
        elif isinstance(model, transformers.PreTrainedModel):
            model.config.architectures = [model._get_name()]
            model.config.dtype = model.dtype
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self._load_weights(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        self._load_weights(Path(str(self.state.best_model_checkpoint)))

    def _load_weights(self, folder: Path) -> None:
        names = _adapter_names(self.model)
        if names is None:
            self._issue_warnings_after_load(weights.load(self.model, folder, strict=False))
        else:
            own = {there: name for name, there in names.items()}
            weights.load(self.model, folder / "adapter_model.safetensors", strict=False, rename=own.get)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoint.save(
            Path(output_dir, _OPTIMIZER_FOLDER), self.state.global_step, optim=_bare(self.optimizer)
        )
        on_rank_0(
            lambda: torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME)), "save"
        )

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None or not Path(checkpoint_folder, _OPTIMIZER_FOLDER).is_dir():
            # Of a plain trainer, or of the model alone.
            super()._load_optimizer_and_scheduler(checkpoint_folder)
            return
        checkpoint.load(Path(checkpoint_folder, _OPTIMIZER_FOLDER), optim=_bare(self.optimizer), random=False)
        self.lr_scheduler.load_state_dict(
            torch.load(Path(checkpoint_folder, SCHEDULER_NAME), weights_only=True)
        )


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` that trains a sharded model; see :class:`Trainer`."""


def _check(args: transformers.TrainingArguments) -> None:
    reasons = {
        "fp16_full_eval": "it would convert the shards in place; use bf16",
        "bf16_full_eval": "it would convert the shards in place; use bf16",
        "auto_find_batch_size": "one rank that runs out of memory would leave the others waiting",
        "deepspeed": "parameters are sharded here already",
        "fsdp": "parameters are sharded here already",
        "parallelism_config": "parameters are sharded here already; init_distributed has tp_size and pipe_size",
    }
    for name, reason in reasons.items():
        if value := getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}={value!r}): not with a sharded model: {reason}")
    if args.n_gpu > 1:
        raise ValueError(
            f"Trainer: expected one process for each of the {args.n_gpu} GPUs; start with torchrun"
        )


def _bare(optimizer: Any) -> Any:
    """The optimizer in accelerate's wrapper, if it has one."""
    return getattr(optimizer, "optimizer", optimizer)


def _adapter_names(model: Any) -> dict[str, str] | None:
    """Names of the parameters that peft saves: in the model -> in its file; None for a model without adapters."""
    if not hasattr(model, "peft_config"):
        return None
    import peft

    stand_ins = {name: torch.empty(0, device="meta") for name, _ in model.named_parameters()}
    saved = peft.get_peft_model_state_dict(model, state_dict=dict(stand_ins))
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    return {names[id(tensor)]: name for name, tensor in saved.items()}
