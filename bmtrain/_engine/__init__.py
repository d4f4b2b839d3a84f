"""Running Blocks: gathering ahead, recomputation, reductions, pipelines, reads outside Blocks."""
