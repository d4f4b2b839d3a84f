"""What a container may deny a process, denied to the process that calls."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Sequence
from pathlib import Path

__all__ = ["NoSuchLimit", "allow_memory", "mount_shared_memory", "refuse_calls"]

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS = 0x20000
_MS_RDONLY, _MS_REC, _MS_PRIVATE = 1, 1 << 14, 1 << 18
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _FILTER_OF_ALL_THREADS = 1, 1
# Of each machine: its number in a filter, that of seccomp(2), and those of the calls that are refused.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        317,
        {
            "io_uring_setup": 425,
            "memfd_create": 319,
            "pidfd_open": 434,
            "process_vm_readv": 310,
            "ptrace": 101,
        },
    ),
    "aarch64": (
        0xC00000B7,
        277,
        {
            "io_uring_setup": 425,
            "memfd_create": 279,
            "pidfd_open": 434,
            "process_vm_readv": 270,
            "ptrace": 117,
        },
    ),
}
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class NoSuchLimit(Exception):
    """This machine, or this user, cannot do that."""


def refuse_calls(names: Sequence[str], error: int = errno.EPERM) -> None:
    """Let system calls fail in all threads of this process, as a seccomp profile does."""
    if platform.machine() not in _MACHINES:
        raise NoSuchLimit(f"no numbers of system calls for {platform.machine()}")
    machine, seccomp, numbers = _MACHINES[platform.machine()]
    program = [
        (_LOAD, 0, 0, 4),
        (_JUMP_IF_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, 0),
    ]
    for name in names:
        program += [(_JUMP_IF_EQUAL, 0, 1, numbers[name]), (_RETURN, 0, 0, _ERRNO | error)]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.syscall(seccomp, _SET_MODE_FILTER, _FILTER_OF_ALL_THREADS, header))


def mount_shared_memory(options: str, read_only: bool = False) -> None:
    """Another /dev/shm, seen by this process alone."""
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
    flags = _MS_RDONLY if read_only else 0
    _check(_libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", flags, options.encode()))


def allow_memory(megabytes: int) -> None:
    """Limit the address space to what is mapped now and a little more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    mapped = pages * os.sysconf("SC_PAGESIZE")
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (megabytes << 20),) * 2)


def _check(result: int) -> None:
    if result != 0:
        raise NoSuchLimit(os.strerror(ctypes.get_errno()))
