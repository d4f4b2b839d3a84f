"""Choice of Muon or AdamW for each parameter, and matrices that hold several.

Names match as in a shell: a pattern such as ``"*.qkv"`` matches a parameter, or the module that has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.deprecate import warn_once
from ..global_var import rank
from ..parameter import DistributedParameter, whole_shape

#: Kinds of groups: by Muon, or by AdamW.
RULES = ("muon", "adam")
#: A number of equal parts, or the rows of each part.
Split = int | Sequence[int]
#: Names of matrices that are usually several in one.
_FUSED = re.compile(r"qkv|query_key_value|gate_up|up_gate|experts?\b")
#: Names of matrices that are so where one side is three times the other.
_ATTENTION = re.compile(r"attn|attention|in_proj")


class Choice(NamedTuple):
    """The rule of a parameter; the parts of a matrix; whether they are side by side, as columns."""

    rule: str
    split: Split | None = None
    by_columns: bool = False


class Member(NamedTuple):
    """A parameter of a group.

    Attributes:
        item: the parameter, or its name and itself.
        param: the parameter.
        name: its name, if it was given with one; in a Block otherwise its name there; else empty.
        is_named: whether it was given with a name.
        module: the module that has it, if it is in a Block and that can be found.
        is_in_block: whether it is in a Block.
    """

    item: Any
    param: Tensor
    name: str
    is_named: bool
    module: torch.nn.Module | None
    is_in_block: bool

    def matches(self, pattern: str) -> bool:
        """Whether a pattern matches the name or the module's name."""
        return fnmatchcase(self.name, pattern) or fnmatchcase(self.name.rpartition(".")[0], pattern)

    @property
    def is_transposed(self) -> bool:
        """Whether the matrix is stored as ``(in, out)``, as by the ``Conv1D`` of transformers."""
        return any(kind.__name__ == "Conv1D" for kind in type(self.module).__mro__)


class Rules:
    """Rules by name.

    Args:
        rules: rule by pattern; the first that matches decides.
        splits: number of parts, or rows of each part, by pattern.

    Raises:
        TypeError, ValueError: a value is of another type, or out of its range.
    """

    def __init__(self, rules: Mapping[str, str] | None, splits: Mapping[str, Split] | None) -> None:
        for name, value in (("rules", rules), ("splits", splits)):
            if not isinstance(value, Mapping | None) or not all(isinstance(key, str) for key in value or ()):
                raise TypeError(f"{name}: expected a dict by pattern, or None, got {value!r:.80}")
        self._rules, self._splits = dict(rules or {}), dict(splits or {})
        for rule in self._rules.values():
            if rule not in RULES:
                raise ValueError(f"rules: expected 'muon' or 'adam', got {rule!r}")
        for split in self._splits.values():
            _check_split(split)
        self._unused = {*self._rules, *self._splits}
        self.is_complete = False  # `check` has seen the parameters of the constructor
        self.fused: list[Member] = []  # undivided ones that look like several matrices

    def choose(self, member: Member, group: Mapping[str, Any]) -> Choice:
        """Returns the choice for a parameter: by its group, else by name, else by the structure of the model.

        Raises:
            ValueError: names are needed, or the parameter cannot take the chosen rule; it is named.
        """
        if self._unused and not member.is_named:
            raise ValueError(
                "rules, splits: expected parameters with names, such as model.named_parameters(), got some without"
            )
        by_name = self._find(self._rules, member)
        split = self._find(self._splits, member)
        split = group["split"] if group.get("split") is not None else split
        rule = group.get("rule") or by_name or ("muon" if _is_matrix_of_a_block(member, split) else "adam")
        if split is None and (group.get("rule") or by_name) != "adam" and _looks_fused(member):
            self.fused.append(member)
        if rule == "adam":
            return Choice("adam")
        _check_matrix(member, split)
        return Choice("muon", split, split is not None and member.is_transposed)

    def _find(self, values: Mapping[str, Any], member: Member) -> Any:
        matching = [pattern for pattern in values if member.matches(pattern)]
        self._unused.difference_update(matching)
        return values[matching[0]] if matching else None

    def check(self) -> None:
        """Checks the rules once all parameters have chosen; warns on rank 0 of matrices that look fused.

        Raises:
            ValueError: a pattern has matched no parameter.
        """
        if self._unused:
            raise ValueError(
                f"rules, splits: no parameter has a name that matches {sorted(self._unused)[0]!r}"
            )
        self.is_complete = True
        if self.fused and rank() == 0:
            names = _names_of(self.fused)
            warn_once(
                f"MuonOptimizer.fused {names}",
                f"MuonOptimizer: {names}: several matrices in one, by name and shape; declare parts, "
                'such as splits={"*.qkv": 3}, to have each orthogonalised by itself, or 1 part to leave them together',
                stacklevel=4,
                category=UserWarning,
            )
        self.fused.clear()


