"""DeepSpeed's NVMe offload of the layers of ``bench disk``: ZeRO-3 with parameters and optimizer state on a drive."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def measure_deepspeed(folder: str, count: int, width: int, tokens: int, repeat: int) -> dict[str, Any]:
    """Returns the seconds of steps and the bytes that the kernel counted in the last one, or why there are none."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        deepspeed = importlib.import_module("deepspeed")
        builders: Any = importlib.import_module("deepspeed.ops.op_builder.cpu")
    except ImportError:
        return {"error": "deepspeed is not installed"}
    if not builders.AsyncIOBuilder().is_compatible():
        return {"error": "its async_io needs libaio (Debian: libaio-dev)"}
    try:
        step = _step(deepspeed, folder, count, width, tokens)
        step()
        seconds = []
        for _ in range(repeat):
            before, start = _kernel_bytes(), time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
            read, written = (now - old for now, old in zip(_kernel_bytes(), before, strict=True))
    except Exception as error:  # an error of another library: the other results remain
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    if not read + written:
        return {"error": "it keeps arrays below 1 MiB in memory; --width 512 or more"}
    return {"seconds": seconds, "read": read, "written": written}


def _step(deepspeed: Any, folder: str, count: int, width: int, tokens: int) -> Callable[[], None]:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.ops.__compatible_ops__.clear()  # it would compile its all-reduce in shared memory
    drive = {"device": "nvme", "nvme_path": folder, "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": tokens,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": width * width,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,  # parameters are read for forward and backward, as ours
            "stage3_max_live_parameters": 3 * width * width,
            "stage3_prefetch_bucket_size": 2 * width * width,
            "offload_param": {**drive, "buffer_count": 8, "buffer_size": width * width, "max_in_cpu": 0},
            "offload_optimizer": {**drive, "buffer_count": 16, "pipeline_read": True, "pipeline_write": True},
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 16, "intra_op_parallelism": 2, "overlap_events": True},
    }
    with deepspeed.zero.Init(config_dict_or_path=config):
        layers = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(count)))
    engine, *_ = deepspeed.initialize(model=layers, model_parameters=layers.parameters(), config=config)
    x = torch.randn(tokens, width)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


def _kernel_bytes() -> tuple[int, int]:
    """Returns the bytes that this process has read from drives and written to them."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]), int(lines["write_bytes"])
