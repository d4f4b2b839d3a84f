"""The models of the example."""

from .gpt import GPT

__all__ = ["GPT"]
