"""Optimizers over shards, loss scaling and gradient clipping."""

from __future__ import annotations

from . import clip_grad, optim_manager
from ._of_one import gather_state, load_state
from .adam import AdamOptimizer
from .adam_offload import AdamOffloadOptimizer
from .clip_grad import clip_grad_norm
from .lion import LionOffloadOptimizer, LionOptimizer
from .muon import MuonOffloadOptimizer, MuonOptimizer
from .norms import whole_norms
from .optim_manager import OptimManager
from .sgd import SGDOffloadOptimizer, SGDOptimizer
from .whole import whole_matrix

__all__ = [
    "AdamOffloadOptimizer",
    "AdamOptimizer",
    "LionOffloadOptimizer",
    "LionOptimizer",
    "MuonOffloadOptimizer",
    "MuonOptimizer",
    "OptimManager",
    "SGDOffloadOptimizer",
    "SGDOptimizer",
    "clip_grad",
    "clip_grad_norm",
    "gather_state",
    "load_state",
    "optim_manager",
    "whole_matrix",
    "whole_norms",
]
