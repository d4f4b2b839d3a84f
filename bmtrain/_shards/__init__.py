"""Sharded parameters: bounds of shards, gathering, reduction, references to Blocks."""
