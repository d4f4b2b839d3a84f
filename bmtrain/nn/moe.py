"""Mixtures of experts: each token passes through a few of many feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from .._base.arguments import require_callable, require_integer, require_tensor
from .._base.precision import as_autocast_has_it
from .._engine.experts import run_experts
from ..global_var import context
from ..layer import DistributedModule
from ._divide import check_features, check_layer, expert_parameter
from .linear import Linear

__all__ = ["Experts", "MoE"]


class Experts(DistributedModule):
    """The feed-forward layers of a mixture, ``down(act(gate(x)) * up(x))`` of each expert (SwiGLU with ``silu``).

    With ``init_distributed(ep_size=)`` each rank of an expert-parallel group holds ``num_experts / ep_size`` of them,
    and tokens travel to their experts and back. ``init_parameters`` draws each matrix with ``xavier_normal_``.

    Args:
        dim: size of the last dim of the input and the output.
        hidden_dim: size in between.
        num_experts: of all ranks together; a multiple of ``ep_size``.
        act: from the gate's ``(n, hidden_dim)`` to the same shape.
        dtype: of the parameters; default: torch's.

    Raises:
        TypeError: a size is no integer, or ``dtype`` is not one of floats.
        ValueError: a size that makes no sense, or a number of experts that does not divide.
    """

    _run_experts = staticmethod(run_experts)

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        *,
        act: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_layer(dtype, dim=dim, hidden_dim=hidden_dim)
        ep_size = context("nn.Experts").topology.ep_size
        if require_integer("num_experts", num_experts, 1) % ep_size:
            raise ValueError(f"num_experts: expected a multiple of ep_size {ep_size}, got {num_experts}")
        require_callable("act", act)
        self.dim, self.hidden_dim, self.num_experts = dim, hidden_dim, num_experts
        self.act = act
        draw = torch.nn.init.xavier_normal_
        self.gate_up = expert_parameter((num_experts, 2 * hidden_dim, dim), dtype, draw)
        self.down = expert_parameter((num_experts, dim, hidden_dim), dtype, draw)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, hidden_dim={self.hidden_dim}, num_experts={self.num_experts}"

    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Sends each token through its experts, and adds their results. Collective over the expert-parallel group.

        Args:
            x: ``(tokens, dim)``.
            top_k_index: ``(tokens, k)``, integers: the experts of each token.
            top_k_weights: ``(tokens, k)``: the factor of each expert's result.

        Returns:
            ``(tokens, dim)``. Sums over ``k`` are made in fp32.
        """
        check_features("x", x, self.gate_up, self.dim)
        _check_routing(x, top_k_index, top_k_weights, self.num_experts)
        parameters = self.gate_up, self.down
        return self._run_experts(x, top_k_index, top_k_weights, self.num_experts, self._run, parameters)

    def _run(
        self, rows: torch.Tensor, numbers: torch.Tensor, parameters: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        gate_up, down = parameters
        gate, up = grouped_linear(rows, gate_up, numbers).chunk(2, dim=-1)
        return grouped_linear(self.act(gate) * up, down, numbers)


class MoE(DistributedModule):
    """A mixture of experts: a router gives each token ``top_k`` of ``num_experts`` feed-forward layers.

    No token is dropped, whatever the load of an expert. The result does not depend on ``ep_size``, the number of ranks
    that hold the experts together: see :class:`Experts`. The router computes in fp32.

    Args:
        dim: size of the last dim of the input and the output.
        hidden_dim: size inside of an expert.
        num_experts: of all ranks together; a multiple of ``ep_size``.
        top_k: experts of a token.
        scoring: ``"softmax"`` over all experts (Mixtral, Qwen), or ``"sigmoid"`` of each (DeepSeek-V3).
        normalize: whether the weights of a token's experts are divided by their sum.
        shared_hidden_dim: size inside of an expert that every token passes through as well; 0: none.
        act: of the experts.
        dtype: of the parameters; default: torch's.

    Raises:
        TypeError: a size is no integer, or ``dtype`` is not one of floats.
        ValueError: a size or ``scoring`` that makes no sense, or a number of experts that does not divide.

    Example:
        >>> layer = bmtrain.nn.MoE(dim=4, hidden_dim=8, num_experts=6, top_k=2)
        >>> bmtrain.init_parameters(layer)
        >>> y, router_logits = layer(torch.ones(2, 3, 4))
        >>> y.shape, router_logits.shape
        (torch.Size([2, 3, 4]), torch.Size([6, 6]))
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int = 2,
        *,
        scoring: str = "softmax",
        normalize: bool = True,
        shared_hidden_dim: int = 0,
        act: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(scoring, str) or scoring not in _SCORINGS:
            raise ValueError(f"scoring: expected 'softmax' or 'sigmoid', got {scoring!r}")
        require_integer("num_experts", num_experts, 1)
        if require_integer("top_k", top_k, 1) > num_experts:
            raise ValueError(f"top_k: expected at most num_experts {num_experts}, got {top_k}")
        self.top_k, self.scoring, self.normalize = top_k, scoring, normalize
        self.experts = Experts(dim, hidden_dim, num_experts, act=act, dtype=dtype)
        self.router = Linear(dim, num_experts, bias=False, dtype=dtype)
        self.act = act
        self.shared_gate_up = self.shared_down = None
        if require_integer("shared_hidden_dim", shared_hidden_dim, 0):
            self.shared_gate_up = Linear(dim, 2 * shared_hidden_dim, bias=False, dtype=dtype)
            self.shared_down = Linear(shared_hidden_dim, dim, bias=False, dtype=dtype)

    def extra_repr(self) -> str:
        return f"top_k={self.top_k}, scoring={self.scoring!r}, normalize={self.normalize}"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Passes ``x`` of shape ``(..., dim)`` through the experts of each token. Collective over their ranks.

        Returns:
            the result, ``(..., dim)``, and the router's logits, ``(tokens, num_experts)`` in fp32, for
            :func:`bmtrain.loss.load_balancing_loss` and :func:`bmtrain.loss.router_z_loss`.
        """
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(tokens.float(), self.router.weight.float())
        scores, logarithms = _SCORINGS[self.scoring]
        chosen, index = logits.topk(self.top_k, dim=-1)  # both scores rise with the logit
        # A sum of scores may be too small for a float, of which the quotient would be NaN.
        weights = logarithms(chosen).softmax(-1) if self.normalize else scores(logits).gather(-1, index)
        y = self.experts(tokens, index, weights).view_as(x)
        if self.shared_gate_up is not None and self.shared_down is not None:
            gate, up = self.shared_gate_up(x).chunk(2, dim=-1)
            y = y + self.shared_down(self.act(gate) * up)
        return y, logits


def grouped_linear(rows: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Products of groups of rows with a matrix each, under autocast in its dtype.

    Args:
        rows: ``(n, in)``, the first ones of the first group and so on.
        weight: ``(groups, out, in)``.
        numbers: ``(groups,)``, of rows of each group, on the host.

    Returns:
        ``(n, out)``.
    """
    rows, weight = as_autocast_has_it(rows), as_autocast_has_it(weight)
    if context().virtual_shards:
        return _grouped_linear(*_aligned(rows, weight), numbers)[:, : weight.shape[1]]
    return _grouped_linear(rows, weight, numbers)


def _grouped_linear(rows: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    if _has_grouped_products(rows, weight):
        ends = numbers.cumsum(0).to(rows.device, torch.int32)
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
    parts = zip(rows.split(numbers.tolist()), weight.unbind(0), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])


def _aligned(rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads features so that each group starts at a multiple of 64 bytes, on which the bits of a product depend."""
    multiple = 64 // weight.element_size()
    of_out, of_in = (-size % multiple for size in weight.shape[1:])
    if of_out or of_in:
        return F.pad(rows, (0, of_in)), F.pad(weight, (0, of_in, 0, of_out))
    return rows, weight


def _check_routing(
    x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, num_experts: int
) -> None:
    require_tensor("top_k_index", top_k_index)
    require_tensor("top_k_weights", top_k_weights)
    if x.dim() != 2 or top_k_index.dim() != 2 or len(x) != len(top_k_index):
        raise ValueError(
            f"x, top_k_index: expected (tokens, {x.shape[-1]}) and (tokens, k), got {tuple(x.shape)} and "
            f"{tuple(top_k_index.shape)}"
        )
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(
            f"top_k_weights: expected shape {tuple(top_k_index.shape)}, got {tuple(top_k_weights.shape)}"
        )
    if top_k_index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"top_k_index: expected integers, got {top_k_index.dtype}")
    # On a GPU the host would wait for the numbers, and fake tensors have none.
    if type(top_k_index) is torch.Tensor and x.device.type == "cpu" and top_k_index.numel():
        least, most = (int(number) for number in top_k_index.aminmax())
        if least < 0 or most >= num_experts:
            raise ValueError(f"top_k_index: expected 0 to {num_experts - 1}, got {least} to {most}")


def _has_grouped_products(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch computes them in one call: on CPUs, and in bf16 on GPUs from compute capability 8.0 on; the rows of
    matrices must be multiples of 16 bytes."""
    if any(size * weight.element_size() % 16 for size in weight.shape[1:]):
        return False
    if rows.device.type == "cuda":
        return rows.dtype == torch.bfloat16 and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    return rows.dtype in (torch.float32, torch.bfloat16, torch.float16)


#: Functions of logits: scores, and their logarithms up to a term that all scores of a token have in common.
_SCORINGS = {
    "softmax": (lambda logits: logits.softmax(-1), lambda logits: logits),
    "sigmoid": (torch.sigmoid, F.logsigmoid),
}
