"""Detection of writes to arguments before their forward is recomputed."""

from __future__ import annotations

import torch

__all__ = ["Unchanged"]


class Unchanged:
    """Tensors that must not be written to before a block's backward.

    Args:
        label: name of the block, for errors.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._versions: list[tuple[torch.Tensor, int]] = []

    def note(self, tensor: torch.Tensor) -> None:
        """Records the version of ``tensor`` for `check()`; inference tensors have none and are skipped."""
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))

    def drop(self) -> None:
        """Drops all tensors, when no backward follows."""
        self._versions = []

    def check(self) -> None:
        """Raises RuntimeError if one of the tensors was written to."""
        for number, (tensor, version) in enumerate(self._versions):
            if tensor._version != version:
                raise RuntimeError(
                    f"{self._label}: tensor argument {number} (shape {tuple(tensor.shape)}) was modified in "
                    f"place after the block's forward started (version {tensor._version}, expected {version}), "
                    "so its forward cannot be run again; pass a copy"
                )
