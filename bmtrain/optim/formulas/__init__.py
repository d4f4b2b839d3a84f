"""Formulas of optimizers, one file each: state, options, numbers of a step, kernel. None knows where it is computed."""

from __future__ import annotations

from .adam import Adam
from .formula import Formula, Part
from .lion import Lion
from .muon import Muon
from .sgd import SGD

__all__ = ["SGD", "Adam", "Formula", "Lion", "Muon", "Part"]
