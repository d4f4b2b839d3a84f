"""The layers of a GPT-2, each a ``bmtrain.DistributedModule`` whose parameters live as shards."""

from .attention import Attention
from .embedding import Embedding
from .feedforward import FeedForward, Mixture
from .layernorm import LayerNorm
from .linear import Linear

__all__ = ["Attention", "Embedding", "FeedForward", "LayerNorm", "Linear", "Mixture"]
