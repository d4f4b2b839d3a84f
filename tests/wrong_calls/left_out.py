"""Public names that no table has, and why."""

from __future__ import annotations

__all__ = ["LEFT_OUT"]

_BY_REASON = {
    "takes no arguments": (
        *("InspectTensorManager", "build_info", "exceptions", "getUniqueId", "groupEnd", "groupStart"),
        *("finish_background_save", "whole_sequences"),
        *("inspect_tensor", "load_nccl_pypi", "no_sync", "rank", "record_from_environment", "synchronize"),
        *("wait_loader", "world_size"),
    ),
    "takes anything: prints it, keeps it by a name, or makes text of it": (
        *(
            "allgather_objects",
            "append",
            "check_torch_version",
            "clear",
            "extend",
            "get",
            "print_block",
            "print_dict",
            "print_rank",
        ),
        *("see_memory", "set"),
    ),
    "is made by the library, not by its user": (
        *("Checkpoint", "CheckpointHandle", "MemoryReport", "NCCLCommunicator", "Span", "Summary"),
        *("MemoryEstimate", "Plan", "SaveHandle", "TimeEstimate"),
    ),
    "numbers, as gpt2() and describe_module() count them": (
        *("BlockDescription", "FlatBuffer", "ModelDescription", "OutsideParameter"),
    ),
    "of the command `convert`, which calls them: tests/unit/test_convert.py": ("add_arguments", "run"),
    "only names choices": ("Recompute", "ReduceType"),
    "a base class; what derives from it is in the tables": ("DistributedModule", "WarmupLRScheduler"),
    "another name of what is in a table": ("CheckpointBlock", "Timeline"),
    "of torch.autograd, called by layers that are in a table": ("OpLinear", "OpParallelLinear"),
    "called by pipelines, over messages": ("recv_activations", "send_activations"),
    "a right call needs another rank: tests/multiproc/test_comm_rooted.py": ("recv", "send"),
    "ends what the others need: tests/multiproc/test_comm_nccl.py": ("commDestroy",),
    "called once in a process: tests/multiproc/test_init_failures.py": ("init_distributed",),
    "needs a job of its own: tests/multiproc/test_virtual_shards.py": ("virtual_shards",),
    "needs a job of its own: tests/multiproc/test_sequences.py": ("shard_sequence",),
    "needs a job of its own: tests/multiproc/test_data.py": ("batches",),
    "takes optimizers made for shards: tests/multiproc/test_whole_matrix.py": ("whole_norms",),
    "needs an optimizer that has stepped: tests/multiproc/test_one_parameter.py": (
        "gather_state",
        "load_state",
    ),
    "a context that needs a model: tests/multiproc/test_whole.py": ("whole",),
    "of the command `timeline`, which calls them: tests/multiproc/test_timeline.py": (
        *("read_traces", "summarize", "write_trace"),
    ),
}

LEFT_OUT = {name: reason for reason, names in _BY_REASON.items() for name in names}
