"""Descriptions of decoders by numbers: of the example's GPT-2, and of a Hugging Face configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._base.arguments import require_dtype, require_integer
from .describe import describe_module
from .model import BlockDescription, FlatBuffer, ModelDescription, OutsideParameter, muon_flops

__all__ = ["describe_config", "gpt2"]

#: Beginnings of the names of families whose feed-forward layer has a gate; a configuration does not say so itself.
_GATED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "phi3", "olmo", "minicpm")


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
            f"num_heads: expected a divisor of dim_model = {dim_model}, got {num_heads}; or give dim_head"
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


def describe_config(
    config: Any, *, seq_len: int | None = None, dtype: torch.dtype = torch.bfloat16
) -> ModelDescription:
    """Describes a decoder by its Hugging Face configuration: a dense one by its sizes alone.

    A mixture of experts is built on the meta device by ``transformers``, and described as :func:`describe_module` does.

    Args:
        config: a ``PretrainedConfig``, or the content of a ``config.json``.
        seq_len: tokens of a sample; default: as many as the model has positions.
        dtype: of parameters and activations.

    Raises:
        ValueError: a size is missing, the model is not a decoder, or it is a mixture of a type that ``transformers``
            does not know.
        ImportError: it is a mixture, and ``transformers`` is not installed.

    Example:
        >>> from bmtrain.plan import describe_config
        >>> sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        ...          "intermediate_size": 11008, "vocab_size": 32000}
        >>> llama = describe_config({"model_type": "llama", **sizes}, seq_len=2048)
        >>> round(llama.num_parameters / 1e9, 1)
        6.7
    """
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise TypeError(
            f"config: expected a configuration or a dict, got {config!r:.80} ({type(config).__name__})"
        )
    if seq_len is not None:
        require_integer("seq_len", seq_len, 1)
    require_dtype("dtype", dtype)
    values: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    kind = str(values.get("model_type", "decoder"))
    if values.get("is_encoder_decoder"):
        raise ValueError(f"config: expected a decoder, got an encoder and a decoder ({kind})")
    is_mixture = any(values.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    dim = _number(values, "hidden_size", "n_embd", "d_model")
    heads = _number(values, "num_attention_heads", "n_head")
    positions = values.get("max_position_embeddings") or values.get("n_positions") or values.get("n_ctx")
    length = seq_len or positions
    if not length:
        raise ValueError("seq_len: expected a length, as the configuration gives no number of positions")
    if is_mixture:
        return _describe_built(values, int(length), dtype)
    gated = kind.startswith(_GATED)
    return transformer(
        name=kind,
        num_layers=_number(values, "num_hidden_layers", "n_layer", "num_layers"),
        dim_model=dim,
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        dim_head=values.get("head_dim") or dim // heads,
        dim_ff=values.get("intermediate_size") or values.get("n_inner") or 4 * dim,
        gated=gated,
        vocab_size=_number(values, "vocab_size"),
        seq_len=int(length),
        num_positions=0 if gated else int(positions or length),
        bias=not gated,
        tied=bool(values.get("tie_word_embeddings", not gated)),
        element_size=dtype.itemsize,
        scores=False,
    )


def _describe_built(values: Mapping[str, Any], seq_len: int, dtype: torch.dtype) -> ModelDescription:
    """Describes a model that transformers builds on the meta device, with weights of ``dtype``."""
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # here: few models need them
    except ImportError:
        raise ImportError(
            "config: a mixture of experts is built by transformers: pip install transformers, or describe it by a "
            "module"
        ) from None
    kind = str(values.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"config: expected a type that transformers knows, or --module, got {kind!r}")
    # No code of the configuration's own, and no quantised weights.
    sizes = {name: values[name] for name in values if name not in ("auto_map", "quantization_config")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes), dtype=dtype)
        return describe_module(model, torch.empty(1, seq_len, dtype=torch.int64))


def _number(values: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if values.get(name):
            return int(values[name])
    raise ValueError(f"config: expected {' or '.join(names)}, got neither")
