"""Utilities that do not depend on ranks: arguments, files, tensors, trees, the terminal."""
