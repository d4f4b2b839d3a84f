"""Descriptions of models that exist as modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from .._base.arguments import require_module
from .._engine.selective import KeptResults, is_expensive
from ..block_layer import Block
from ..optim._rules import RULES, Member, Rules, homes_in, table_of
from ..pipe_layer import PipelineTransformerBlockList
from .live import gradient_peak
from .mixtures import balanced_experts
from .model import BlockDescription, FlatBuffer, ModelDescription, OutsideParameter, muon_flops

__all__ = ["describe_module"]


def describe_module(
    module: torch.nn.Module,
    *inputs: Any,
    blocks: Sequence[torch.nn.Module] | None = None,
    head_bytes: float | None = None,
) -> ModelDescription:
    """Describes a model by running its forward without memory or arithmetic.

    Args:
        module: on any device, the meta device included; its parameters stay as they are.
        inputs: of one forward; the first dimension of the first tensor counts the samples, the second one the tokens
            (a matrix of floating-point numbers has none: one feature vector a sample). Only shapes and dtypes matter.
        blocks: the modules that are, or will be, a :class:`bmtrain.Block` each, in the order of their calls; default:
            all Blocks in ``module``, else the members of its longest ``ModuleList``.
        head_bytes: memory per sample of logits and loss; default: what operators after the last Block keep with two
            gradients of its largest tensor or, for a loss outside of ``module``, three times the result.

    Raises:
        ValueError: no blocks are known, no input is a tensor, or the forward exchanges values with other ranks, as
            tensor-parallel layers and pipelines do.

    Example:
        >>> import torch
        >>> from bmtrain.plan import describe_module
        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        >>> described = describe_module(model, torch.empty(4, 3, 8), blocks=list(model))
        >>> described.num_parameters, described.blocks[0].flops
        (144, 384.0)
    """
    require_module("module", module)
    for member in module.modules():
        stages = member.stages if isinstance(member, PipelineTransformerBlockList) else 1
        divided: Any = (p for p in member._parameters.values() if getattr(p, "_slices", None) == "tp")
        if max(stages, *(p._slice_group.size for p in divided), 1) > 1:
            raise ValueError(
                f"module: expected layers whose forward is one rank's, got {type(member).__name__}: describe the plain "
                "model, and divide it by TrainingPolicy(tp_size=, pipe_size=)"
            )
    members = list(_blocks_of(module) if blocks is None else blocks)
    if not members:
        raise ValueError(
            "blocks: expected the modules that are to be Blocks; there is no Block and no ModuleList in the model"
        )
    first = next((leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)), None)
    if first is None or first.dim() == 0:
        raise ValueError("inputs: expected a tensor whose first dimension counts samples, got none")
    # Imported here, as it takes longer than all of bmtrain.
    from torch._subclasses.fake_tensor import FakeTensorMode

    watch = _Watch(members)
    with FakeTensorMode(), _fake_parameters(module), _unsharded(module):
        with watch.running(), balanced_experts(module, watch.note_mixture) as mixtures:
            result = module(*tree_map(_fake, inputs))
        with balanced_experts(module, watch.note_mixture):
            watch.run_backwards()
    of_experts = {id(param) for member in mixtures for param in member.parameters()}
    groups = _muon_groups(module, members)
    of_muon = {id(param) for group in groups if group["rule"] == "muon" for param in group["params"]}
    samples = first.shape[0]
    owned = {id(param) for block in members for param in block.parameters()}
    result_bytes = sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return ModelDescription(
        name=type(module).__name__,
        blocks=tuple(_described(b, watch.records[id(b)], samples, of_experts, of_muon) for b in members),
        outside=tuple(_outside(module, owned)),
        seq_len=first.shape[1] if first.dim() > (2 if first.is_floating_point() else 1) else 1,
        head_flops=watch.outside_flops() / samples,
        head_bytes=max(3 * result_bytes, watch.head_bytes()) / samples if head_bytes is None else head_bytes,
        rules=table_of(groups),
    )


def _muon_groups(module: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> list[dict[str, Any]]:
    """Returns the groups of `MuonOptimizer` over the trained parameters, where no rule or split is given."""
    inner = [block._module if isinstance(block, Block) else block for block in blocks]
    homes = {key: home for block in inner for key, (_, home) in homes_in(block).items()}
    rules, groups = Rules(None, None), dict[str, dict[str, Any]]()
    for name, p in module.named_parameters():
        if p.requires_grad:
            member = Member(p, p, name, True, homes.get(id(p)), id(p) in homes)
            rule = rules.choose(member, {}).rule
            group = groups.setdefault(rule, {"rule": rule, "params": [], "param_names": []})
            group["params"].append(p)
            group["param_names"].append(name)
    return [groups[rule] for rule in RULES if rule in groups]


def _blocks_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    found: list[torch.nn.Module] = [member for member in module.modules() if type(member) is Block]
    if found:
        return found
    lists = [list(member) for member in module.modules() if isinstance(member, torch.nn.ModuleList)]
    return max(lists, key=len, default=[])


def _fake(value: Any) -> Any:
    is_tensor = isinstance(value, torch.Tensor)
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu") if is_tensor else value


def _shape(param: torch.Tensor) -> torch.Size:
    return torch.Size(getattr(param, "_original_shape", param.shape))


def _whole(param: Any) -> torch.Size:
    """The shape of all ranks' experts, or of another parameter."""
    return param._tp_original_shape if getattr(param, "_ep_mode", False) else _shape(param)


