"""A model with all that a file can hold, saved and loaded by ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import bmtrain as bmt


def modules_for(sharded: bool) -> tuple[Any, Any, Any]:
    """The base class of modules, the class of parameters, and what to wrap a layer in."""
    if sharded:
        return bmt.DistributedModule, bmt.DistributedParameter, bmt.Block
    return torch.nn.Module, torch.nn.Parameter, lambda layer: layer


def make_model(sharded: bool, seed: int = 0) -> torch.nn.Module:
    """Parameters of four dtypes, tied, empty and 0-dim ones, buffers that are saved and not, blocks, plain modules."""
    base, parameter, block = modules_for(sharded)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    class Layer(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.weight = parameter(random(5, 3))
            self.half_precise = parameter(random(7, dtype=torch.float16))
            self.brain = parameter(random(2, 2, dtype=torch.bfloat16))
            self.register_buffer("steps", random(4).mul(100).long())
            self.register_buffer("scratch", torch.zeros(3), persistent=False)

    class Odd(base):  # type: ignore[misc, valid-type]
        _version = 3

        def __init__(self) -> None:
            super().__init__()
            self.scalar = parameter(random())
            self.one = parameter(random(1, 1))
            self.empty = parameter(random(0, 4))
            self.counts = parameter(random(6).mul(50).to(torch.uint8), requires_grad=False)
            self.register_parameter("nothing", None)
            self.register_buffer("mask", random(5) > 0)
            self.register_buffer("byte_values", random(5).mul(50).to(torch.uint8))
            self.register_buffer("zero_dim", random().double())
            self.register_buffer("no_elements", torch.zeros(0))

    class Model(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = parameter(random(11, 4))
            self.layers = torch.nn.ModuleList([block(Layer()) for _ in range(3)])
            self.odd = Odd()
            self.plain = torch.nn.Linear(3, 2)
            self.norm = torch.nn.BatchNorm1d(2)
            mean: Any = self.norm.running_mean
            with torch.no_grad():
                for tensor in (self.plain.weight, self.plain.bias, self.norm.weight, mean):
                    tensor.copy_(random(*tensor.shape))
            self.head = base()
            self.head.tied = self._parameters["embedding"]

    return Model()


def assert_same_state(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same keys in the same order, and tensors of the same dtypes, shapes and bits."""
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert actual[key].shape == value.shape, key
        assert torch.equal(actual[key], value), key


def save_model(path: str, seed: int = 0, non_blocking: bool = False) -> None:
    handle = bmt.save(make_model(True, seed), path, non_blocking)
    if handle is not None:
        handle.wait()
        bmt.synchronize()


def load_model(path: str) -> None:
    model = make_model(True, seed=1)
    result = bmt.load(model, path)
    assert tuple(result) == ([], [])
    assert_same_state(model.state_dict(), make_model(False, seed=0).state_dict())
