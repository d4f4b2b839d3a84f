"""Strategies for the ``Trainer`` and for ``Fabric`` of Lightning."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDP
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy as TrainerDDP
from lightning.pytorch.trainer.states import TrainerFn

from .. import dcp
from .._ranks.agree import on_rank_0
from ..global_var import config
from ..init import init_distributed
from ..optim._state import load_optimizer_state
from ..optim._suitability import adopt_optimizer
from ..optim.clip_grad import clip_gradients
from ..store import DistributedStateDictWrapper
from .loss_scale import SharedScaler
from .sharding import shard_model, step_with_whole_parameters

__all__ = ["BMTrainFabricStrategy", "BMTrainStrategy"]

#: File of a checkpoint, beside the shards, of all but weights and optimizers; Lightning's own sharded strategies name
#: it so.
_REST = "meta.pt"
#: Entry of a checkpoint, beside which WeightAveraging puts the average into the entry of the model.
_CURRENT = "current_model_state"


def _join(strategy: Any) -> None:
    """Initialises the library on the strategy's processes, once, beside torch's process group. Collective.

    Raises:
        ValueError: the library has been initialised for other ranks, or for another kind of device.
    """
    rank, world_size = strategy.global_rank, strategy.world_size
    if not config["initialized"]:
        address = strategy.cluster_environment.main_address
        port = strategy.broadcast(_free_port() if rank == 0 else 0)
        init_distributed(f"tcp://{address}:{port}?rank={rank}&world_size={world_size}")
    found = config["rank"], config["world_size"], config["device"].type
    if found != (rank, world_size, strategy.root_device.type):
        raise ValueError(
            f"strategy: expected rank {rank} of {world_size} on {strategy.root_device.type}, as Lightning has it, got "
            f"{found[0]} of {found[1]} on {found[2]}: let the strategy call init_distributed, and hide GPUs that are "
            "not to be used (CUDA_VISIBLE_DEVICES=)"
        )


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return int(server.getsockname()[1])


def _share_scale(plugin: Any) -> None:
    """Lets all ranks use one loss scale, where the precision has one. Does nothing a second time."""
    scaler = getattr(plugin, "scaler", None)
    if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled():
        plugin.scaler = SharedScaler(scaler)


class _Folder:
    """A checkpoint: weights and optimizers in the format of torch.distributed.checkpoint, and a file of the rest."""

    def __init__(self, path: Path, model_key: str, optim_key: str) -> None:
        self._path = path
        self._keys = {"model_key": model_key, "optim_key": optim_key}

    def save(
        self, model: torch.nn.Module, optimizers: list[Any], rest: dict[str, Any], write: Callable[..., None]
    ) -> None:
        """Replaces an existing checkpoint, when the new one is complete. Collective."""
        new = self._path.with_name(f".{self._path.name}.new")
        on_rank_0(lambda: shutil.rmtree(new, ignore_errors=True), "save_checkpoint")
        dcp.save(new, model, optimizers, **self._keys)
        on_rank_0(lambda: write(rest, new / _REST), "save_checkpoint")
        on_rank_0(lambda: self._replace(new), "save_checkpoint")

    def _replace(self, new: Path) -> None:
        old = self._path.with_name(f".{self._path.name}.old")
        if self._path.exists():
            _remove(old)  # which a run that was killed here has left
            self._path.rename(old)
        new.rename(self._path)
        _remove(old)

    def load(self, model: torch.nn.Module, optimizers: list[Any], strict: bool) -> None:
        """Loads weights and optimizer state. Collective."""
        dcp.load(self._path, model, optimizers, strict=strict, **self._keys)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _load_whole(model: torch.nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Loads a whole state dict, which every rank has read. Collective."""
    model.load_state_dict(DistributedStateDictWrapper(state), strict=strict)


class _OfShards:
    """Part of a precision plugin: steps read whole parameters, and gradients are clipped by the norm over all ranks."""

    main_params: Any

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        outer: Any = super()
        with outer.forward_context(), step_with_whole_parameters():
            yield

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        clip_gradients(self.main_params(optimizer), clip_val)


