"""Arguments that must be what they were when the forward runs again."""

from __future__ import annotations

import torch

__all__ = ["Unchanged"]


class Unchanged:
    """Tensors that nobody may write to before a block's backward.

    Args:
        label: of the block, for errors.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._versions: list[tuple[torch.Tensor, int]] = []

    def note(self, tensor: torch.Tensor) -> None:
        """From now on ``tensor`` is to stay what it is. (Those of inference mode cannot tell.)"""
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))

    def drop(self) -> None:
        """There will be no backward any more."""
        self._versions = []

    def check(self) -> None:
        """Raises RuntimeError if one was written to."""
        for number, (tensor, version) in enumerate(self._versions):
            if tensor._version != version:
                raise RuntimeError(
                    f"{self._label}: tensor argument {number} (shape {tuple(tensor.shape)}) was modified in "
                    f"place after the block's forward started (version {tensor._version}, expected {version}), "
                    "so its forward cannot be run again; pass a copy"
                )
