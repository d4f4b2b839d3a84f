"""Kinds of arguments, and what is wrong for each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["WRONG", "Calls"]

# Function -> what calls it, and its arguments in order: their kind, and a value that is right.
Calls = dict[str, tuple[Callable[..., Any], dict[str, tuple[str, Any]]]]

# What is wrong for a kind of argument: a name, and the value made from the valid one.
WRONG: dict[str, dict[str, Callable[[Any], Any]]] = {
    "tensor": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "a number": lambda _: 1.0,
        "sparse": lambda x: x.to_sparse(),
        "on meta": lambda x: x.to("meta"),
    },
    "buffer": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "not contiguous": lambda x: torch.ones(2 * x.numel())[::2],
        "another size": lambda x: torch.ones(x.numel() + 1),
        "another dtype": lambda x: x.to(torch.float16),
        "on meta": lambda x: x.to("meta"),
    },
    "op": {"None": lambda _: None, "unknown": lambda _: "median", "a number": lambda _: 1},
    "rank": {
        "None": lambda _: None,
        "a string": lambda _: "0",
        "a float": lambda _: 0.5,
        "negative": lambda _: -1,
        "too large": lambda _: 99,
    },
    "a tensor": {"None": lambda _: None, "a list": lambda _: [1.0], "a number": lambda _: 1.0},
    "number": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "a list": lambda _: [1],
        "negative": lambda _: -1.0,
        "NaN": lambda _: math.nan,
    },
    "optional number": {"a string": lambda _: "1", "a list": lambda _: [1], "negative": lambda _: -1.0},
    "scale": {"None": lambda _: None, "a string": lambda _: "1", "a list": lambda _: [1]},
    "count": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "a fraction": lambda _: 1.5,
        "negative": lambda _: -1,
    },
    "integer": {"None": lambda _: None, "a string": lambda _: "1", "a fraction": lambda _: 1.5},
    "betas": {
        "None": lambda _: None,
        "a number": lambda _: 0.9,
        "one": lambda _: (0.9,),
        "too large": lambda _: (0.9, 1.0),
        "strings": lambda _: ("a", "b"),
    },
    "norm": {"None": lambda _: None, "unknown": lambda _: [2], "zero": lambda _: 0, "negative": lambda _: -2},
    "level": {"None": lambda _: None, "unknown": lambda _: 4, "a string": lambda _: "3"},
    "unknown level": {"unknown": lambda _: 4, "a string": lambda _: "3"},
    "mode": {"None": lambda _: None, "unknown": lambda _: "PART"},
    "modules": {"None": lambda _: None, "a name": lambda _: "model", "a list of names": lambda _: ["model"]},
    "some parameters": {
        "None": lambda _: None,
        "a number": lambda _: 1.0,
        "with their names": lambda _: torch.nn.Linear(2, 2).named_parameters(),
    },
    "callable": {"a name": lambda _: "zeros_", "a tensor": lambda x: torch.ones(2)},
    "module": {"None": lambda _: None, "a tensor": lambda _: torch.ones(2), "a function": lambda _: len},
    "optional module": {"a tensor": lambda _: torch.ones(2), "a function": lambda _: len},
    "optional positive": {"a string": lambda _: "1", "a fraction": lambda _: 1.5, "zero": lambda _: 0},
    "sequence": {"None": lambda _: None, "a number": lambda _: 3, "too few": lambda _: [1.0]},
    "leaf": {
        "None": lambda _: None,
        "integers": lambda x: x.long(),
    },
    "comm": {"a string": lambda _: "world", "a number": lambda _: 3},
    "path": {"None": lambda _: None, "a number": lambda _: 3, "a list": lambda _: ["a"]},
    "step number": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "a fraction": lambda _: 1.5,
        "negative": lambda _: -1,
    },
    "optimizers": {
        "a string": lambda _: "adam",
        "a number": lambda _: 3,
        "a tensor": lambda _: torch.ones(2),
    },
    "schedules": {"None": lambda _: None, "a number": lambda _: 3, "numbers": lambda _: [1]},
    "plain values": {"a function": lambda _: len, "a set": lambda _: {1}, "within": lambda _: {"a": [len]}},
    "optimizer": {
        "None": lambda _: None,
        "a string": lambda _: "adam",
        "a module": lambda _: torch.nn.ReLU(),
    },
    "schedule": {"a string": lambda _: "linear", "a number": lambda _: 3},
    "rate": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "NaN": lambda _: math.nan,
        "negative": lambda _: -1.0,
    },
    "share": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "NaN": lambda _: math.nan,
        "negative": lambda _: -0.1,
        "above 1": lambda _: 1.1,
    },
    "count or zero": {  # of iterations; scripts compute fractions of them, and give fractions
        "None": lambda _: None,
        "a string": lambda _: "1",
        "negative": lambda _: -1,
        "NaN": lambda _: math.nan,
    },
    "optional end": {"a string": lambda _: "1", "NaN": lambda _: math.nan},
    "end": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "NaN": lambda _: math.nan,
    },
    "optional count": {"a string": lambda _: "1", "NaN": lambda _: math.nan, "negative": lambda _: -1},
    "state": {"None": lambda _: None, "a list": lambda _: [1], "empty": lambda _: {}},
    "size": {
        "None": lambda _: None,
        "a string": lambda _: "4",
        "a fraction": lambda _: 4.5,
        "negative": lambda _: -4,
    },
    "floating dtype": {
        "a string": lambda _: "fp16",
        "integers": lambda _: torch.int32,
        "a number": lambda _: 16,
    },
    "finite number": {
        "None": lambda _: None,
        "a string": lambda _: "0",
        "NaN": lambda _: math.nan,
        "infinite": lambda _: math.inf,
    },
    "features": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "integers": lambda x: x.long(),
        "another size": lambda x: x.new_ones(*x.shape[:-1], x.shape[-1] + 1),
        "another dtype": lambda x: x.double(),
    },
    "ids": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "floats": lambda x: x.float(),
        "negative": lambda x: x - 100,
        "too large": lambda x: x + 10_000,
    },
    "logits": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "integers": lambda x: x.long(),
        "one number": lambda _: torch.tensor(1.0),
    },
    "class indices": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "floats": lambda x: x.float(),
        "another shape": lambda x: torch.zeros(x.numel() + 1, dtype=torch.int64),
        "too large": lambda x: x + 100,
    },
    "class weights": {
        "a list": lambda x: x.tolist(),
        "integers": lambda x: x.long(),
        "two dimensions": lambda x: x[None],
    },
    "matrix": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "another size": lambda x: torch.ones(x.shape[0], x.shape[1] + 1),
        "another dtype": lambda x: x.double(),
        "one dimension": lambda x: x.flatten(),
    },
    "reduction": {"None": lambda _: None, "unknown": lambda _: "median"},
    "parameters": {"None": lambda _: None, "a number": lambda _: 1},  # torch looks at what is in them
    "loss": {
        "None": lambda _: None,
        "a number": lambda _: 1.0,
        "several numbers": lambda _: torch.ones(2, requires_grad=True),
        "without gradient": lambda _: torch.tensor(1.0),
    },
    "parameter groups": {
        "None": lambda _: None,
        "a tensor": lambda _: torch.ones(2),
        "numbers": lambda _: [1],
        "without params": lambda _: [{"lr": 1.0}],
    },
    # Of the core. What has another layout, or is None, torch's dispatcher keeps from it, without naming the argument.
    "memory": {
        "a list": lambda x: x.tolist(),
        "not contiguous": lambda x: torch.ones(2 * x.numel(), dtype=x.dtype)[::2],
        "another size": lambda x: torch.ones(x.numel() + 1, dtype=x.dtype),
        "integers": lambda x: x.long(),
    },
    "memories": {
        "None": lambda _: None,
        "numbers": lambda _: [1.0],
        "not contiguous": lambda x: [torch.ones(2 * x[0].numel(), dtype=x[0].dtype)[::2]],
        "another size": lambda x: [torch.ones(x[0].numel() + 1, dtype=x[0].dtype)],
        "integers": lambda x: [x[0].long()],
        "one more": lambda x: [*x, *x],
    },
    "values": {"integers": lambda x: [x[0].long()]},
    "one factor": {
        "None": lambda _: None,
        "a list": lambda _: [1.0],
        "two numbers": lambda _: torch.ones(2),
    },
    "steps": {
        "None": lambda _: None,
        "fractions": lambda _: [1.5],
        "one more": lambda _: [1, 1],
        "zero": lambda _: [0],
    },
    "a float": {"None": lambda _: None, "a string": lambda _: "1"},
    "power": {
        "None": lambda _: None,
        "a string": lambda _: "2",
        "negative": lambda _: -1.0,
        "NaN": lambda _: math.nan,
    },
    "sizes": {
        "None": lambda _: None,
        "a number": lambda _: 3,
        "negative": lambda _: [-1],
        "too large": lambda _: [2**62, 2**62],
    },
    "positive": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "zero": lambda _: 0,
        "negative": lambda _: -1,
    },
    "index": {
        "None": lambda _: None,
        "a string": lambda _: "0",
        "negative": lambda _: -1,
        "too large": lambda _: 99,
    },
    "seconds": {
        "None": lambda _: None,
        "a string": lambda _: "1",
        "zero": lambda _: 0.0,
        "NaN": lambda _: math.nan,
        "infinite": lambda _: math.inf,
    },
    "isa": {"None": lambda _: None, "a number": lambda _: 2, "unknown": lambda _: "sse9"},
    "sources": {
        "numbers": lambda _: [1.0],
        "not contiguous": lambda x: [torch.ones(2 * x[0].numel(), dtype=x[0].dtype)[::2]],
        "another size": lambda x: [torch.ones(x[0].numel() + 1, dtype=x[0].dtype)],
        "integers": lambda x: [x[0].long()],
    },
    "tensor data": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "another dtype": lambda x: x.half(),
    },
    "flags": {"None": lambda _: None, "fractions": lambda _: [0.5], "one more": lambda _: [0, 0]},
    "truths": {"None": lambda _: None, "one more": lambda _: [False, False]},
    "text": {"None": lambda _: None, "a number": lambda _: 3},
    "a comm": {"None": lambda _: None, "a string": lambda _: "world"},
    "a pool": {"None": lambda _: None, "a number": lambda _: 3},
    "a dtype": {"None": lambda _: None, "a string": lambda _: "float", "another": lambda _: torch.float64},
    "optional dtype": {"a string": lambda _: "float", "a number": lambda _: 16},
    "a device": {
        "None": lambda _: None,
        "a string": lambda _: "nowhere",
        "a tensor": lambda _: torch.ones(2),
    },
    "stored parameters": {
        "None": lambda _: None,
        "numbers": lambda _: [1.0],
        "another dtype": lambda x: [x[0].detach().double()],
    },
    "names": {"None": lambda _: None, "numbers": lambda _: [1], "one more": lambda x: [*x, *x]},
    "shapes": {
        "None": lambda _: None,
        "one shape": lambda x: x[0],
        "one more": lambda x: [*x, *x],
        "negative": lambda _: [[-3, 2]],
        "too large": lambda _: [[2**62, 2**62]],
    },
    "a dict": {"None": lambda _: None, "a list": lambda _: [1]},
    "flag": {"a string": lambda _: "yes", "a list": lambda _: [1]},
    "a tree": {"a number": lambda _: 3, "a tensor": lambda _: torch.ones(2)},
    "memory of any dtype": {
        "None": lambda _: None,
        "a list": lambda x: x.tolist(),
        "another size": lambda x: torch.ones(x.numel() + 1),
    },
    "some tensors": {"None": lambda _: None, "numbers": lambda _: [1.0]},
    "optional index": {"a string": lambda _: "0", "a fraction": lambda _: 0.5},
    "lines": {
        "None": lambda _: None,
        "a line": lambda x: x[0],
        "numbers": lambda _: [1],
        "without keys": lambda _: [{"name": "w"}],
    },
}