def _average_shards(trainer: Any, module: Any) -> None:
    """Lets callbacks that copied the module before it was sharded copy it again.

    Raises:
        ValueError: for one that loses its learning rates where a model is loaded after the setup of a strategy.
    """
    for callback in trainer.callbacks:
        if isinstance(callback, callbacks.StochasticWeightAveraging):
            raise ValueError(
                "StochasticWeightAveraging: not with sharded models, as in Lightning's own strategies for them; use "
                "lightning.pytorch.callbacks.WeightAveraging"
            )
        averaging: Any = getattr(callbacks, "WeightAveraging", ())  # from Lightning 2.6 on
        if isinstance(callback, averaging):
            callback.setup(trainer, module, "fit")


class BMTrainStrategy(TrainerDDP):  # type: ignore[misc]
    """Strategy of Lightning's ``Trainer`` whose models are sharded by this library.

    The module is sharded in place before ``configure_optimizers``: optimizers see shards. Layers in a ``ModuleList``
    become Blocks. Gradients are of the mean of the ranks' losses, as with DDP. A checkpoint is a folder, in the form of
    Lightning's own sharded strategies, and resumes on any number of ranks; a file of another strategy loads too.

    Args:
        options: as ``DDPStrategy`` takes them for the launcher and torch's process group.

    Example:
        >>> from bmtrain.integrations.lightning import BMTrainStrategy
        >>> trainer = lightning.Trainer(strategy=BMTrainStrategy(), devices=2)      # doctest: +SKIP
    """

    def setup_environment(self) -> None:
        super().setup_environment()
        _join(self)

    def setup(self, trainer: Any) -> None:
        _share_scale(self.precision_plugin)
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        module: Any = self.lightning_module
        if is_fitting and self._layer_sync:
            module = self._layer_sync.apply(module)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        shard_model(module)
        if is_fitting:
            _average_shards(trainer, module)
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                adopt_optimizer(optimizer)
        self.setup_precision_plugin()
        plugin = self.precision_plugin
        if not isinstance(plugin, _OfShards):
            plugin.__class__ = type(type(plugin).__name__, (_OfShards, type(plugin)), {})

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backpropagates the mean of the ranks' losses."""
        super().backward(closure_loss / self.world_size, optimizer, *args, **kwargs)
        return closure_loss

    def teardown(self) -> None:
        """Leaves the shards where they are."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- checkpoints: what Lightning would gather is written by each rank, when the checkpoint is saved

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: :meth:`load_checkpoint` has loaded it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: :meth:`load_checkpoint` has loaded it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a folder, each rank its own part. Collective."""
        elsewhere = {"optimizer_states"} if _CURRENT in checkpoint else {"state_dict", "optimizer_states"}
        rest = {key: value for key, value in checkpoint.items() if key not in elsewhere}
        optimizers = list(self.optimizers) if "optimizer_states" in checkpoint else []
        write = self.checkpoint_io.save_checkpoint
        self._folder(filepath).save(
            self.lightning_module, optimizers, rest, lambda state, path: write(state, path, storage_options)
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads a folder, or a file of another strategy. Collective."""
        path = Path(self.broadcast(checkpoint_path))
        options = {} if weights_only is None else {"weights_only": weights_only}
        strict = self.lightning_module.strict_loading
        is_fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = list(self.optimizers) if is_fitting else []  # which an evaluation leaves as they are
        if path.is_dir():
            self._folder(path).load(self.lightning_module, optimizers, strict)
            rest: dict[str, Any] = self.checkpoint_io.load_checkpoint(path / _REST, **options)
            if _CURRENT in rest:
                rest[_CURRENT] = self.lightning_module.state_dict()
                _load_whole(self.lightning_module, rest["state_dict"], strict)
            return {"state_dict": {}, "optimizer_states": [], **rest}
        whole: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, **options)
        _load_whole(self.lightning_module, whole["state_dict"], strict)
        for optimizer, state in zip(optimizers, whole.get("optimizer_states", ()), strict=False):
            load_optimizer_state(optimizer, {**state, "is_whole": True}, 1.0)
        return whole

    def _folder(self, path: Any) -> _Folder:
        return _Folder(Path(self.broadcast(path)), "model", "optimizer_0")


class BMTrainFabricStrategy(FabricDDP):  # type: ignore[misc]
    """Strategy of Lightning's ``Fabric`` whose models are sharded by this library.

    ``fabric.setup(model, optimizer)`` shards the model and hands the optimizer its shards. Gradients are of the mean of
    the ranks' losses, as with DDP, and are reduced in every backward. A checkpoint is a folder that holds one model and
    its optimizers, and loads on any number of ranks.

    Args:
        options: as ``DDPStrategy`` takes them for the launcher and torch's process group.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._backward_sync_control = None

    def setup_environment(self) -> None:
        super().setup_environment()
        _join(self)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        _share_scale(self.precision)
        shard_model(module)
        return module

    def setup_module_and_optimizers(self, module: torch.nn.Module, optimizers: list[Any], *args: Any) -> Any:
        """Shards the model, and puts the shards in place of its parameters in the optimizers."""
        shard_model(module, optimizers)
        return self.setup_module(module), [self.setup_optimizer(made) for made in optimizers], *args

    def setup_optimizer(self, optimizer: Any) -> Any:
        adopt_optimizer(optimizer)
        return super().setup_optimizer(optimizer)

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Backpropagates the mean of the ranks' losses."""
        super().backward(tensor / self.world_size, module, *args, **kwargs)

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clips by the norm over all ranks, and returns it. Collective."""
        norm = clip_gradients(self.precision.main_params(optimizer), max_norm, norm_type=norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"clip_gradients: the norm of the gradients is {norm.item()}")
        return norm

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Writes a folder, each rank its own part. Collective."""
        if filter:
            raise ValueError("fabric.save: expected no filter: shards are saved as they are")
        folder, model, optimizers = self._parts(path, state)
        rest = {
            key: value.state_dict() if hasattr(value, "state_dict") else value
            for key, value in state.items()
            if not isinstance(value, (torch.nn.Module, torch.optim.Optimizer))
        }
        write = self.checkpoint_io.save_checkpoint
        folder.save(model, optimizers, rest, lambda state, path: write(state, path, storage_options))

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads a folder into the objects in ``state``; or a file, as of a plain model. Collective."""
        place = Path(self.broadcast(path))
        options = {} if weights_only is None else {"weights_only": weights_only}
        if not place.is_dir():
            loaded: dict[str, Any] = super().load_checkpoint(place, state, strict, **options)
            return loaded
        folder, model, optimizers = self._parts(place, state)
        folder.load(model, optimizers, strict)
        rest: dict[str, Any] = self.checkpoint_io.load_checkpoint(place / _REST, **options)
        for key, value in state.items():
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
                continue
            if key not in rest:
                if strict:
                    raise KeyError(f"fabric.load: the checkpoint has no {key!r}, only {sorted(rest)}")
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(key))
            else:
                state[key] = rest.pop(key)
        return rest

    def load_module_state_dict(
        self, module: torch.nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        _load_whole(module, state_dict, strict)

    def _parts(self, path: Any, state: Any) -> tuple[_Folder, torch.nn.Module, list[Any]]:
        state = state if isinstance(state, dict) else {}
        models = {key: value for key, value in state.items() if isinstance(value, torch.nn.Module)}
        optimizers = {key: value for key, value in state.items() if isinstance(value, torch.optim.Optimizer)}
        if len(models) != 1:
            raise ValueError(
                f"state: expected one model in a dict, got {sorted(models)}; give each its own folder"
            )
        [(key, model)] = models.items()
        return (
            _Folder(Path(self.broadcast(path)), key, next(iter(optimizers), "optimizer")),
            model,
            list(optimizers.values()),
        )
