"""Models of Blocks: storage, construction, state dicts, outlines."""
