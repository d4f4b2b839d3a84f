"""``.grad`` and ``.data`` of parameters for who changes nothing that has to be noticed: torch's own attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["TORCH_DATA", "TORCH_GRAD", "data_of", "gradient_of"]

# Descriptors, which those of DistributedParameter stand for.
TORCH_DATA: Any = torch.Tensor.data
TORCH_GRAD: Any = torch.Tensor.grad

#: ``param.data``, of which no optimizer is told that values may change through it.
data_of: Callable[[torch.Tensor], torch.Tensor] = TORCH_DATA.__get__
#: ``param.grad``, of which a copy that is under way stays right.
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = TORCH_GRAD.__get__
