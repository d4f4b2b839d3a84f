"""torch's raw ``.grad`` and ``.data``, without change tracking; for code that only reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch's descriptors, which DistributedParameter overrides.
TORCH_DATA: Any = torch.Tensor.data
TORCH_GRAD: Any = torch.Tensor.grad

#: ``param.data``, without a notification to optimizers that values may change through it.
data_of: Callable[[torch.Tensor], torch.Tensor] = TORCH_DATA.__get__
#: ``param.grad``, without invalidation of a copy in flight.
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = TORCH_GRAD.__get__
