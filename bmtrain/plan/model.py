"""Descriptions of models for the planner: sizes, work and kept activations, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .._C import FlatLayout
from .._engine.outside import SMALL_BYTES

__all__ = [
    "MOMENT_BYTES",
    "BlockDescription",
    "FlatBuffer",
    "ModelDescription",
    "OutsideParameter",
    "OutsideReads",
    "muon_flops",
]

#: Bytes of a moment of an element, by its dtype; int8 in blocks of 32 with an exponent.
MOMENT_BYTES = {torch.float32: 4.0, torch.bfloat16: 2.0, torch.int8: 1 + 1 / 32}


def adam_bytes(element_size: int, state_dtype: torch.dtype, *, in_block: bool, num_moments: int = 2) -> float:
    """Returns the bytes of master and moments that Adam keeps for an element of a parameter; Muon has one moment."""
    if state_dtype is torch.int8 and not in_block:
        state_dtype = torch.bfloat16
    return (4 if element_size == 2 else 0) + num_moments * MOMENT_BYTES[state_dtype]


def muon_flops(rows: int, columns: int, ns_steps: int = 5) -> float:
    """Returns the operations in which Muon orthogonalises a matrix: three products in each iteration."""
    short, long = sorted((rows, columns))
    return 2.0 * ns_steps * short * short * (2 * long + short)


@dataclass(frozen=True)
class FlatBuffer:
    """The parameters of a block that share dtype and trainability.

    Args:
        numels: elements of each, in any order.
        element_size: bytes of an element.
        trains: whether they get gradients.
        experts: the part of ``numels`` in experts, which ``ep_size`` ranks divide.
    """

    numels: tuple[int, ...]
    element_size: int
    trains: bool = True
    experts: tuple[int, ...] = ()

    @property
    def is_of_experts(self) -> bool:
        """Whether it has nothing else, and is shared by the ranks that hold the same experts."""
        return 0 < len(self.experts) == len(self.numels)

    def partition(self, num_ranks: int) -> int:
        """Elements of one rank's shard, in the runtime's own layout."""
        return FlatLayout(list(self.numels), self.element_size, num_ranks).partition


@dataclass(frozen=True)
class BlockDescription:
    """One block, and its work and memory for one sample.

    Args:
        buffers: its parameters.
        flops: floating-point operations of a forward (a multiplication and an addition are two).
        last_matmul_flops: those behind the last tensor that autograd saves, which no second forward repeats.
        input_bytes: its input hidden states.
        activation_bytes: everything that autograd saves in a forward, the input included.
        gradient_bytes: gradients of activations in its backward, less the saved tensors that are freed until then.
        tp_exchange_bytes: sums over tensor-parallel ranks in a forward.
        attention_bytes: queries, keys and values of attention, and its results, which sequence ranks exchange.
        mixtures: of each mixture of experts, their number and the bytes of the rows that all of them get in a forward.
        kept_bytes: results of matrix products and attention that a second forward needs.
        flops_between_kept: work of a second forward that reuses these results.
        muon_flops: work of a step of Muon in the matrices.
        has_products_only: each parameter is a vector or factor of a product of matrices, whose gradients CPU ranks
            compute where they are reduced.
    """

    buffers: tuple[FlatBuffer, ...]
    flops: float
    last_matmul_flops: float
    input_bytes: float
    activation_bytes: float
    gradient_bytes: float = 0.0
    tp_exchange_bytes: float = 0.0
    attention_bytes: tuple[float, float] = (0.0, 0.0)
    mixtures: tuple[tuple[int, float], ...] = ()
    kept_bytes: float = 0.0
    flops_between_kept: float = 0.0
    muon_flops: float = 0.0
    has_products_only: bool = False

    @property
    def num_parameters(self) -> int:
        return sum(sum(buffer.numels) for buffer in self.buffers)

    @property
    def largest_parameter_gradient(self) -> int:
        """Bytes of the largest gradient: autograd computes one after the other and accumulates each at once."""
        trained = [buffer for buffer in self.buffers if buffer.trains]
        return max((max(buffer.numels) * buffer.element_size for buffer in trained), default=0)


@dataclass(frozen=True)
class OutsideParameter:
    """A parameter outside blocks.

    Args:
        numel: its elements.
        element_size: bytes of an element.
        reads_before: number of reads in the forward before the first block.
        reads_after: number of reads after the last block.
        trains: whether it gets a gradient.
    """

    numel: int
    element_size: int
    reads_before: int = 0
    reads_after: int = 0
    trains: bool = True

    def partition(self, num_ranks: int) -> int:
        """Elements of the longest shard."""
        return -(-self.numel // num_ranks)


class OutsideReads:
    """The messages in which parameters outside blocks travel, after ``_engine/reads.py``: each parameter once a
    forward, small ones of a kind together.

    Attributes:
        before_blocks: parameters gathered before the first block, and reduced after the backward of all.
        after_blocks: parameters gathered after the last block, and reduced before the backward of all.
    """

    def __init__(self, params: Sequence[OutsideParameter]) -> None:
        small: dict[int, list[OutsideParameter]] = {}
        alone: list[OutsideParameter] = []
        for param in params:
            if param.reads_before + param.reads_after and param.numel * param.element_size <= SMALL_BYTES:
                small.setdefault(param.element_size, []).append(param)
            elif param.reads_before + param.reads_after:
                alone.append(param)
        bundles = [together for together in small.values() if len(together) > 1]
        alone += [param for together in small.values() if len(together) == 1 for param in together]
        self.before_blocks = bundles + [[param] for param in alone if param.reads_before]
        self.after_blocks = [[param] for param in alone if not param.reads_before]


@dataclass(frozen=True)
class ModelDescription:
    """A model by numbers; all amounts of work and activations are per sample.

    Args:
        name: for reports.
        blocks: in the order of their calls.
        outside: parameters outside blocks.
        seq_len: tokens of a sample.
        head_flops: forward work behind the last block.
        head_bytes: logits, and the tensors that the loss keeps and computes from them.
        rules: table of the parameters that take Muon and AdamW, as `MuonOptimizer` shows it; empty without names.
    """

    name: str
    blocks: tuple[BlockDescription, ...]
    outside: tuple[OutsideParameter, ...] = ()
    seq_len: int = 1
    head_flops: float = 0.0
    head_bytes: float = 0.0
    rules: str = ""

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError(f"blocks: expected at least one block in model {self.name!r}, got none")

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, each counted once."""
        return sum(b.num_parameters for b in self.blocks) + sum(p.numel for p in self.outside)

    @property
    def flops(self) -> float:
        """Forward work of one sample."""
        return sum(block.flops for block in self.blocks) + self.head_flops

    def computed_in(self, element_size: int) -> ModelDescription:
        """The same model, with activations of blocks of fp32 parameters in elements of this size."""
        widest = [max((b.element_size for b in block.buffers), default=element_size) for block in self.blocks]
        shares = [element_size / width if width == 4 else 1.0 for width in widest]
        return replace(self, blocks=tuple(map(_with_activations, self.blocks, shares)))

    def sliced(self, tp_size: int, pipe_size: int, sp_size: int = 1, ep_size: int = 1) -> ModelDescription:
        """The share of a rank of ``tp_size`` in the one of ``pipe_size`` stages that has most parameters.

        Parameters and work are divided; activations as in Megatron-LM without sequence parallelism: inputs and what
        norms and residuals keep (10 of 34 parts, Korthikanti et al., 2022, section 4.1) stay whole. Ranks that divide
        sequences have ``1 / sp_size`` of the work and of all activations. Experts are divided over ``ep_size`` ranks
        and not over tensor-parallel ones; each rank computes as many rows as it has.

        Raises:
            ValueError: the matrices or the experts of the blocks cannot be divided so.
        """
        if tp_size == pipe_size == sp_size == ep_size == 1:
            return self
        numbers = {number for block in self.blocks for number, _ in block.mixtures}
        if ep_size > 1 and (not numbers or any(number % ep_size for number in numbers)):
            has = f"{' and '.join(map(str, sorted(numbers)))} experts" if numbers else "no experts in a block"
            raise ValueError(f"ep_size: expected a divisor of the number of experts, got {ep_size} for {has}")
        largest = max(
            (n for block in self.blocks for buffer in block.buffers for n in buffer.numels), default=0
        )
        if largest % tp_size:
            raise ValueError(
                f"tp_size: expected a divisor of {largest}, the elements of a block's largest matrix, got {tp_size}"
            )
        per_stage = -(-len(self.blocks) // pipe_size)
        stages = [self.blocks[at : at + per_stage] for at in range(0, len(self.blocks), per_stage)]
        stage = max(stages, key=lambda blocks: sum(block.num_parameters for block in blocks), default=())
        blocks = tuple(_sliced_block(block, tp_size, sp_size, ep_size) for block in stage)
        outside = tuple(
            OutsideParameter(-(-p.numel // tp_size), p.element_size, p.reads_before, p.reads_after, p.trains)
            for p in self.outside
        )
        return ModelDescription(
            self.name,
            blocks,
            outside,
            self.seq_len,
            self.head_flops / (tp_size * sp_size),
            self.head_bytes / (tp_size * sp_size),
        )


def _with_activations(block: BlockDescription, share: float) -> BlockDescription:
    """The block with a share of its activations."""
    return replace(
        block,
        input_bytes=share * block.input_bytes,
        activation_bytes=share * block.activation_bytes,
        gradient_bytes=share * block.gradient_bytes,
        tp_exchange_bytes=share * block.tp_exchange_bytes,
        attention_bytes=(share * block.attention_bytes[0], share * block.attention_bytes[1]),
        mixtures=tuple((number, share * nbytes) for number, nbytes in block.mixtures),
        kept_bytes=share * block.kept_bytes,
    )


def _sliced_buffers(buffer: FlatBuffer, tp_size: int, ep_size: int) -> Iterator[FlatBuffer]:
    """A rank's share: of experts that are divided, in a buffer of their own."""
    experts = buffer.experts if ep_size > 1 or buffer.is_of_experts else ()
    others = Counter(buffer.numels) - Counter(experts)
    if others:
        yield replace(buffer, numels=tuple(-(-n // tp_size) for n in others.elements()), experts=())
    if experts:
        own = tuple(-(-n // ep_size) for n in experts)
        yield replace(buffer, numels=own, experts=own)


def _sliced_block(block: BlockDescription, tp_size: int, sp_size: int, ep_size: int) -> BlockDescription:
    whole = min(5 * block.input_bytes, block.activation_bytes)
    sliced = BlockDescription(
        buffers=tuple(b for buffer in block.buffers for b in _sliced_buffers(buffer, tp_size, ep_size)),
        flops=block.flops / (tp_size * sp_size),
        last_matmul_flops=block.last_matmul_flops / (tp_size * sp_size),
        input_bytes=block.input_bytes,
        activation_bytes=whole + (block.activation_bytes - whole) / tp_size,
        gradient_bytes=block.gradient_bytes / tp_size,
        tp_exchange_bytes=2 * block.input_bytes,
        attention_bytes=(block.attention_bytes[0] / tp_size, block.attention_bytes[1] / tp_size),
        mixtures=tuple((number, nbytes / tp_size) for number, nbytes in block.mixtures),
        kept_bytes=block.kept_bytes / tp_size,
        flops_between_kept=block.flops_between_kept / (tp_size * sp_size),
        muon_flops=block.muon_flops / tp_size,
        has_products_only=block.has_products_only,
    )
    return _with_activations(sliced, 1 / sp_size)
