"""Predictions of memory, time and traffic of a training run, before it is launched."""

from .decoder import describe_config, gpt2, transformer
from .describe import describe_module
from .estimates import MemoryEstimate, Plan, TimeEstimate
from .estimator import estimate, model_state_bytes
from .machine import MACHINES, Machine
from .model import BlockDescription, FlatBuffer, ModelDescription, OutsideParameter
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
