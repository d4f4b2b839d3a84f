"""Formats of files: torch archives, safetensors, shared state."""
