"""A proxy module: attribute access and traversal act on the module that it replaces."""

from __future__ import annotations

from typing import Any

import torch

from .tensors import refuse_scripting

# The dictionaries shared with the inner module, so that both have the same parameters, buffers and hooks.
SHARED = (
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}


class StandIn(torch.nn.Module):
    """A proxy of the module ``_module``: equal in attributes and traversal, but called differently."""

    _module: torch.nn.Module
    __prepare_scriptable__ = refuse_scripting

    def _stand_for(self, module: torch.nn.Module) -> None:
        own = self.__dict__
        for name in SHARED:
            if name in module.__dict__:
                own[name] = module.__dict__[name]
        own["training"] = module.training
        own["_module"] = module

    def _replaced_forward(self, function: Any) -> Any:
        """The forward to install for ``self.forward = function``."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_module")
        if module is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_module")
        if module is None:
            super().__setattr__(name, value)
        elif name == "forward":
            self.__dict__["forward"] = self._replaced_forward(value)
        elif name == "_module":
            raise AttributeError(
                "_module: a Block keeps the module that it was built around; build a new Block instead"
            )
        elif isinstance(value, (torch.nn.Module, torch.nn.Parameter)):
            setattr(module, name, value)  # registered in the dictionaries that both share
        else:
            is_own = name == "training" or name.startswith("_") or hasattr(type(self), name)
            if is_set_inside := not is_own or _has(module, name):
                setattr(module, name, value)
            if name in self.__dict__ or not is_set_inside:  # else reads get what the forward makes of it
                self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self._module, name)

    # For a Sequential or another container; looked up on the class, which __getattr__ does not see.

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        inner: Any = self._module
        return len(inner)

    def __getitem__(self, key: Any) -> Any:
        inner: Any = self._module
        return inner[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        inner: Any = self._module
        inner[key] = value

    def __delitem__(self, key: Any) -> None:
        inner: Any = self._module
        del inner[key]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._module)})

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # libraries look for their layer class with isinstance()
        module = self.__dict__.get("_module")
        return type(self) if module is None else type(module)

    def __repr__(self) -> str:
        return repr(self._module)

    def train(self, mode: bool = True) -> Any:
        self._module.train(mode)
        self.__dict__["training"] = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._module._save_to_state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._module._load_from_state_dict(*args, **kwargs)


def _has(module: torch.nn.Module, name: str) -> bool:
    """As hasattr(), but reads no parameter, which could gather it. False for names of torch.nn.Module itself."""
    own = module.__dict__
    is_set = any(name in place for place in (own, own["_parameters"], own["_buffers"], own["_modules"]))
    return name not in _OF_TORCH and (is_set or (not name.startswith("_") and hasattr(type(module), name)))
