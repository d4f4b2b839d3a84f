"""Predictions of memory, time and traffic of a training run, before it is launched."""

from .describe import describe_config, describe_module
from .estimator import MemoryEstimate, Plan, TimeEstimate, estimate, model_state_bytes
from .machine import MACHINES, Machine
from .model import BlockDescription, FlatBuffer, ModelDescription, OutsideParameter, gpt2, transformer
from .policy import TrainingPolicy
from .search import choose_policy, remedies

__all__ = [
    "MACHINES",
    "BlockDescription",
    "FlatBuffer",
    "Machine",
    "MemoryEstimate",
    "ModelDescription",
    "OutsideParameter",
    "Plan",
    "TimeEstimate",
    "TrainingPolicy",
    "choose_policy",
    "describe_config",
    "describe_module",
    "estimate",
    "gpt2",
    "model_state_bytes",
    "remedies",
    "transformer",
]