def _described(
    block: torch.nn.Module, record: _Record, samples: int, of_experts: set[int], of_muon: set[int]
) -> BlockDescription:
    kinds: dict[tuple[torch.dtype, bool, bool], list[torch.nn.Parameter]] = {}
    for param in block.parameters():
        is_apart = getattr(param, "_ep_mode", False)
        kinds.setdefault((param.dtype, param.requires_grad, is_apart), []).append(param)
    return BlockDescription(
        buffers=tuple(
            FlatBuffer(
                tuple(_whole(param).numel() for param in params),
                dtype.itemsize,
                trains,
                tuple(_whole(param).numel() for param in params if id(param) in of_experts),
            )
            for (dtype, trains, _), params in kinds.items()
        ),
        flops=record.flops / samples,
        last_matmul_flops=(record.flops - record.flops_at_last_save) / samples,
        input_bytes=record.input_bytes / samples,
        attention_bytes=(record.attention_bytes[0] / samples, record.attention_bytes[1] / samples),
        activation_bytes=max(record.saved_bytes, record.input_bytes) / samples,
        gradient_bytes=record.gradient_bytes / samples,
        mixtures=tuple((number, nbytes / samples) for number, nbytes in record.mixtures),
        kept_bytes=record.kept_bytes / samples,
        flops_between_kept=(record.flops_at_last_save - record.expensive_flops_at_last_save) / samples,
        muon_flops=sum(muon_flops(*_shape(param)) for param in block.parameters() if id(param) in of_muon),
        has_products_only=all(
            len(_shape(param)) <= 1 or (len(_shape(param)) == 2 and "Embedding" not in type(member).__name__)
            for member in block.modules()
            for param in member._parameters.values()
            if param is not None and param.requires_grad
        ),
    )


def _outside(module: torch.nn.Module, owned: set[int]) -> Iterator[OutsideParameter]:
    """Parameters in no block. Each is taken to be read once; embeddings before the first block, others after it."""
    reads: dict[int, list[Any]] = {}
    for member in module.modules():
        for param in member._parameters.values():
            if param is not None and id(param) not in owned:
                counts = reads.setdefault(id(param), [param, 0, 0])
                counts[1 if "Embedding" in type(member).__name__ else 2] += 1
    for param, before, after in reads.values():
        yield OutsideParameter(
            _shape(param).numel(), param.dtype.itemsize, before, after, param.requires_grad
        )


@contextmanager
def _fake_parameters(module: torch.nn.Module) -> Iterator[None]:
    """Full-size parameters and buffers without memory (the caller's mode), in the places of the module's own."""
    made: dict[int, torch.Tensor] = {}
    places: list[tuple[Any, str, torch.Tensor]] = []
    for member in module.modules():
        for own in (member._parameters, member._buffers):
            places += [(own, name, value) for name, value in own.items() if value is not None]
    for tensors, name, value in places:
        if id(value) not in made:
            fake = torch.empty(_shape(value), dtype=value.dtype, device="cpu")
            is_parameter = isinstance(value, torch.nn.Parameter)
            made[id(value)] = torch.nn.Parameter(fake, value.requires_grad) if is_parameter else fake
        tensors[name] = made[id(value)]
    try:
        yield
    finally:
        for tensors, name, value in places:
            tensors[name] = value


@contextmanager
def _unsharded(module: torch.nn.Module) -> Iterator[None]:
    """Makes Blocks run their inner modules directly: their parameters are full already."""
    runtimes = [member._runtime for member in module.modules() if type(member) is Block]
    for runtime in runtimes:
        runtime.is_bound = True
    try:
        yield
    finally:
        for runtime in runtimes:
            runtime.is_bound = False


