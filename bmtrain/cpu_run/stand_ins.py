"""Replacements of `torch.cuda`, and of the few other functions that name a device or a backend."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed

from .._base.host_memory import resident_bytes
from .._ranks.streams import InertStream
from .function_mode import called_by_library, is_cuda, on_cpu

__all__ = ["Event", "Redirects", "Stream", "install"]


class Redirects(Protocol):
    """Counts redirected calls and restores replaced attributes (:class:`~bmtrain.cpu_run.Redirection`)."""

    def count(self, what: str) -> None: ...

    def replace(self, owner: Any, name: str, value: Any) -> None: ...


class Stream(InertStream):
    """A stream on which all work completes at once."""

    device = torch.device("cpu")
    cuda_stream = 0
    priority = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event(InertStream):
    """An event that has happened; times are of the wall clock, in milliseconds."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._seconds: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        if self._seconds is None or end._seconds is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1e3 * (end._seconds - self._seconds)


_STREAM = Stream()


class _Guard(contextlib.nullcontext[None]):
    """torch.cuda.device(...) and torch.cuda.stream(...)."""

    def __init__(self, *args: object) -> None:
        super().__init__()


def _resident_bytes(*args: object) -> int:
    return resident_bytes()[0]


def _peak_bytes(*args: object) -> int:
    return max(resident_bytes())  # both are estimates of the kernel


def _host_bytes() -> tuple[int, int]:
    page = os.sysconf("SC_PAGE_SIZE")
    return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page


def _memory_stats(*args: object) -> dict[str, int]:
    now, peak = _resident_bytes(), _peak_bytes()
    kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
    found = {f"{kind}.all.current": now for kind in kinds}
    return {**found, **{f"{kind}.all.peak": peak for kind in kinds}, "num_alloc_retries": 0, "num_ooms": 0}


def _properties(*args: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="CPU", total_memory=_host_bytes()[1], major=0, minor=0, multi_processor_count=os.cpu_count()
    )


def _nothing(*args: object, **kwargs: object) -> None:
    pass


@contextlib.contextmanager
def _range(*args: object) -> Iterator[None]:
    yield


# torch.cuda.NAME -> what it is here.
_CUDA: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("init", "synchronize", "empty_cache", "ipc_collect", "set_stream", "seed", "seed_all"),
            *("manual_seed", "manual_seed_all", "set_per_process_memory_fraction"),
            *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
            "reset_accumulated_memory_stats",
        ),
        _nothing,
    ),
    **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), _resident_bytes),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), _peak_bytes),
    **dict.fromkeys(("current_stream", "default_stream"), lambda *args: _STREAM),
    "memory_stats": _memory_stats,
    "memory_summary": lambda *args, **kwargs: f"resident memory of the process: {_resident_bytes()} bytes",
    "mem_get_info": lambda *args: _host_bytes(),
    "get_device_name": lambda *args: "CPU",
    "get_device_properties": _properties,
    "get_device_capability": lambda *args: (0, 0),
    "is_bf16_supported": lambda *args: True,
    "get_rng_state": lambda *args: torch.get_rng_state(),
    "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    "initial_seed": lambda: torch.initial_seed(),
}
_CUDA_CLASSES: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "device": _Guard,
    "device_of": _Guard,
    "stream": _Guard,
}
_NVTX: dict[str, Callable[..., Any]] = {
    "range_push": _nothing,
    "range_pop": _nothing,
    "mark": _nothing,
    "range": _range,
}
_TENSOR_TYPES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")


def install(redirection: Redirects) -> None:
    """Installs all stand-ins until the redirection ends."""
    _install_cuda(redirection)
    _install_autocast(redirection)
    _install_loading(redirection)
    _install_process_groups(redirection)
    _install_init(redirection)
    _install_data_parallel(redirection)


