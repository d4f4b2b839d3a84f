"""Rank, world size, and the mapping of what `init_distributed` established."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from ._ranks import context as _context
from ._ranks.context import Context, context

__all__ = ["Config", "config", "context", "num_losses", "rank", "world_size"]


def rank() -> int:
    """The number of this process in the world; 0 before `init_distributed`.

    Example:
        >>> rank()
        0
    """
    current = _context.current()
    return 0 if current is None else current.topology.rank


def world_size() -> int:
    """The number of processes in the world; 1 before `init_distributed`.

    Example:
        >>> world_size()
        1
    """
    current = _context.current()
    return 1 if current is None else current.topology.world_size


def num_losses() -> int:
    """The number of losses that the gradients sum: ranks divided by tensor-parallel size, or virtual shards, of each
    of which sequence ranks have a part."""
    current = _context.current()
    if current is None:
        return 1
    if current.engine.is_summing_virtual_shards:
        return current.virtual_shards * current.topology.sp_size
    return current.topology.world_size // current.topology.tp_size


# Keys that exist before `init_distributed`, with their values then.
_BEFORE_INIT: dict[str, Any] = {"initialized": False, "rank": 0, "local_rank": 0, "world_size": 1}

# Keys of the library that a script may write, with their defaults.
_SETTINGS: dict[str, Any] = {"save_param_to_cpu": True, "loss_scale_factor": 2.0, "loss_scale_steps": 1024}

# State of the last save in the background, written by the library (`Config.set_save_state`).
_SAVE_STATE: dict[str, Any] = {"finish_save": True, "save_thread": None}

# The other keys of the library, read from the context.
_VIEWS: dict[str, Callable[[Context], Any]] = {
    "initialized": lambda c: True,
    "rank": lambda c: c.topology.rank,
    "local_rank": lambda c: c.local_rank,
    "world_size": lambda c: c.topology.world_size,
    "local_size": lambda c: c.local_size,
    "device": lambda c: c.device,
    "comm": lambda c: c.world.comm,
    "zero_comm": lambda c: c.world.comm,
    "zero_rank": lambda c: c.topology.zero_id,
    "zero_size": lambda c: c.topology.world_size // c.topology.pipe_size,
    "pipe_size": lambda c: c.topology.pipe_size,
    "pipe_enabled": lambda c: c.pipe_enabled,
    "micros": lambda c: c.micros,
    "pipe_comm": lambda c: c.groups["pipe"].comm,
    "pp_zero_comm": lambda c: c.groups["pp_zero"].comm,
    "tp_size": lambda c: c.topology.tp_size,
    "tp_rank": lambda c: c.topology.tp_id,
    "tp_comm": lambda c: c.groups["tp"].comm,
    "tp_zero_rank": lambda c: c.topology.tp_zero_id,
    "tp_zero_size": lambda c: c.groups["tp_zero"].size,
    "tp_zero_comm": lambda c: c.groups["tp_zero"].comm,
    "ep_size": lambda c: c.topology.ep_size,
    "ep_rank": lambda c: c.topology.ep_id,
    "ep_comm": lambda c: c.groups["ep"].comm,
    "pp_tp_zero_comm": lambda c: c.groups["pp_tp_zero"].comm,
    "sp_size": lambda c: c.topology.sp_size,
    "sp_rank": lambda c: c.topology.sp_id,
    "sp_comm": lambda c: c.groups["sp"].comm,
    "dp_size": lambda c: c.topology.dp_size,
    "dp_rank": lambda c: c.topology.dp_id,
    "topology": lambda c: c.topology,
    "calc_stream": lambda c: c.streams.calc_stream,
    "load_stream": lambda c: c.streams.load_stream,
    "barrier_stream": lambda c: c.streams.barrier_stream,
    "tp_comm_stream": lambda c: c.streams.tp_comm_stream,
    "pp_comm_stream": lambda c: c.streams.pp_comm_stream,
    "load_event": lambda c: c.streams.load_event,
    "zero_level": lambda c: c.zero_level,
}

_MISSING = object()


class Config(MutableMapping[str, Any]):
    """The mapping `bmtrain.config`: the library's values, read-only, and whatever a script adds.

    The library's keys read through to the context of the process; writing or deleting one is a ValueError,
    except for the settings ``save_param_to_cpu``, ``loss_scale_factor`` and ``loss_scale_steps``. Any other
    key belongs to the script: it is stored as given and never read by the library.

    Example:
        >>> from bmtrain.global_var import config
        >>> config["my_key"] = [1, 2]
        >>> config["my_key"], "rank" in config
        ([1, 2], True)
        >>> del config["my_key"]
        >>> config["rank"] = 3
        Traceback (most recent call last):
        ...
        ValueError: config['rank'] belongs to bmtrain and cannot be written (got 3): choose another key
    """

    def __init__(self) -> None:
        self._settings = dict(_SETTINGS)
        self._save_state = dict(_SAVE_STATE)
        self._user: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key in self._user:
            return self._user[key]
        if key in self._settings:
            return self._settings[key]
        current = _context.current()
        if current is None:
            if key in _BEFORE_INIT:
                return _BEFORE_INIT[key]
            if _is_reserved(key):
                raise KeyError(f"{key} (bmtrain is not initialized: call bmtrain.init_distributed() first)")
        elif key in _VIEWS:
            return _VIEWS[key](current)
        elif key in self._save_state:
            return self._save_state[key]
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self._settings:
            self._settings[key] = value
        elif _is_reserved(key):
            raise ValueError(
                f"config[{key!r}] belongs to bmtrain and cannot be written (got {value!r}): "
                "choose another key"
            )
        else:
            self._user[key] = value

    def __delitem__(self, key: str) -> None:
        if _is_reserved(key):
            raise ValueError(f"config[{key!r}] belongs to bmtrain and cannot be deleted")
        del self._user[key]

    def __iter__(self) -> Iterator[str]:
        if _context.current() is None:
            yield from _BEFORE_INIT
        else:
            yield from _VIEWS
            yield from self._save_state
        yield from self._settings
        yield from self._user

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        try:
            self[key]  # type: ignore[index]
        except KeyError:
            return False
        return True

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        """Removes a key of the script and returns its value; a key of the library is a ValueError."""
        if _is_reserved(key):
            raise ValueError(f"config[{key!r}] belongs to bmtrain and cannot be deleted")
        return self._user.pop(key) if default is _MISSING else self._user.pop(key, default)

    def popitem(self) -> tuple[str, Any]:
        """Removes the key that the script added last; KeyError if it added none."""
        return self._user.popitem()

    def clear(self) -> None:
        """Removes every key that the script added."""
        self._user.clear()

    def copy(self) -> dict[str, Any]:
        """A plain dict of the present values."""
        return dict(self)

    def set_save_state(self, finish_save: bool, save_thread: Any) -> None:
        """Shows the state of a save in the background as ``finish_save`` and ``save_thread``."""
        self._save_state.update(finish_save=finish_save, save_thread=save_thread)

    def __repr__(self) -> str:
        return f"Config({dict(self)!r})"


def _is_reserved(key: object) -> bool:
    return key in _VIEWS or key in _SETTINGS or key in _SAVE_STATE


config = Config()
