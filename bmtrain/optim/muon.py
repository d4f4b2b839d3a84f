"""Muon for matrices, and AdamW for the other parameters; state on the device or on the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._narrow import read_state_dtype
from ._of_torch import is_of_torch, joined
from ._options import check_group
from ._rules import members_of, table_of
from ._sharded import OffloadOptimizer, ShardedOptimizer
from .formulas import Formula, Muon
from .places import OnHostOwners, OnOwners, Place

__all__ = ["MuonOffloadOptimizer", "MuonOptimizer"]


class MuonOptimizer(ShardedOptimizer):
    """Muon for the matrices inside Blocks, and AdamW for all other parameters, so that it takes ``model.parameters()``.

    A matrix moves along its orthogonalised momentum, with the bits of `torch.optim.Muon` over whole matrices (see there
    for the formula); 16-bit parameters have an fp32 master, of which they are the rounding to nearest even. In each
    step one rank, the owner of a matrix, gathers its momentum in bf16, orthogonalises it and sends the result to the
    others; the work is divided over the ranks. Momentum and masters stay sharded. A matrix that is split over
    tensor-parallel ranks is orthogonalised as a whole.

    The parameters of a group that take Muon and the others become groups of their own, with ``rule`` ``"muon"`` or
    ``"adam"``, and options by the names of `torch.optim.Muon` and `torch.optim.AdamW`; ``print(optimizer)`` shows them.

    Args:
        params: parameters, with their names for ``rules`` and ``splits``: ``model.named_parameters()``; or group dicts
            with ``params`` and any of the options below. In a group ``rule="muon"`` gives Muon to matrices outside
            Blocks too, ``rule="adam"`` AdamW to all of its parameters, and ``split`` is a value of ``splits``.
        lr: learning rate of Muon.
        momentum: decay of the momentum.
        nesterov: blend the gradient with the momentum once more.
        weight_decay: strength of the decoupled weight decay.
        ns_steps: iterations of the orthogonalisation.
        adjust_lr_fn: factor of the learning rate by the shape of a matrix: None or ``"original"`` for
            ``sqrt(max(1, rows / columns))``, ``"match_rms_adamw"`` for ``0.2 * sqrt(max(rows, columns))``, with which
            one learning rate suits both rules.
        ns_coefficients: of the polynomial of an iteration.
        eps: least norm that a matrix is divided by.
        adam_lr: learning rate of AdamW; None: ``lr``. A schedule of ``lr`` keeps their ratio.
        adam_betas: decay of the moments.
        adam_eps: added to the denominator.
        adam_weight_decay: strength of AdamW's weight decay; None: ``weight_decay``.
        rules: ``"muon"`` or ``"adam"`` by pattern, such as ``{"*.pos": "adam"}``; a pattern matches the name of a
            parameter or of the module that has it, and the first that matches decides.
        splits: matrices that are several in one, by pattern: a number of equal parts, such as ``{"*.qkv": 3}``, or the
            rows of each part. Parts are orthogonalised separately, with the bits of separate matrices. Parts of more
            than two dimensions (stacked experts) divide the rows of all matrices, one below the other.
        state_dtype: of momentum and moments, as for `AdamOffloadOptimizer`: ``"bfloat16"`` or ``"int8"``. The momentum
            of a matrix is computed by several operations of torch then, with a temporary fp32 copy.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is out of its range; Muon is chosen for a parameter without two dimensions; a pattern
            matches nothing; or names are missing.

    Example:
        >>> layer = bmtrain.Block(bmtrain.nn.Linear(2, 3))
        >>> optimizer = MuonOptimizer(layer.parameters(), lr=0.5, weight_decay=0)
        >>> [(group["rule"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 1), ('adam', 1)]
    """

    _formula_class = Muon
    _place_class: type[Place] = OnOwners
    _may_step_early = False  # the ranks step a matrix together

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        adam_lr: float | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        adam_weight_decay: float | None = None,
        rules: Mapping[str, str] | None = None,
        splits: Mapping[str, int | Sequence[int]] | None = None,
        state_dtype: torch.dtype | str = torch.float32,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": bool(nesterov),
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "adam_lr": adam_lr,
            "adam_betas": adam_betas,
            "adam_eps": adam_eps,
            "adam_weight_decay": adam_weight_decay,
        }
        formula = {"options": options, "rules": rules, "splits": splits}
        place = {"state_dtype": read_state_dtype(state_dtype)}
        super().__init__(params, {"lr": lr}, formula=formula, place=place)
        self._formula.names.check()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as one for each rule and split.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        check_group(param_group)
        members = members_of(param_group["params"])
        groups = list(self._formula.groups_by_rule(param_group, members)) or [param_group]
        for group in groups:
            super().add_param_group(group)
        if self._formula.names.is_complete:
            self._formula.names.check()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this optimizer, or of `torch.optim.Muon` or `torch.optim.AdamW` over whole parameters.

        A state of torch has the groups of one rule. The groups of the other rule, and AdamW's learning rate, which
        follows the ratio, stay unchanged.

        Args:
            state_dict: not modified, and none of its tensors is kept.

        Raises:
            ValueError: groups or sizes do not match; nothing changed.
        """
        if not is_of_torch(state_dict):
            super().load_state_dict(state_dict)
            return
        rule = "muon" if any("ns_steps" in group for group in state_dict["param_groups"]) else "adam"
        others = [p for group in self.param_groups if group["rule"] != rule for p in group["params"]]
        kept = {p: self._states[p] for p in others if p in self._states}
        super().load_state_dict(joined(state_dict, self.param_groups, rule))
        self._states.update(kept)
        for p in kept:
            self._mark_seen(p)

    def __repr__(self) -> str:
        return f"{type(self).__name__}\n{table_of(self.param_groups)}"

    def formula_of(self, p: Tensor) -> Formula:
        """Returns the formula that updates ``p``."""
        group = next(group for group in self.param_groups if any(p is member for member in group["params"]))
        formula: Formula = self._formula.formula_in(group)
        return formula


class MuonOffloadOptimizer(MuonOptimizer, OffloadOptimizer):
    """`MuonOptimizer` with momentum, moments and masters in host memory.

    The host updates momentum and masters; matrices travel and are orthogonalised on the run device, in bf16. On CPU
    ranks the results are the bits of `MuonOptimizer`, on GPUs they agree to rounding. Updates of 16-bit parameters by
    AdamW continue after `step`, as with `AdamOffloadOptimizer`; matrices and fp32 parameters of CPU ranks are updated
    within `step`.

    Arguments, groups and state dicts are as in `MuonOptimizer`; each loads the other's state.

    Raises:
        TypeError, ValueError: as `MuonOptimizer`.
        RuntimeError: from the next call that waits for it, naming the block: an update in the background failed.

    Example:
        >>> layer = bmtrain.Block(bmtrain.nn.Linear(2, 3))
        >>> optimizer = MuonOffloadOptimizer(layer.parameters(), lr=0.5)
        >>> [group["rule"] for group in optimizer.param_groups]
        ['muon', 'adam']
    """

    _place_class = OnHostOwners
