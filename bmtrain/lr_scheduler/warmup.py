"""The base of all schedules: warm up for some iterations, then decay."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .._base.arguments import require_between, require_keys, require_number
from .._base.deprecate import warn_once

__all__ = ["WarmupLRScheduler"]


class WarmupLRScheduler:
    r"""Sets the learning rate of an optimizer for each iteration.

    The rate of iteration ``n`` is ``get_lr_warmup(n)`` while ``n < warmup_iter`` and ``get_lr_decay(n)`` from
    then on. It is written into every parameter group, at construction and by each :meth:`step`, so the first
    optimizer step already uses the rate of iteration ``num_iter``. Subclasses override the two methods; both
    may read ``start_lr``, ``warmup_iter``, ``end_iter``, ``num_iter`` and ``optimizer``.

    Args:
        optimizer: anything with ``param_groups``, a list of dicts whose ``"lr"`` is to be set.
        start_lr: the highest rate, reached at the end of the warm-up.
        warmup_iter: number of iterations of warm-up; 0 for none.
        end_iter: iteration at which the decay ends; None or -1 where the schedule has no end.
        num_iter: iteration to start from.

    Raises:
        TypeError: ``optimizer`` has no ``param_groups``, or an argument is not a number.
        ValueError: a number is negative or NaN, or ``end_iter`` is None in a schedule that needs it.

    Example:
        >>> import torch
        >>> class Square(WarmupLRScheduler):
        ...     def get_lr_warmup(self, num_iter):
        ...         return self.start_lr * (num_iter / self.warmup_iter) ** 2
        ...     def get_lr_decay(self, num_iter):
        ...         return self.start_lr
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> scheduler = Square(optimizer, start_lr=0.4, warmup_iter=2, end_iter=-1)
        >>> [scheduler.current_lr, *(scheduler.step() or scheduler.current_lr for _ in range(3))]
        [0.0, 0.1, 0.4, 0.4]
    """

    #: Whether :meth:`get_lr_decay` reads ``end_iter``, so that None must be refused before training starts.
    _needs_end_iter: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # 0.1.1 called the hook by a misspelt name; a class that defines only that one means this one.
        if "get_lr_warmpup" in cls.__dict__ and "get_lr_warmup" not in cls.__dict__:
            warn_once(
                "lr_scheduler.get_lr_warmpup",
                f"{cls.__name__}.get_lr_warmpup is deprecated: name the method get_lr_warmup",
            )
            cls.get_lr_warmup = cls.__dict__["get_lr_warmpup"]  # type: ignore[method-assign]

    def __init__(
        self,
        optimizer: Any,
        start_lr: float,
        warmup_iter: int,
        end_iter: int | None = None,
        num_iter: int = 0,
    ) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must have param_groups, got {type(optimizer).__name__}")
        if self._needs_end_iter and end_iter is None:
            raise ValueError(
                f"{type(self).__name__} needs end_iter (the iteration at which the decay ends), got None"
            )
        for name, value in (("start_lr", start_lr), ("warmup_iter", warmup_iter), ("num_iter", num_iter)):
            require_between(name, value, 0)
        if end_iter is not None:
            require_between("end_iter", end_iter)
        self.optimizer = optimizer
        self.start_lr = start_lr
        self.warmup_iter = warmup_iter
        self.end_iter: Any = end_iter
        self.num_iter = num_iter
        self.current_lr: float = 0.0
        self.step(num_iter)

    def get_lr_warmup(self, num_iter: int) -> float:
        """Returns the rate of an iteration before ``warmup_iter``."""
        raise NotImplementedError(f"{type(self).__name__} must define get_lr_warmup(num_iter)")

    def get_lr_decay(self, num_iter: int) -> float:
        """Returns the rate of an iteration from ``warmup_iter`` on."""
        raise NotImplementedError(f"{type(self).__name__} must define get_lr_decay(num_iter)")

    def get_lr(self) -> float:
        """Returns the rate of the current iteration."""
        if self.num_iter < self.warmup_iter:
            return self.get_lr_warmup(self.num_iter)
        return self.get_lr_decay(self.num_iter)

    def step(self, num_iter: int | None = None) -> None:
        """Goes to the next iteration, or to a given one, and writes its rate into every parameter group.

        Args:
            num_iter: the iteration to go to; None for the one after the current.
        """
        if num_iter is None:
            num_iter = self.num_iter + 1
        require_number("num_iter", num_iter)
        if not num_iter >= 0:
            raise ValueError(f"num_iter: expected at least 0, got {num_iter}")
        self.num_iter = num_iter
        lr = self.get_lr()
        self.current_lr = lr
        for group in self.optimizer.param_groups:
            # A captured optimizer reads this tensor, so it is written in place.
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for :meth:`load_state_dict`."""
        return {
            "start_lr": self.start_lr,
            "warmup_iter": self.warmup_iter,
            "end_iter": self.end_iter,
            "num_iter": self.num_iter,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state and writes its rate into every parameter group at once.

        Raises:
            TypeError: ``state_dict`` is no dict.
            ValueError: a key is missing.
        """
        require_keys("state_dict", state_dict, ("start_lr", "warmup_iter", "end_iter", "num_iter"))
        self.start_lr = state_dict["start_lr"]
        self.warmup_iter = state_dict["warmup_iter"]
        self.end_iter = state_dict["end_iter"]
        self.step(state_dict["num_iter"])


class LinearWarmup(WarmupLRScheduler):
    """Base of schedules whose rate rises from 0 to ``start_lr`` in equal steps."""

    def get_lr_warmup(self, num_iter: int) -> float:
        return self.start_lr * num_iter / self.warmup_iter


def __getattr__(name: str) -> Any:
    if name == "WarmupLRSchduler":  # spelling of 0.1.1
        warn_once(
            "lr_scheduler.WarmupLRSchduler",
            "WarmupLRSchduler is deprecated: write WarmupLRScheduler",
            stacklevel=3,
        )
        return WarmupLRScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
