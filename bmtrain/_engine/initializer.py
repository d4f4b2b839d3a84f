"""Alias for pickles of models made before this module was moved."""

from .._shards.initializer import ParameterInitializer

__all__ = ["ParameterInitializer"]
