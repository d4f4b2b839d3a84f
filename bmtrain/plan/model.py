"""Descriptions of models for the planner: sizes, work and kept activations, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from .._base.arguments import require_integer
from .._C import FlatLayout
from .._engine.outside import SMALL_BYTES

__all__ = [
    "MOMENT_BYTES",
    "BlockDescription",
    "FlatBuffer",
    "ModelDescription",
    "OutsideParameter",
    "OutsideReads",
    "gpt2",
    "muon_flops",
    "transformer",
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
        blocks = tuple(_computed_in(block, element_size) for block in self.blocks)
        return replace(self, blocks=blocks)

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


def _computed_in(block: BlockDescription, element_size: int) -> BlockDescription:
    widest = max((buffer.element_size for buffer in block.buffers), default=element_size)
    return _with_activations(block, element_size / widest if widest == 4 else 1.0)


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


def transformer(
    *,
    name: str,
    num_layers: int,
    dim_model: int,
    num_heads: int,
    num_kv_heads: int,
    dim_head: int,
    dim_ff: int,
    gated: bool,
    vocab_size: int,
    seq_len: int,
    num_positions: int,
    bias: bool,
    tied: bool,
    element_size: int,
    scores: bool,
) -> ModelDescription:
    """A decoder by numbers, counted as in :func:`gpt2`.

    Args:
        num_kv_heads: heads of keys and values.
        gated: the feed-forward layer multiplies two inner maps (SwiGLU).
        num_positions: learnt positions; 0: none.
        element_size: bytes of an element of parameters and activations.
        scores: attention keeps its scores for backward.
    """
    sizes = {"num_layers": num_layers, "dim_model": dim_model, "num_heads": num_heads, "dim_ff": dim_ff}
    sizes |= {
        "num_kv_heads": num_kv_heads,
        "dim_head": dim_head,
        "vocab_size": vocab_size,
        "seq_len": seq_len,
    }
    for argument, value in sizes.items():
        require_integer(argument, value, 1)
    require_integer("num_positions", num_positions, 0)
    inner, narrow = num_heads * dim_head, num_kv_heads * dim_head
    qkv, widths = inner + 2 * narrow, [dim_ff] * (2 if gated else 1)
    rows = [qkv, inner, *widths, dim_ff]
    matrices = [row * dim_model for row in rows]
    vectors = [dim_model, dim_model]
    if bias:
        vectors += [dim_model, dim_model, qkv, dim_model, *widths, dim_model]
    # Per token: two norms' inputs and outputs, queries, keys and values, the mixed values twice (as attention and as
    # the output map keep them), and what the activation function and the products around it keep.
    wide = (4 if gated else 2) * dim_ff
    kept = seq_len * element_size * (4 * dim_model + qkv + 2 * inner + wide)
    if scores:
        kept += seq_len * seq_len * num_heads * 5 * element_size // 2
    block = BlockDescription(
        buffers=(FlatBuffer((*matrices, *vectors), element_size),),
        flops=2.0 * seq_len * sum(matrices) + 4.0 * seq_len * seq_len * inner,
        last_matmul_flops=2.0 * seq_len * dim_ff * dim_model,
        input_bytes=float(seq_len * dim_model * element_size),
        activation_bytes=float(kept),
        attention_bytes=(float(seq_len * qkv * element_size), float(seq_len * inner * element_size)),
        # A gate has two inner maps, and softmax two gradients of scores; else a saved tensor is freed for each.
        gradient_bytes=float(seq_len * element_size)
        * max(dim_ff * (2 if gated else 1), 2 * seq_len * num_heads if scores else 0),
        # Queries, keys and values, attention (with the fp32 sums of fused attention), its projection, the first maps of
        # the feed-forward layer. Scores are larger than what they are computed from.
        kept_bytes=float(seq_len * element_size * (qkv + inner + dim_model + sum(widths)))
        + (0 if scores else 4 * seq_len * num_heads),
        flops_between_kept=2.0 * seq_len * seq_len * inner if scores else 0.0,
        # Queries, keys and values are a matrix each.
        muon_flops=sum(muon_flops(row, dim_model) for row in (inner, narrow, narrow, *rows[1:])),
        has_products_only=True,
    )
    outside = [OutsideParameter(vocab_size * dim_model, element_size, reads_before=1, reads_after=int(tied))]
    if num_positions:
        outside.append(OutsideParameter(num_positions * dim_model, element_size, reads_before=1))
    outside += [OutsideParameter(dim_model, element_size, reads_after=1)] * (2 if bias else 1)
    if not tied:
        outside.append(OutsideParameter(vocab_size * dim_model, element_size, reads_after=1))
    return ModelDescription(
        name=name,
        blocks=(block,) * num_layers,
        outside=tuple(outside),
        seq_len=seq_len,
        head_flops=2.0 * seq_len * vocab_size * dim_model,
        # Logits, the tensors that the loss keeps, and their gradient.
        head_bytes=3.0 * seq_len * vocab_size * element_size,
    )


def gpt2(
    num_layers: int,
    dim_model: int,
    num_heads: int,
    *,
    dim_head: int | None = None,
    dim_ff: int | None = None,
    vocab_size: int = 50257,
    seq_len: int = 1024,
    max_distance: int | None = None,
    bias: bool = True,
    tied: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    attention: str = "fused",
    name: str = "",
) -> ModelDescription:
    """The example's GPT-2 by numbers.

    Work: two operations per weight and token, and 4 seq_len per token and head element for attention. Activations:
    counted from what the example's layer saves; with ``"whole"`` attention the scores as well, 5 bytes each in
    16 bits (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4).

    Args:
        num_layers: transformer layers, each a block.
        dim_model: width.
        num_heads: attention heads.
        dim_head: size of a head; default ``dim_model / num_heads``.
        dim_ff: width of the feed-forward layer; default ``4 dim_model``.
        vocab_size: token ids.
        seq_len: tokens of a sample.
        max_distance: positions; default ``seq_len``.
        bias: whether linear maps and norms have biases.
        tied: the token embedding is the output head too.
        dtype: of parameters and activations.
        attention: ``"fused"`` keeps no scores, ``"whole"`` keeps them.

    Raises:
        ValueError: a size below 1 or another kind of attention.

    Example:
        >>> from bmtrain.plan import gpt2
        >>> round(gpt2(12, 768, 12).num_parameters / 1e6)
        124
    """
    require_integer("dim_model", dim_model, 1)
    require_integer("num_heads", num_heads, 1)
    require_integer("seq_len", seq_len, 1)
    if dim_head is None and dim_model % num_heads:
        raise ValueError(
            f"num_heads: expected a divisor of dim_model = {dim_model}, got {num_heads}; or give dim_head (--dim-head)"
        )
    if attention not in ("fused", "whole"):
        raise ValueError(f"attention: expected 'fused' or 'whole', got {attention!r}")
    return transformer(
        name=name or f"GPT-2 of {num_layers} layers, width {dim_model}",
        num_layers=num_layers,
        dim_model=dim_model,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        dim_head=dim_head or max(dim_model // num_heads, 1),
        dim_ff=dim_ff or 4 * dim_model,
        gated=False,
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_positions=max_distance or seq_len,
        bias=bias,
        tied=tied,
        element_size=dtype.itemsize,
        scores=attention == "whole",
    )
