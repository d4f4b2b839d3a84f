"""Check of a state dict against a model, before the model is changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .notes import remedy_of_keys
from .state_dict import misfit

_SHOWN = 8  # keys of each kind in an error
_OURS = ("torch.", "bmtrain.", "transformers.")


def check_model_state(
    model: torch.nn.Module, own: Mapping[str, Any], given: Mapping[str, Any], strict: bool
) -> None:
    """Raises the RuntimeError that ``load_state_dict`` would raise at its end. Local.

    A model with loading methods or hooks of its own may rename or change entries while loading: for such a model
    nothing is compared. ``given`` has values, and tensors or handles with a shape and a dtype.
    """
    if has_own_state_methods(model):
        return
    problems: list[str] = []
    if strict:
        missing = [key for key in own if key not in given and not key.endswith("num_batches_tracked")]
        unexpected = [key for key in given if key not in own]
        for kind, keys in (("Missing", missing), ("Unexpected", unexpected)):
            if keys:
                listed = ", ".join(_first([f'"{key}"' for key in keys]))
                problems.append(f"{kind} key(s) in state_dict: {listed}. ")
    both = [(key, own[key]) for key in own if key in given and isinstance(own[key], torch.Tensor)]
    problems += _first([problem for key, target in both if (problem := _problem(key, target, given[key]))])
    listed = "\n\t".join(problems)
    if "key(s) in" in listed:
        listed += f"\n\t{remedy_of_keys(listed)}."
    if problems:
        raise RuntimeError(f"Error(s) in loading state_dict for {model.__class__.__name__}:\n\t{listed}")


def _first(items: list[str]) -> list[str]:
    return [*items[:_SHOWN], *([f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else [])]


def _problem(key: str, target: torch.Tensor, value: Any) -> str:
    problem = misfit(key, target, value)
    if not problem and value.dtype.is_complex and not target.dtype.is_complex:
        problem = f"dtype mismatch for {key}: a param of {value.dtype} from checkpoint, the model has {target.dtype}."
    return problem


def has_own_state_methods(model: torch.nn.Module) -> bool:
    """Whether a module has a method or hook of saving or loading that is not torch's or this library's."""
    for module in model.modules():
        known = (module._load_state_dict_pre_hooks, module._state_dict_pre_hooks, module._state_dict_hooks)
        for hook in (hook for hooks in known for hook in hooks.values()):
            function = getattr(hook, "hook", hook)
            if not (getattr(function, "__module__", "") or "").startswith(_OURS):
                return True
        if not _METHODS.isdisjoint(module.__dict__) or any(has_own(type(module), name) for name in _METHODS):
            return True
    return False


def _find_own(kind: Any, name: str) -> bool:
    """Whether a class has a method ``name`` that is not torch's or this library's, perhaps below this library's."""
    found = (vars(base)[name] for base in kind.__mro__ if name in vars(base))
    return not all((getattr(method, "__module__", "") or "").startswith(_OURS) for method in found)


has_own: Callable[[Any, str], bool] = functools.cache(_find_own)
_METHODS = frozenset({"load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict"})
