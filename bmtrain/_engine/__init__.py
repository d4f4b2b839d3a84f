"""Running Blocks: gathering ahead, recomputation, reductions, pipelines, what is read outside Blocks."""