def _counted(redirection: Redirects, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        redirection.count(name)
        return call(*args, **kwargs)

    return stand_in


def _install_cuda(redirection: Redirects) -> None:
    cuda = torch.cuda
    for name, call in _CUDA.items():
        redirection.replace(cuda, name, _counted(redirection, f"torch.cuda.{name}", call))
    for name, kind in _CUDA_CLASSES.items():
        made = _counted(redirection, f"torch.cuda.{name}", kind.__init__)
        counted = type(kind.__name__, (kind,), {"__init__": made})
        redirection.replace(cuda, name, counted)
    for name, call in _NVTX.items():
        redirection.replace(cuda.nvtx, name, _counted(redirection, f"torch.cuda.nvtx.{name}", call))
    for name in _TENSOR_TYPES:
        redirection.replace(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    # The parser of this one's argument refuses our streams before any mode sees the call.
    ignore = _counted(redirection, ".record_stream()", _nothing)
    redirection.replace(torch.Tensor, "record_stream", ignore)

    chosen = [int(os.environ.get("LOCAL_RANK", "0"))]

    def set_device(device: Any) -> None:
        redirection.count("torch.cuda.set_device")
        _, _, index = str(device).rpartition(":")  # "cuda" names none, nor does what was redirected
        chosen[0] = int(index) if index.isdecimal() else chosen[0]

    redirection.replace(cuda, "set_device", set_device)
    redirection.replace(cuda, "current_device", lambda: chosen[0])
    # Libraries see the truth, see [Note: How a call is redirected].
    for name, answer in (
        ("is_available", lambda: True),
        ("is_initialized", lambda: True),
        ("device_count", lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
    ):
        redirection.replace(cuda, name, _two_faced(redirection, name, answer, getattr(cuda, name)))


def _two_faced(
    redirection: Redirects, name: str, answer: Callable[[], Any], truth: Callable[[], Any]
) -> Callable[[], Any]:
    def stand_in() -> Any:
        if called_by_library():
            return truth()
        redirection.count(f"torch.cuda.{name}")
        return answer()

    return stand_in


def _install_autocast(redirection: Redirects) -> None:
    autocast = torch.amp.autocast_mode.autocast
    before = autocast.__init__

    def rewritten(init: Callable[..., None], what: str) -> Callable[..., None]:
        @functools.wraps(init)
        def stand_in(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
            device = kwargs.pop("device_type", kwargs.pop("device", device))
            if is_cuda(device):
                redirection.count(what)
                if init is before and not args and kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float16  # the default of CUDA; that of the CPU is bfloat16
            init(self, on_cpu(device).type if is_cuda(device) else device, *args, **kwargs)

        return stand_in

    redirection.replace(autocast, "__init__", rewritten(before, 'autocast("cuda")'))
    scaler = torch.amp.GradScaler
    redirection.replace(scaler, "__init__", rewritten(scaler.__init__, 'GradScaler("cuda")'))


def _install_loading(redirection: Redirects) -> None:
    load = torch.load

    @functools.wraps(load)
    def load_on_cpu(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is not None:
            redirection.count("torch.load(map_location=...)")
        return load(f, "cpu", *args, **kwargs)  # files written on a GPU name it

    redirection.replace(torch, "load", load_on_cpu)

    loader = torch.utils.data.DataLoader.__init__

    @functools.wraps(loader)
    def without_pinning(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("pin_memory", False):
            redirection.count("DataLoader(pin_memory=True)")
        kwargs.pop("pin_memory_device", None)
        loader(self, *args, **kwargs)

    redirection.replace(torch.utils.data.DataLoader, "__init__", without_pinning)

    set_default_device = torch.set_default_device

    def set_default(device: Any) -> None:
        if is_cuda(device):
            redirection.count('torch.set_default_device("cuda")')
        set_default_device(on_cpu(device))

    redirection.replace(torch, "set_default_device", set_default)

    class Generator(torch.Generator):
        """A generator on the CPU, whatever the requested device."""

        def __new__(cls, device: Any = "cpu") -> Any:
            if is_cuda(device):
                redirection.count('torch.Generator(device="cuda")')
            make: Any = super().__new__  # the annotations of torch give it no argument
            return make(cls, on_cpu(device))

    redirection.replace(torch, "Generator", Generator)


def _install_process_groups(redirection: Redirects) -> None:
    def with_gloo(call: Callable[..., Any], position: int) -> Callable[..., Any]:
        @functools.wraps(call)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            given = list(args)
            backend = given[position] if len(given) > position else kwargs.get("backend")
            if isinstance(backend, str) and "nccl" in backend:
                redirection.count('backend "nccl"')
                if len(given) > position:
                    given[position] = "gloo"
                else:
                    kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
            return call(*given, **kwargs)

        return stand_in

    dist = torch.distributed
    for name, position in (("init_process_group", 0), ("new_group", 2)):
        stand_in = with_gloo(getattr(dist, name), position)
        redirection.replace(dist, name, stand_in)
        redirection.replace(dist.distributed_c10d, name, stand_in)


def _install_init(redirection: Redirects) -> None:
    import bmtrain

    from .. import init

    init_distributed = init.init_distributed

    @functools.wraps(init_distributed)
    def init_on_cpu(*args: Any, **kwargs: Any) -> None:
        if kwargs.get("backend") == "nccl":
            redirection.count('backend "nccl"')
            kwargs["backend"] = "gloo"
        init_distributed(*args, **kwargs)

    redirection.replace(init, "init_distributed", init_on_cpu)
    redirection.replace(bmtrain, "init_distributed", init_on_cpu)


def _install_data_parallel(redirection: Redirects) -> None:
    parallel = torch.nn.parallel.DistributedDataParallel
    build = parallel.__init__

    @functools.wraps(build)
    def without_devices(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("device_ids", None) or args:
            redirection.count("DistributedDataParallel(device_ids=...)")
        kwargs.pop("output_device", None)
        build(self, module, **kwargs)

    redirection.replace(parallel, "__init__", without_devices)
