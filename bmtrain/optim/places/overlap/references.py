"""Reference counts of the memory that an update reads and writes.

A tensor that a user made from a parameter, a gradient or a state before the step (``p.data``, ``state["exp_avg"]``)
accesses that memory without the parameter object, so no access could wait. Here the references are counted: if there
are more than the library's own, an unfinished update could be seen, and it must not run in the background.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...._base.tensors import gradient_of, storage_references
from ...._engine.block_state import BlockState
from ..._arrays import MASTER
from ..._updates import Update


class ArenaReferences:
    """Numbers of tensors that refer to each allocation of an optimizer's state."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def note(
        self, parameters: Sequence[Tensor], names: Sequence[str], states: dict[Tensor, dict[str, Any]]
    ) -> None:
        """Records the current counts of new state entries, which have no outside references yet."""
        for p in parameters:
            for name in names:
                self._counts[_address(states[p][name])] = _num_references(states[p][name])

    def are_as_noted(self, param: Tensor, state: dict[str, Any]) -> bool:
        """Whether no other tensor of that memory has been made since."""
        return all(
            self._counts.get(_address(state[name])) == _num_references(state[name])
            for name in _allocated(state, param)
        )


def _allocated(state: dict[str, Any], param: Tensor) -> list[str]:
    """Returns the names of the tensors in a state except the parameter itself."""
    no_memory = ("step", MASTER) if _shares_memory(state, param) else ("step",)
    return [name for name in state if name not in no_memory]


def is_unwatched(
    updates: Sequence[Update],
    runtime: BlockState | None,
    states: dict[Tensor, dict[str, Any]],
    arenas: ArenaReferences,
    sent: Sequence[int] = (),
) -> bool:
    """Whether only the library refers to parameters, gradients and states of ``updates``.

    Args:
        updates: updates of one block, or of parameters outside blocks; each holds one reference to its state.
        runtime: runtime of the block.
        states: states of the optimizer, by parameter.
        arenas: reference counts of these states.
        sent: the memory that copies of the gradients to the host refer to, once for each reference.
    """
    expected = Counter(sent)  # references, by the address of the storage
    tensors: dict[int, Tensor] = {}
    if runtime is not None:
        for group in runtime.buffers:
            shard, gradient = group.shard, group.gradient_shard
            to_shard, to_gradient = group.num_references()
            expected[_address(shard)] += to_shard
            tensors[_address(shard)] = shard
            if gradient is not None:
                expected[_address(gradient)] += to_gradient
                tensors[_address(gradient)] = gradient
            expected[_address(shard)] += sum(
                _shares_memory(states[p], p) for p in group.parameters if p in states
            )
        expected.update(_sent(runtime))
    for update in updates:  # not unpacked: that would be one more reference to its state
        param, grad = update.param, update.grad
        if _address(param) not in tensors:
            tensors[_address(param)] = param
            expected[_address(param)] = 1 + _shares_memory(states[param], param)
        if _address(grad) not in tensors:
            tensors[_address(grad)] = grad
            expected[_address(grad)] = 1  # of the parameter
        expected[_address(grad)] += 1  # the update's own
        if not (_are_unheld(param, states) and arenas.are_as_noted(param, states[param])):
            return False
    return all(expected[address] == _num_references(tensor) for address, tensor in tensors.items())


def gradients_are_unheld(parameters: Sequence[Tensor], runtime: BlockState) -> bool:
    """Whether only the library refers to the gradients of some of a block's parameters."""
    expected: Counter[int] = Counter(_sent(runtime))
    tensors: dict[int, Tensor] = {}
    for group in runtime.buffers:
        gradient = group.gradient_shard
        if gradient is not None:
            expected[_address(gradient)] += group.num_references()[1]
            tensors[_address(gradient)] = gradient
    base = _baseline().gradient
    for p in parameters:
        if sys.getrefcount(gradient_of(p)) != base:
            return False
        gradient = gradient_of(p)
        assert gradient is not None
        if _address(gradient) not in tensors:
            tensors[_address(gradient)] = gradient
            expected[_address(gradient)] += 1
    return all(expected[address] == _num_references(tensor) for address, tensor in tensors.items())


def _sent(runtime: BlockState) -> list[int]:
    """Returns the memory that copies of the block's gradients to the host refer to, once for each reference."""
    copies = {id(p._sent): p._sent for group in runtime.buffers for p in _parameters(group)}
    return [address for copy in copies.values() if copy is not None for address in copy.storages]


def _parameters(group: Any) -> Sequence[Any]:
    parameters: Sequence[Any] = group.parameters
    return parameters


def _shares_memory(state: dict[str, Any], param: Tensor) -> bool:
    return MASTER in state and _address(state[MASTER]) == _address(param)


def _are_unheld(param: Tensor, states: dict[Tensor, dict[str, Any]]) -> bool:
    """Whether the objects themselves (gradient, state dict, its tensors) have no other references."""
    base = _baseline()
    return (
        sys.getrefcount(gradient_of(param)) == base.gradient
        and _item_references(states, param) == base.item + 1  # the update
        and all(
            _item_references(states[param], name) == base.item for name in states[param] if name != "step"
        )
    )


def _item_references(holder: dict[Any, Any], key: Any) -> int:
    return sys.getrefcount(holder[key])


def _address(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _num_references(tensor: Tensor) -> int:
    """Returns the number of references to the storage from tensors and Python, without this function's own."""
    return storage_references(tensor) - _baseline().storage


class _Baseline:
    """Reference counts without outside references, which depend on the versions of Python and torch."""

    def __init__(self) -> None:
        sample = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        sample.grad = torch.zeros(1, device="cpu")
        self.gradient = sys.getrefcount(sample.grad)
        self.gradient = sys.getrefcount(sample.grad)  # from the second access on, the object is kept
        self.item = _item_references({"item": torch.zeros(1, device="cpu")}, "item")
        self.storage = storage_references(torch.zeros(1, device="cpu")) - 1


@cache
def _baseline() -> _Baseline:
    return _Baseline()
