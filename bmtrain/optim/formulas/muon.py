"""Muon (Jordan et al., 2024; Liu et al., "Muon is Scalable for LLM Training", 2025), as `torch.optim.Muon`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.arguments import require_integer, require_number
from ..._base.tensors import data_of
from .._arrays import MASTER
from .._options import check_betas, check_not_negative
from .._rules import RULES, Choice, Member, Rules, Split, heights_of
from .._updates import Update
from .adam import Adam
from .formula import Formula

_MOMENTUM = "momentum_buffer"
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(Formula):
    """A step along the orthogonalised momentum of a matrix.

    Momentum and weight are updated element by element, on shards; `transform` needs the whole matrix. Both ways it
    takes 16-bit values: the iteration begins with a cast to bf16, which each rank makes of its own elements.

    Args:
        options: default options, of both rules; options of Adam begin with ``adam_``.
        rules: see `Rules`.
        splits: see `Rules`.
    """

    arrays = (_MOMENTUM,)
    settings = ("options", "rules", "splits")
    is_whole = True

    def __init__(
        self,
        options: Mapping[str, Any],
        rules: Mapping[str, str] | None = None,
        splits: Mapping[str, Split] | None = None,
    ) -> None:
        self.options = dict(options)
        self.rules, self.splits = rules, splits
        self.names = Rules(rules, splits)
        self.others = Adam(decoupled=True)
        self._check_all(self.options)

    # ---- groups

    def groups_by_rule(self, group: Mapping[str, Any], members: Sequence[Member]) -> Iterable[dict[str, Any]]:
        """Returns the groups of a user's group: one for each rule and split, with the options of the rule.

        Args:
            group: options by the names of the constructor, maybe ``rule`` and ``split``.
            members: its parameters.

        Raises:
            TypeError, ValueError: an option is of another type, or out of its range.
        """
        if group.get("rule") not in (None, *RULES):
            raise ValueError(f"rule: expected 'muon', 'adam' or None, got {group['rule']!r}")
        options = {**self.options, **group}
        self._check_all(options)
        chosen: dict[Any, tuple[Choice, list[Any]]] = {}
        for member in members:
            choice = self.names.choose(member, group)
            chosen.setdefault(repr(choice), (choice, []))[1].append(member.item)
        known = (*self.options, "params", "rule", "split")
        others = {k: v for k, v in group.items() if k not in known}
        for choice, items in sorted(chosen.values(), key=lambda kind: RULES.index(kind[0].rule)):
            parts = {} if choice.split is None else {"split": choice.split}
            if choice.by_columns:
                parts["by_columns"] = True
            yield {
                "params": items,
                "rule": choice.rule,
                **self._options_of(choice.rule, options),
                **parts,
                **others,
            }

    def _options_of(self, rule: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if rule == "muon":
            return {name: options[name] for name in self.options if not name.startswith("adam_")}
        lr, adam_lr, decay = options["lr"], options["adam_lr"], options["adam_weight_decay"]
        return {
            "lr": lr,
            "lr_factor": 1.0 if adam_lr is None else adam_lr / lr,
            "betas": options["adam_betas"],
            "eps": options["adam_eps"],
            "weight_decay": options["weight_decay"] if decay is None else decay,
            "maximize": False,
        }

    def _check_all(self, options: Mapping[str, Any]) -> None:
        self._check_muon(dict(options))
        given = [name for name in ("adam_lr", "adam_weight_decay") if options[name] is not None]
        check_not_negative(dict(options), "adam_eps", *given)
        check_betas(dict(options), "adam_betas")
        if options["adam_lr"] is not None and options["lr"] == 0:
            raise ValueError("adam_lr: expected None where lr is 0, as schedules keep their ratio")

    def _check_muon(self, options: dict[str, Any]) -> None:
        check_not_negative(options, "lr", "momentum", "weight_decay", "eps")
        if not 0 <= require_integer("ns_steps", options["ns_steps"], 0) < 100:
            raise ValueError(f"ns_steps: expected less than 100, got {options['ns_steps']}")
        if options["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn: expected one of {_ADJUSTMENTS}, got {options['adjust_lr_fn']!r}")
        coefficients = options["ns_coefficients"]
        if not isinstance(coefficients, Sequence) or len(coefficients) != 3:
            raise ValueError(f"ns_coefficients: expected three numbers, got {coefficients}")
        for number in coefficients:
            require_number("ns_coefficients", number)

    def formula_in(self, group: Mapping[str, Any]) -> Formula:
        return self.others if group.get("rule") == "adam" else self

    def check(self, options: dict[str, Any]) -> None:
        if options.get("maximize"):
            raise ValueError("maximize: expected False where matrices take Muon, got True")
        self._check_muon({**self.options, **options})

    def numbers_of(self, group: dict[str, Any], *, is_low: bool, scale: float) -> dict[str, Any]:
        numbers = self._options_of("muon", group)
        split = {"split": group.get("split"), "by_columns": group.get("by_columns", False)}
        return {**numbers, **split, "lr": float(group["lr"]), "scale": scale}

    # ---- a step

    def start(self, update: Update, numbers: dict[str, Any]) -> Tensor:
        """Updates the momentum of a shard and returns its elements of the matrix to transform, in bf16."""
        momentum = update.state[_MOMENTUM]
        grad = update.grad.to(momentum.device, torch.float32)
        if numbers["scale"] != 1:
            grad = grad / numbers["scale"]
        momentum.lerp_(grad, 1 - numbers["momentum"])
        return (grad.lerp(momentum, numbers["momentum"]) if numbers["nesterov"] else momentum).bfloat16()

    def transform(self, matrix: Tensor, numbers: dict[str, Any]) -> Tensor:
        """Returns the orthogonalised matrix, or its orthogonalised parts.

        Args:
            matrix: bf16, in the memory of this function.
            numbers: numbers of the step.
        """
        if numbers["split"] is None:
            return _orthogonalised(matrix, numbers)
        if numbers["by_columns"]:
            sides = matrix.split(matrix.shape[1] // numbers["split"], 1)
            return torch.cat([_orthogonalised(part.contiguous(), numbers) for part in sides], 1)
        parts = matrix.reshape(-1, matrix.shape[-1]).split(heights_of(matrix.shape, numbers["split"]))
        return torch.cat([_orthogonalised(part.clone(), numbers) for part in parts]).view(matrix.shape)

    def finish(
        self, update: Update, numbers: dict[str, Any], shape: torch.Size, begin: int, direction: Tensor
    ) -> None:
        """Updates the weights of a shard.

        Args:
            update: the shard.
            numbers: numbers of the step.
            shape: of the matrix.
            begin: the first element of the shard.
            direction: elements of the transformed matrix.
        """
        lr, master = numbers["lr"], update.state.get(MASTER)
        if master is not None and master.data_ptr() == update.param.data_ptr():
            master = None  # an alias of the parameter, see `Place.shares_master`
        weight = data_of(update.param) if master is None else master
        direction = direction.to(weight.device)
        weight.mul_(1 - lr * numbers["weight_decay"])
        for first, last, part in _parts_in(shape, numbers, begin, begin + weight.numel()):
            rate = _adjusted(lr, numbers["adjust_lr_fn"], part)
            if last - first == weight.numel():
                weight.add_(direction.view(weight.shape), alpha=-rate)
            else:
                piece = slice(first - begin, last - begin)
                weight.view(-1)[piece].add_(direction.view(-1)[piece], alpha=-rate)
        if master is not None:
            data_of(update.param).copy_(master)

    def has_kernel(self, device: torch.device) -> bool:
        return False  # operations of torch compute it

    def work(self, shape: torch.Size, numbers: dict[str, Any]) -> int:
        """Returns the number of multiplications of one iteration over a matrix."""
        return sum(_work(rows, columns) for rows, columns in _part_shapes(shape, numbers))


def _orthogonalised(matrix: Tensor, numbers: dict[str, Any]) -> Tensor:
    """Returns the matrix orthogonalised by a quintic Newton-Schulz iteration in bf16; overwrites its argument."""
    a, b, c = numbers["ns_coefficients"]
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x.div_(x.norm().clamp(min=numbers["eps"]))  # the spectral norm is at most 1
    for _ in range(numbers["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _part_shapes(shape: Sequence[int], numbers: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns the shapes of the parts of a matrix."""
    split, columns = numbers["split"], shape[-1]
    if split is None:
        return [(torch.Size(shape[:-1]).numel(), columns)]
    if numbers["by_columns"]:
        return [(shape[0], columns // split)] * split
    return [(rows, columns) for rows in heights_of(shape, split)]


def _parts_in(
    shape: Sequence[int], numbers: dict[str, Any], begin: int, end: int
) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yields the runs of elements from ``begin`` to ``end`` whose parts have one shape, with the shape."""
    shapes = _part_shapes(shape, numbers)
    if len(set(shapes)) == 1:
        yield begin, end, shapes[0]
        return
    at = 0
    for rows, columns in shapes:
        first, last = max(begin, at), min(end, at + rows * columns)
        at += rows * columns
        if first < last:
            yield first, last, (rows, columns)


def _work(rows: int, columns: int) -> int:
    short, long = sorted((rows, columns))
    return short * short * (2 * long + short)


def _adjusted(lr: float, adjustment: str | None, shape: tuple[int, int]) -> float:
    rows, columns = shape
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))
