"""Parts of torch that take a parameter's gradient for the whole one, and what to use in their place.

[Note: Who may read a shard's gradient]
`DistributedParameter.grad` is this rank's shard. Most code that reads it computes element by element and is right; a
few functions of torch compute something over all elements, and would silently do so over this rank's alone, differently
on every rank. They see nothing of a parameter but its `grad`, and torch offers no hook there, so the attribute looks at
who reads it: one lookup of the calling function's file name, which is of the few below or is not.

torch.compile makes a stand-in of each tensor of a graph together with its `grad`, which must have the tensor's shape.
While a Block runs its parameters have their full shape, and the gradients of earlier passes that of the shard: they are
no part of the graph, and not shown.
"""

from __future__ import annotations

from types import FrameType

import torch
from torch._subclasses import meta_utils
from torch.amp import grad_scaler
from torch.nn.utils import clip_grad
from torch.optim import _adafactor, lbfgs

from ..global_var import world_size

__all__ = ["FILES_TO_ASK", "is_shown"]

_ELEMENTWISE = "use bmtrain.optim.AdamOptimizer, or an optimizer of torch.optim that works element by element"

#: File and function of torch -> its name for users, and the remedy.
_REFUSED = {
    (clip_grad.__file__, "clip_grad_norm_"): (
        "torch.nn.utils.clip_grad_norm_",
        "use OptimManager.clip_grad_norm, whose norm is that of all ranks' gradients",
    ),
    (grad_scaler.__file__, "_unscale_grads_"): (
        "torch.amp.GradScaler",
        "use bmtrain.optim.OptimManager(loss_scale=...), whose ranks agree on which steps to skip",
    ),
    (_adafactor.__file__, "_init_group"): ("torch.optim.Adafactor", _ELEMENTWISE),
    (lbfgs.__file__, "_gather_flat_grad"): ("torch.optim.LBFGS", _ELEMENTWISE),
}
_STAND_INS = meta_utils.__file__
#: Where a reader may be one that is not shown the gradient. Looked at first, because gradients are read often.
FILES_TO_ASK = frozenset({_STAND_INS, *(file for file, _ in _REFUSED)})
#: Of what is refused, what is right where one rank has every element.
_RIGHT_ALONE = ("torch.nn.utils.clip_grad_norm_", "torch.amp.GradScaler", "torch.optim.LBFGS")


def is_shown(param: torch.Tensor, gradient: torch.Tensor | None, reader: FrameType) -> bool:
    """Whether the function that runs in ``reader`` is to see the ``gradient`` of ``param``.

    Raises:
        RuntimeError: it would compute over a shard as if it were the whole.
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
    refused = _REFUSED.get((code.co_filename, code.co_name))
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
