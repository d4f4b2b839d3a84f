"""Layers with sharded parameters, among them those divided over tensor-parallel ranks."""

from ..layer import DistributedModule
from ..parameter import DistributedParameter
from . import functional, sequence
from .column_parallel_linear import ColumnParallelLinear
from .linear import Linear, OpLinear
from .moe import Experts, MoE
from .parallel_embedding import Projection, VPEmbedding, VPProjection
from .parallel_linear_func import OpParallelLinear, ReduceType
from .row_parallel_linear import RowParallelLinear
from .sequence import shard_sequence

__all__ = [
    "ColumnParallelLinear",
    "DistributedModule",
    "DistributedParameter",
    "Experts",
    "Linear",
    "MoE",
    "OpLinear",
    "OpParallelLinear",
    "Projection",
    "ReduceType",
    "RowParallelLinear",
    "VPEmbedding",
    "VPProjection",
    "functional",
    "sequence",
    "shard_sequence",
]
