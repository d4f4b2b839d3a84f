"""The state of elementwise optimizers: memory layout, saving, loading."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from .._base.arguments import require_keys
from .._base.deprecate import warn_once
from .._base.host_memory import available_bytes
from .._C import zero_in_shares
from .._ranks import context
from .._ranks.agree import largest
from ..parameter import DistributedParameter, gather_flat, shard_of, whole_shape
from ._narrow import stored_shape, values_of
from ._owners import is_here
from ._saved_states import SLICE_BYTES, at_present_bounds, is_of_whole_parameters

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "_param_fp32"

_GROUP = 16  # elements: a cache line of fp32
_SKEW = 133 * 64  # bytes: 8 KiB and a few cache lines
#: Of the free memory of a host, for states of all of its ranks; a file that is written of one may need as much again.
_SHARE = 0.5


class NamesArrays(Protocol):
    """Protocol of formulas: the arrays that one may keep, and those required to load a state."""

    @property
    def arrays(self) -> tuple[str, ...]: ...

    @property
    def needed_arrays(self) -> tuple[str, ...]: ...

    @property
    def is_whole(self) -> bool: ...


class KeepsArrays(Protocol):
    """Protocol of optimizers whose state is arrays with one number for each element of a parameter."""

    state: Any
    param_groups: list[dict[str, Any]]

    def formula_of(self, p: Tensor) -> NamesArrays: ...

    def has_master(self, p: Tensor) -> bool: ...


def allocate(
    shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], device: torch.device
) -> list[list[Tensor]]:
    """Returns an array for each of ``dtypes``, with one zeroed tensor per shape, in one allocation for each dtype.

    The tensors of one array are contiguous, so that a step updates neighbours as one range (in 8 bits they have the
    shape of `stored_shape`). The arrays start at skewed addresses: addresses at a power-of-two distance map to the same
    cache sets, and a pass over such arrays runs at less than half of its speed.

    On the host the thread that will update a part of an array is the first to touch it, so that on a NUMA machine the
    part is allocated near that thread.
    """
    arrays: dict[torch.dtype, list[list[Tensor]]] = {}
    for place, dtype in enumerate(dict.fromkeys(dtypes)):
        stored = [stored_shape(shape, dtype) for shape in shapes]
        sizes = [-(-shape.numel() // _GROUP) * _GROUP for shape in stored]
        offsets = list(accumulate(sizes, initial=0))
        arrays[dtype] = [
            [array.narrow(0, at, s.numel()).view(s) for at, s in zip(offsets, stored, strict=False)]
            for array in _skewed(dtypes.count(dtype), offsets[-1], dtype, place, device)
        ]
    return [arrays[dtype].pop(0) for dtype in dtypes]


def _skewed(count: int, numel: int, dtype: torch.dtype, place: int, device: torch.device) -> list[Tensor]:
    """Returns arrays in an allocation of their own: `torch.save` refuses storages shared by two dtypes."""
    if numel == 0:
        return [torch.empty(0, dtype=dtype, device=device) for _ in range(count)]
    skew = _SKEW // dtype.itemsize
    memory = torch.empty(count * numel + (place + count) * skew, dtype=dtype, device=device)
    arrays = []
    end = 0
    for k in range(count):
        begin = (place + k + 1) * skew + k * numel
        memory[end:begin].zero_()  # it is saved too
        end = begin + numel
        array = memory[begin:end]
        if device.type == "cpu":
            zero_in_shares(array.view(torch.float32) if dtype is torch.uint8 else array)
        else:
            array.zero_()
        arrays.append(array)
    return arrays


def take_changed_value(master: Tensor, p: Tensor) -> None:
    """Copies the parameter's value to the master where it differs from the rounded master."""
    value = p.detach().to(master.device)
    bits = torch.int32 if p.dtype == torch.float32 else torch.int16
    changed = master.to(p.dtype).view(bits) != value.view(bits)
    torch.where(changed, value.float(), master, out=master)


def value_mark(p: Tensor) -> tuple[int, int]:
    """Returns a mark that changes with writes to the parameter: in place, by a load, or through ``data``."""
    return getattr(p, "_unversioned_writes", 0), p._version


def layout_of(optimizer: KeepsArrays) -> dict[str, int] | None:
    """Returns the layout that a file of one rank's state depends on; None if no parameter is distributed."""
    if not any(isinstance(p, DistributedParameter) for p in numbered_parameters(optimizer)):
        return None
    current = context.current()
    if current is None:
        return None
    topology = current.topology
    return {
        "world_size": topology.world_size,
        "tp_size": topology.tp_size,
        "pipe_size": topology.pipe_size,
        **({"ep_size": topology.ep_size} if topology.ep_size > 1 else {}),  # not in older files
        "rank": topology.rank,
        "slice_bytes": SLICE_BYTES,
    }