@dataclass
class _Record:
    """Work and saved tensors of one block's forward, all samples together."""

    call: tuple[Any, Any] | None = None  # arguments, without their graph: its hooks refer to this object
    input_bytes: int = 0
    gradient_bytes: int = 0
    attention_bytes: tuple[int, int] = 0, 0
    mixtures: list[tuple[int, int]] = field(default_factory=list)  # experts, and bytes of their rows
    flops: float = 0.0
    flops_at_last_save: float = 0.0
    expensive_flops: float = 0.0  # of what selective recomputation keeps
    expensive_flops_at_last_save: float = 0.0
    kept: KeptResults = field(default_factory=lambda: KeptResults(lambda tensor: False))
    kept_bytes: int = 0
    # By address, as long as they are kept. Tensors would keep the graph, and by it this object, alive.
    saved: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    @property
    def largest_saved(self) -> int:
        return max((storage.nbytes() for storage in self.saved.values()), default=0)

    @property
    def saved_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.saved.values())


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of all tensors; shared memory is counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _attention_flops(
    query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    """Scores and mixing: two products of (heads, queries, size) and (heads, keys, size), two operations each."""
    batch, heads, queries, size = query
    return int(2 * batch * heads * queries * key[2] * (size + value[3]))


class _Attention(TorchFunctionMode):
    """Counts queries, keys and values as a model gives them: operators get keys and values repeated for all heads."""

    def __init__(self, note: Callable[[int, int], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            self._note(sum(x.nbytes for x in [*args, *kwargs.values()][:3]), result.nbytes)
        return result


class _ExpensiveResults(TorchDispatchMode):
    """Keeps the results that selective recomputation would keep, and counts their work."""

    def __init__(self, counter: Any) -> None:
        super().__init__()
        self._counter = counter
        self.record = _Record()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_expensive(func, args, kwargs):
            return func(*args, **kwargs)
        begin = self._counter.get_total_flops()
        result = func(*args, **kwargs)
        self.record.expensive_flops += self._counter.get_total_flops() - begin
        self.record.kept.keep(func, args, result)
        return result


class _Watch:
    """Counts work and saved tensors of each block while the model's forward runs."""

    def __init__(self, blocks: Sequence[torch.nn.Module]) -> None:
        self.blocks = blocks
        self.records = {id(block): _Record() for block in blocks}
        from torch.utils.flop_counter import FlopCounterMode

        # Fused attention of the CPU is not counted by torch.
        fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
        self._counter = FlopCounterMode(display=False, custom_mapping=fused)
        self._running: _Record | None = None
        self._after = _Record()  # the last block so far
        self._begin = 0.0
        self._expensive = _ExpensiveResults(self._counter)

    def note_mixture(self, number: int, nbytes: int) -> None:
        """Notes a call of ``number`` experts that get rows of ``nbytes``."""
        if self._running is not None:
            self._running.mixtures.append((number, nbytes))

    def note_attention(self, given: int, made: int) -> None:
        """Notes a call of attention: bytes of its queries, keys and values, and of its results."""
        if self._running is not None:
            before = self._running.attention_bytes
            self._running.attention_bytes = before[0] + given, before[1] + made

    def run_backwards(self) -> None:
        """Runs a forward and a backward of a block of each kind."""
        peaks: dict[Any, int] = {}
        for block in self.blocks:
            record = self.records[id(block)]
            call, record.call = record.call, None
            if call is None:
                continue
            tensors = [x for x in tree_leaves((call, list(block.parameters()))) if hasattr(x, "shape")]
            kind = type(getattr(block, "_module", block)), *((x.shape, x.dtype) for x in tensors)
            if kind not in peaks:
                peaks[kind] = gradient_peak(block, *call)
            record.gradient_bytes = peaks[kind]

    def outside_flops(self) -> float:
        """Work outside blocks."""
        inside = sum(record.flops for record in self.records.values())
        return max(self._counter.get_total_flops() - inside, 0.0)

    def head_bytes(self) -> int:
        """Memory of what follows the last block, at the begin of its backward."""
        return self._after.saved_bytes + 2 * self._after.largest_saved

    @contextmanager
    def running(self) -> Iterator[None]:
        """Records while the forward runs."""
        with ExitStack() as stack:
            for block in self.blocks:
                enter = block.register_forward_pre_hook(self._enter, with_kwargs=True)
                leave = block.register_forward_hook(self._leave)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, _not_needed))
            stack.enter_context(self._counter)
            stack.enter_context(_Attention(self.note_attention))
            yield

    def _enter(self, block: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._running = record = self.records[id(block)]
        self._begin = self._counter.get_total_flops()
        self._expensive.record = record
        self._expensive.__enter__()
        record.call = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        record.input_bytes = sum(
            leaf.nbytes
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        )

    def _leave(self, block: torch.nn.Module, args: Any, result: Any) -> None:
        self._expensive.__exit__(None, None, None)
        record = self.records[id(block)]
        record.kept.drop_unneeded()
        record.kept_bytes += storage_bytes(record.kept.tensors())
        record.kept.drop()
        record.flops += self._counter.get_total_flops() - self._begin
        self._running, self._after = None, _Record()

    def _save(self, tensor: torch.Tensor) -> None:
        """Keeps nothing: no backward follows, and an output that its own node refers to is never freed."""
        record = self._running or self._after
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, torch.nn.Parameter):
            return
        storage = tensor.untyped_storage()
        record.saved[storage._cdata] = storage
        if record is self._running:
            record.flops_at_last_save = record.flops + self._counter.get_total_flops() - self._begin
            record.expensive_flops_at_last_save = record.expensive_flops
            record.kept.note_need()


def _not_needed(saved: object) -> Any:
    raise RuntimeError("a described forward has no backward")
