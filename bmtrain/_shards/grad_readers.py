"""Refusal of torch functions that treat a shard's gradient as the full gradient.

[Note: Readers of a shard's gradient]
`DistributedParameter.grad` is this rank's shard. Most code that reads it is elementwise and correct; a few functions of
torch reduce over all elements, and would silently use this rank's elements only, with a different result on each rank.
They read only `grad`, where torch has no hook, so the attribute checks its caller: one lookup of the calling function's
file name in the set below.

torch.compile makes a fake tensor of each tensor of a graph together with its `grad`, which must have the same shape.
While a Block runs, its parameters have their full shape, and gradients of earlier passes have the shape of the shard:
they are not part of the graph, and hidden.
"""

from __future__ import annotations

from types import FrameType

import torch
from torch._subclasses import meta_utils
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad
from torch.optim import _adafactor, lbfgs

from ..global_var import world_size

_ELEMENTWISE = "use bmtrain.optim.AdamOptimizer, or an elementwise optimizer of torch.optim"

#: File and function of torch -> its name for users, and the remedy.
_REFUSED = {
    (clip_grad.__file__, "clip_grad_norm_"): (
        "torch.nn.utils.clip_grad_norm_",
        "use OptimManager.clip_grad_norm, which computes the norm over all ranks' gradients",
    ),
    (grad_scaler.__file__, "_unscale_grads_"): (
        "torch.amp.GradScaler",
        "use bmtrain.optim.OptimManager(loss_scale=...), whose ranks agree on which steps to skip",
    ),
    (_adafactor.__file__, "_init_group"): (
        "torch.optim.Adafactor",
        "use bmtrain.optim.whole_matrix(torch.optim.Adafactor, params, ...)",
    ),
    (lbfgs.__file__, "_gather_flat_grad"): ("torch.optim.LBFGS", _ELEMENTWISE),
}
#: The same by module, of libraries that may not be imported.
_REFUSED_IN_MODULES = {
    ("peft.tuners.adalora.layer", "update_ipt"): (
        "AdaLoRA of peft, which ranks rows and columns of adapters,",
        "use peft.LoraConfig, whose adapters have a fixed rank",
    )
}
_STAND_INS = meta_utils.__file__
#: Files with such functions. Checked first, because gradients are read often.
CHECKED_FILES = frozenset({_STAND_INS, *(file for file, _ in _REFUSED)})
CHECKED_FUNCTIONS = frozenset(function for _, function in _REFUSED_IN_MODULES)
#: Refused functions that are correct on a single rank, which has all elements.
_RIGHT_ALONE = ("torch.nn.utils.clip_grad_norm_", "torch.amp.GradScaler", "torch.optim.LBFGS")


def is_shown(param: torch.Tensor, gradient: torch.Tensor | None, reader: FrameType) -> bool:
    """Whether the function in frame ``reader`` may see the ``gradient`` of ``param``.

    Raises RuntimeError if it would treat a shard as the full gradient.
    """
    if reader.f_code.co_filename == _STAND_INS:
        return gradient is None or gradient.shape == param.shape
    _refuse_whole_tensor_tools(param, reader)
    return True


def _refuse_whole_tensor_tools(param: torch.Tensor, reader: FrameType) -> None:
    frame: FrameType | None = reader
    while frame is not None and frame.f_code.co_name.startswith("<"):  # a comprehension before Python 3.12
        frame = frame.f_back
    code = reader.f_code if frame is None else frame.f_code
    module = str(reader.f_globals.get("__name__"))
    refused = _REFUSED.get((code.co_filename, code.co_name)) or _REFUSED_IN_MODULES.get(
        (module, code.co_name)
    )
    if refused is None:
        return
    name, remedy = refused
    if world_size() == 1 and name in _RIGHT_ALONE:
        return
    shape = tuple(getattr(param, "_original_shape", param.shape))
    raise RuntimeError(
        f"{name} was given a DistributedParameter of shape {shape}, but would see {param.numel()} of its elements, "
        f"flat, on this rank: {remedy}"
    )