def check_layout(saved: Mapping[str, Any] | None, layout: Mapping[str, Any] | None) -> None:
    """Raises ValueError for the state of one rank that was saved at another layout; None: it does not depend on one."""
    if saved is None or layout is None or {"slice_bytes": SLICE_BYTES, **saved} == layout:
        return
    raise ValueError(
        f"the state of one rank loads only at the layout it was saved at: saved at {dict(saved)}, "
        f"this rank has {layout}; save with state_dict(gather=True) to change the layout"
    )


def readable_state(optimizer: KeepsArrays, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the state of a state dict with arrays in 8 bits decoded, in the shapes of their parameters."""
    parameters = numbered_parameters(optimizer)
    return {
        number: {
            name: values_of(value, name, parameters[number].shape) if isinstance(value, Tensor) else value
            for name, value in entry.items()
        }
        if isinstance(number, int)
        else entry
        for number, entry in state.items()
    }


def gathered_state(optimizer: KeepsArrays) -> dict[int, dict[str, Any]]:
    """Returns the state of all ranks, by parameter number: full fp32 CPU tensors. Collective.

    They are 1-D, except arrays of formulas of matrices.

    A rank may lack the state of a parameter, as after loading an older one of its own, so the ranks first agree.
    """
    parameters = numbered_parameters(optimizer)
    agreed: list[tuple[int, tuple[str, ...]]] = [
        (step, (*names, MASTER) if optimizer.has_master(p) else names)
        for p, (step, names) in zip(parameters, _agreed_entries(optimizer, parameters), strict=True)
    ]
    numels = [whole_shape(p).numel() for p in parameters]
    warn_of_large_state(
        sum(4 * n * len(names) for n, (step, names) in zip(numels, agreed, strict=True) if step >= 0)
    )
    gathered: dict[int, dict[str, Any]] = {}
    for index, (p, (step, names)) in enumerate(zip(parameters, agreed, strict=True)):
        if step < 0:
            continue
        own = optimizer.state.get(p, {})
        entry: dict[str, Any] = {"step": step}
        for name in names:
            local = own[name] if name in own else torch.zeros(p.numel(), device="cpu")
            values = values_of(local, name, p.shape).detach().reshape(-1)
            flat = gather_flat(p, values.to("cpu", torch.float32, copy=True))
            # As torch's optimizer of matrices keeps its state.
            is_matrix = optimizer.formula_of(p).is_whole and name != MASTER
            entry[name] = flat.view(whole_shape(p)) if is_matrix else flat
        gathered[index] = entry
    return gathered


def warn_of_large_state(num_bytes: int) -> None:
    """Warns on rank 0, once, that a state of this size on every rank may exceed the memory of its host."""
    current = context.current()
    if current is None or current.topology.rank != 0:
        return
    needed, available = num_bytes * current.local_size, available_bytes()
    if needed > _SHARE * available:
        warn_once(
            "optimizer.large_state",
            f"the whole optimizer state takes {num_bytes / 2**30:.3g} GiB on each of the {current.local_size} ranks of "
            f"a host, {needed / 2**30:.3g} GiB together, and {available / 2**30:.3g} GiB are free here: "
            "bmtrain.distributed.checkpoint.save() writes the shards, which load on any number of ranks",
            stacklevel=4,
            category=UserWarning,
        )


def _agreed_entries(
    optimizer: KeepsArrays, parameters: Sequence[Tensor]
) -> list[tuple[int, tuple[str, ...]]]:
    """Returns each parameter's number of steps (-1 if no rank has state), and the arrays that any rank has."""
    states = optimizer.state
    kinds = [optimizer.formula_of(p).arrays for p in parameters]
    longest = max(map(len, kinds), default=0)
    own = [
        [
            state["step"] if state else -1,
            *(name in state for name in names),
            *(False,) * (longest - len(names)),
        ]
        for state, names in zip((states.get(p, {}) for p in parameters), kinds, strict=True)
    ]
    if context.current() is not None:
        own = largest(own, "optimizer state")
    return [
        (step, tuple(name for name, has in zip(names, flags, strict=False) if has))
        for (step, *flags), names in zip(own, kinds, strict=True)
    ]


def read_state(
    optimizer: KeepsArrays, state_dict: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]:
    """Checks a state dict against the optimizer and slices it to this rank's shards. Nothing is changed or copied.

    Returns:
        The new group dicts, and by parameter ``step`` and the tensors found, in the shape of the parameter.

    Raises:
        TypeError: ``state_dict`` is no dict.
        ValueError: it is not the state of an optimizer, or has other groups, another layout, or a tensor of another
            size.
    """
    if isinstance(state_dict, Mapping) and "optimizers" in state_dict:
        raise ValueError(
            "state_dict: expected the state of an optimizer, got an OptimManager's state; give it to "
            "OptimManager.load_state_dict(), or the optimizer one of its ['optimizers']"
        )
    require_keys("state_dict", state_dict, ("state", "param_groups"))
    groups = _read_groups(optimizer, state_dict["param_groups"])
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    whole = is_of_whole_parameters(state_dict, zip(numbers, numbered_parameters(optimizer), strict=True))
    saved_layout = state_dict.get("layout")
    is_aligned = saved_layout is not None and "slice_bytes" in saved_layout
    if not whole:
        check_layout(saved_layout, layout_of(optimizer))
    entries = state_dict["state"]
    if not (whole or is_aligned):
        entries = at_present_bounds(entries, zip(numbers, numbered_parameters(optimizer), strict=True))
    found: dict[Tensor, dict[str, Any]] = {}
    for number, p in zip(numbers, numbered_parameters(optimizer), strict=True):
        entry = entries.get(number)
        read = _read_entry(optimizer, p, number, entry, whole) if entry else None
        if read is not None and is_here(p):  # else the number of its steps would stand still, and be saved
            found[p] = read
    if any(
        entry.get("exp_avg") is not None and entry["exp_avg"].dtype == torch.float16
        for entry in found.values()
    ):
        warnings.warn(
            "the optimizer state holds float16 moments, which are in units of the loss scale of their time: loaded "
            "as if that had been 1 (load through OptimManager to divide by the saved scale)",
            stacklevel=4,
        )
    return groups, found


def _read_groups(optimizer: KeepsArrays, saved: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    own = optimizer.param_groups
    sizes, saved_sizes = [len(g["params"]) for g in own], [len(g["params"]) for g in saved]
    if sizes != saved_sizes:
        raise ValueError(
            f"state dict: expected {len(sizes)} parameter groups of sizes {sizes}, "
            f"got {len(saved_sizes)} of sizes {saved_sizes}"
        )
    for group, given in zip(own, saved, strict=True):
        _refuse_other_formula(optimizer, group["params"], given)
    return [{**g, **s, "params": g["params"]} for g, s in zip(own, saved, strict=True)]


def _refuse_other_formula(optimizer: KeepsArrays, params: Sequence[Tensor], given: Mapping[str, Any]) -> None:
    """Refuses groups of torch's Adam and AdamW whose formula is another one."""
    if given.get("amsgrad"):
        raise ValueError(
            f"state dict: expected a group without amsgrad, which {type(optimizer).__name__} does not have"
        )
    is_decoupled = given.get("decoupled_weight_decay")
    for p in params if is_decoupled is not None and given.get("weight_decay") else ():
        own = getattr(optimizer.formula_of(p), "decoupled", is_decoupled)
        if (p.dtype != torch.float32 if own is None else own) != is_decoupled:
            raise ValueError(
                f"state dict: expected the kind of weight decay of this {type(optimizer).__name__}, got "
                f"{'decoupled' if is_decoupled else 'L2'} weight decay; make it with decoupled={is_decoupled}"
            )


def check_names(optimizer: KeepsArrays, groups: Any, names: Mapping[Any, Sequence[str]]) -> None:
    """Refuses, as :func:`read_state`, a state by its groups and the names of its arrays by parameter number."""
    _read_groups(optimizer, groups)
    for number, arrays in names.items():
        _refuse_other_arrays(optimizer, numbered_parameters(optimizer)[int(number)], number, arrays)


def _refuse_other_arrays(optimizer: KeepsArrays, p: Tensor, number: Any, arrays: Sequence[str]) -> None:
    formula = optimizer.formula_of(p)
    known = [*formula.arrays, MASTER]
    if any(name not in known and name[0] != "_" for name in arrays):  # "_param_fp16": of the first versions
        raise ValueError(
            f"state dict: parameter {number}: expected a state of {type(optimizer).__name__}, with {known}, "
            f"got one of another optimizer, with {arrays}"
        )
    for name in formula.needed_arrays:
        if name not in arrays:
            raise ValueError(f"state dict: parameter {number}: expected {name}, got only {arrays}")


def _read_entry(
    optimizer: KeepsArrays, p: Tensor, number: Any, entry: dict[str, Any], whole: bool
) -> dict[str, Any]:
    formula = optimizer.formula_of(p)
    known = (*formula.arrays, MASTER)
    tensors = [name for name, value in entry.items() if isinstance(value, Tensor) and name != "step"]
    _refuse_other_arrays(optimizer, p, number, tensors)
    # Where the formula does not count steps, torch's own optimizer does not either.
    read: dict[str, Any] = {"step": int(entry["step"] if formula.needed_arrays else entry.get("step", 0))}
    for name in known:
        value = entry.get(name)
        if value is None:
            continue
        if whole and isinstance(p, DistributedParameter):
            full = math.prod(p._tp_original_shape)
            if value.numel() != full:
                raise ValueError(
                    f"state dict: {name} of parameter {number}: expected {full} elements, got {value.numel()}"
                )
            value = shard_of(p, value)
        if value.numel() != p.numel():
            raise ValueError(
                f"state dict: {name} of parameter {number}: expected {p.numel()} elements on this rank, got "
                f"{value.numel()}: saved at another layout, or for another model"
            )
        read[name] = value.detach().reshape(p.shape)
    return read


def numbered_parameters(optimizer: Any) -> list[Tensor]:
    """Returns the parameters in the numbering of state dicts."""
    return [p for group in optimizer.param_groups for p in group["params"]]
