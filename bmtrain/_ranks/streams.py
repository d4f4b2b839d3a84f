"""The CUDA streams that `config` shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


class InertStream:
    """Replaces a CUDA stream or event on a CPU run: all work is complete already, and nothing waits."""

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return self if event is None else event

    def query(self) -> bool:
        return True


@dataclass(frozen=True)
class Streams:
    """The CUDA streams and the event that `config` shows; inert objects on a CPU run."""

    calc_stream: Any = field(default_factory=InertStream)
    load_stream: Any = field(default_factory=InertStream)
    barrier_stream: Any = field(default_factory=InertStream)
    tp_comm_stream: Any = field(default_factory=InertStream)
    pp_comm_stream: Any = field(default_factory=InertStream)
    load_event: Any = field(default_factory=InertStream)

    @classmethod
    def for_device(cls, device: torch.device) -> Streams:
        """Real streams on a CUDA device, inert ones elsewhere."""
        if device.type != "cuda":
            return cls()
        with torch.cuda.device(device):
            return cls(
                calc_stream=torch.cuda.current_stream(),
                load_stream=torch.cuda.Stream(priority=-1),
                barrier_stream=torch.cuda.Stream(),
                tp_comm_stream=torch.cuda.Stream(),
                pp_comm_stream=torch.cuda.Stream(),
                load_event=torch.cuda.Event(),
            )
