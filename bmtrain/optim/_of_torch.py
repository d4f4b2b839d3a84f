"""States of `torch.optim.Muon` and `torch.optim.AdamW` over whole parameters, for `MuonOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_of_torch(state: Any) -> bool:
    """Whether a state is of torch: states of this library are marked as whole or not."""
    return (
        isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys() and "is_whole" not in state
    )


def joined(state: Mapping[str, Any], groups: Sequence[dict[str, Any]], rule: str) -> dict[str, Any]:
    """Returns a gathered state of all groups, in which ``state``, of torch, gives the groups of one rule.

    Raises:
        ValueError: other groups.
    """
    saved = list(state["param_groups"])
    sizes, own = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups if g["rule"] == rule]
    if sizes != own:
        raise ValueError(f"state dict: expected groups of {own} parameters by {rule!r}, got {sizes}")
    entries: dict[int, Any] = {}
    out: list[dict[str, Any]] = []
    count = 0
    for group in groups:
        numbers = list(range(count, count + len(group["params"])))
        count += len(numbers)
        options: dict[str, Any] = {}
        if group["rule"] == rule:
            found = saved.pop(0)
            fixed = ("params", "rule", "param_names", *(("lr",) if rule == "adam" else ()))
            options = {name: found[name] for name in group if name in found and name not in fixed}
            pairs = zip(numbers, found["params"], strict=True)
            entries |= {number: state["state"][key] for number, key in pairs if key in state["state"]}
        out.append({**options, "params": numbers})
    return {"state": entries, "param_groups": out, "is_whole": True}
