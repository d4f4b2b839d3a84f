"""The version, read here by the package and by its build."""

__all__ = ["__version__"]

__version__ = "2.0.0.dev0"
