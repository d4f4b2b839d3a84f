"""Names and shapes of the tensors of a GPT-2 or LLaMA: in the example, and in Hugging Face's models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..errors import UnreadableFileError

__all__ = ["LAYOUTS", "Layout", "Slot", "recognise"]


class Slot(NamedTuple):
    """A tensor of a layout.

    Attributes:
        parts: its constituents, by names that the layouts of a family have in common. Several lie below one another.
        is_transposed: whether it is stored as ``(in, out)``, as the ``Conv1D`` of Hugging Face's GPT-2 has it.
        is_required: whether every model has it.
        is_square: whether the layout has a place for square matrices only.
    """

    parts: tuple[str, ...]
    is_transposed: bool = False
    is_required: bool = True
    is_square: bool = False


class Layout(NamedTuple):
    """Names and shapes of a kind of model.

    Attributes:
        family: layouts of one family can be converted into one another.
        slots: the tensors in the order of the model, by name; ``{}`` stands for the number of a layer.
        prefix: what names begin with in a whole model, and may lack in the file of a bare one.
        computed: buffers in older files that a model computes itself.
        has_tied_head: whether an output head that is the embedding has a name of its own.
    """

    family: str
    slots: Mapping[str, Slot]
    prefix: str = ""
    computed: tuple[str, ...] = ()
    has_tied_head: bool = True


_GPT2_LAYER = (  # here, Hugging Face
    ("attention_norm", "ln_1"),
    ("attention.project_qkv", "attn.c_attn"),  # queries, keys and values below one another in both
    ("attention.project_out", "attn.c_proj"),
    ("feedforward_norm", "ln_2"),
    ("feedforward.w_in", "mlp.c_fc"),
    ("feedforward.w_out", "mlp.c_proj"),
)


def _gpt2() -> Layout:
    names = ["token_embedding.weight", "position_embedding.weight"]
    names += [f"layers.{{}}.{here}.{kind}" for here, _ in _GPT2_LAYER for kind in ("weight", "bias")]
    names += ["output_norm.weight", "output_norm.bias"]
    slots = {name: Slot((name,)) for name in names}
    slots["head.weight"] = Slot(("head.weight",), is_required=False)
    return Layout("GPT-2", slots, has_tied_head=False)


def _hf_gpt2() -> Layout:
    slots = {
        "transformer.wte.weight": Slot(("token_embedding.weight",)),
        "transformer.wpe.weight": Slot(("position_embedding.weight",)),
    }
    for here, there in _GPT2_LAYER:
        is_linear = "norm" not in here
        slots[f"transformer.h.{{}}.{there}.weight"] = Slot(
            (f"layers.{{}}.{here}.weight",), is_linear, is_square=there == "attn.c_proj"
        )
        slots[f"transformer.h.{{}}.{there}.bias"] = Slot((f"layers.{{}}.{here}.bias",))
    slots["transformer.ln_f.weight"] = Slot(("output_norm.weight",))
    slots["transformer.ln_f.bias"] = Slot(("output_norm.bias",))
    slots["lm_head.weight"] = Slot(("head.weight",), is_required=False)
    masks = ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias")
    return Layout("GPT-2", slots, "transformer.", masks)


def _hf_llama(is_fused: bool) -> Layout:
    """With ``is_fused`` as Phi-3 has it, a LLaMA whose projections of one input are one matrix, without biases."""
    slots = {"model.embed_tokens.weight": Slot(("model.embed_tokens.weight",))}

    def add(name: str, *parts: str, kinds: tuple[str, ...] = ("weight",)) -> None:
        for kind in kinds:
            parts_of_kind = tuple(f"model.layers.{{}}.{part}.{kind}" for part in parts or (name,))
            slots[f"model.layers.{{}}.{name}.{kind}"] = Slot(parts_of_kind, is_required=kind == "weight")

    queries, gates = [f"self_attn.{x}_proj" for x in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
    add("input_layernorm")
    if is_fused:
        add("self_attn.qkv_proj", *queries)
        add("self_attn.o_proj")
    else:
        for name in [*queries, "self_attn.o_proj"]:
            add(name, kinds=("weight", "bias"))
    add("post_attention_layernorm")
    if is_fused:
        add("mlp.gate_up_proj", *gates)
        add("mlp.down_proj")
    else:
        for name in [*gates, "mlp.down_proj"]:
            add(name, kinds=("weight", "bias"))
    slots["model.norm.weight"] = Slot(("model.norm.weight",))
    slots["lm_head.weight"] = Slot(("lm_head.weight",), is_required=False)
    return Layout("LLaMA", slots, "model.", ("model.layers.{}.self_attn.rotary_emb.inv_freq",))


#: By the names that ``bmtrain convert --layout`` takes.
LAYOUTS: Mapping[str, Layout] = {
    "gpt2": _gpt2(),
    "hf-gpt2": _hf_gpt2(),
    "hf-llama": _hf_llama(False),
    "hf-llama-fused": _hf_llama(True),
}


def recognise(names: Iterable[str]) -> tuple[Layout, dict[str, str]]:
    """The layout of a model with these tensors.

    Returns:
        The layout, and the given names by the layout's own (with prefix and layer numbers). Tensors that a model
        computes itself are omitted.

    Raises:
        UnreadableFileError: no layout has these tensors, or some are missing.
    """
    names = list(names)
    found = {name: _fit(layout, names) for name, layout in LAYOUTS.items()}
    chosen = min(found, key=lambda name: len(found[name][1]))
    known, unknown = found[chosen]
    if unknown:
        raise UnreadableFileError(
            f"the tensors' names fit no known layout ({', '.join(LAYOUTS)}): the nearest, {chosen}, has no {unknown[0]}"
            + (f", nor {len(unknown) - 1} more" if unknown[1:] else "")
        )
    return LAYOUTS[chosen], known


def _fit(layout: Layout, names: list[str]) -> tuple[dict[str, str], list[str]]:
    """The names that are part of the layout, by the layout's own names, and the names that are not."""
    known: dict[str, str] = {}
    unknown: list[str] = []
    for name in names:
        for own in (name, layout.prefix + name):
            pattern = re.sub(r"\.\d+\.", ".{}.", own, count=1)
            if pattern in layout.slots:
                known[own] = name
                break
            if pattern in layout.computed:
                break
        else:
            unknown.append(name)
    return known, unknown