def members_of(params: Any) -> list[Member]:
    """Returns the parameters of a group with their names and modules."""
    items = [params] if isinstance(params, Tensor) else list(params)
    homes: dict[int, tuple[str, torch.nn.Module]] = {}
    seen: set[int] = set()
    members = []
    for item in items:
        given, p = item if isinstance(item, tuple) else ("", item)
        block = p._block() if isinstance(p, DistributedParameter) and p._block is not None else None
        if block is not None and id(block) not in seen:
            seen.add(id(block))
            homes.update(homes_in(block._module))
        name, module = homes.get(id(p), ("", None))
        is_in_block = isinstance(p, DistributedParameter) and p._in_block
        members.append(Member(item, p, given or name, bool(given), module, is_in_block))
    return members


def homes_in(block: torch.nn.Module) -> dict[int, tuple[str, torch.nn.Module]]:
    """Returns the name and the module of each parameter of a Block's module; of a shared one an embedding, if any."""
    homes: dict[int, tuple[str, torch.nn.Module]] = {}
    for path, module in block.named_modules():
        for name, p in module._parameters.items():
            if p is not None and (id(p) not in homes or _is_embedding(module)):
                homes[id(p)] = (f"{path}.{name}".lstrip("."), module)
    return homes


def table_of(groups: Iterable[Mapping[str, Any]]) -> str:
    """Returns a table of the groups of an optimizer: rules, sizes, names and options."""
    rows = [("rule", "split", "tensors", "elements", "names")]
    options = [""]
    for group in groups:
        params = group["params"]
        members = members_of(list(zip(group.get("param_names", [""] * len(params)), params, strict=True)))
        elements = sum(torch.Size(_shape_of(p)).numel() for p in params)
        split = "" if group.get("split") is None else str(group["split"])
        sizes = f"{len(params):,}", f"{elements:,}"
        rows.append((group.get("rule", ""), split, *sizes, _names_of(members)))
        hidden = ("params", "param_names", "rule", "split", "by_columns")
        options.append(", ".join(f"{k}={v}" for k, v in group.items() if k not in hidden))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, values in zip(rows, options, strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if values:
            lines.append(f"    {values}")
    return "\n".join(lines)


def _names_of(members: Iterable[Member]) -> str:
    """Returns names for a person: numbers are replaced by stars, so that layers appear once."""
    names = [re.sub(r"\b\d+\b", "*", m.name) or f"of shape {_shape_of(m.param)}" for m in members]
    return ", ".join(dict.fromkeys(names))


def _shape_of(p: Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole parameter."""
    return tuple(whole_shape(p))


def heights_of(shape: Sequence[int], split: Split) -> list[int]:
    """Returns the rows of each part of a matrix, whose leading dimensions count as rows."""
    rows = torch.Size(shape[:-1]).numel()
    return [rows // split] * split if isinstance(split, int) else list(split)


def _looks_fused(member: Member) -> bool:
    """Whether the name and shape of a parameter suggest several matrices in one."""
    if not member.is_in_block:
        return False
    shape, module_name = _shape_of(member.param), ".".join(member.name.split(".")[-2:])
    if len(shape) < 2:
        return False
    if _FUSED.search(module_name):
        return len(shape) == 2 or "expert" in module_name
    return bool(_ATTENTION.search(member.name)) and max(shape) == 3 * min(shape)


def _is_embedding(module: torch.nn.Module | None) -> bool:
    """Whether a module is an embedding, by the name of its class."""
    return any("Embedding" in kind.__name__ for kind in type(module).__mro__)


def _is_matrix_of_a_block(member: Member, split: Split | None) -> bool:
    if not member.is_in_block or _is_embedding(member.module):
        return False
    num_dims = len(_shape_of(member.param))
    return num_dims == 2 or (num_dims > 2 and split is not None)


def _check_split(split: Any) -> None:
    values = [split] if isinstance(split, int) else split
    if not (isinstance(values, (list, tuple)) and values and all(type(v) is int and v > 0 for v in values)):
        raise ValueError(f"splits: expected a number of parts or a list of their rows, got {split!r}")


def _check_matrix(member: Member, split: Split | None) -> None:
    p, shape = member.param, _shape_of(member.param)
    name = f"{member.name}: " if member.name else ""
    if len(shape) != 2 and (len(shape) < 2 or split is None):
        raise ValueError(f"rule: {name}expected parameters of two dimensions for 'muon', got shape {shape}")
    if split is None:
        return
    _check_split(split)
    side = shape[-1] if member.is_transposed else torch.Size(shape[:-1]).numel()
    if member.is_transposed and not isinstance(split, int):
        raise ValueError(f"splits: {name}expected a number of parts for the columns of Conv1D, got {split}")
    if side % split if isinstance(split, int) else sum(split) != side:
        raise ValueError(
            f"splits: {name}expected parts of {side} rows together, got {split} for shape {shape}"
        )
    if not isinstance(split, int) and getattr(p, "_tp_split_dim", -1) > 0:
        raise ValueError(
            f"splits: {name}expected a number of parts for a matrix whose columns are split over tensor-parallel "
            f"ranks, got {split}"
        )
