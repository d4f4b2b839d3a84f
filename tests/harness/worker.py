"""The other end of the harness: a fork server, and the loop that a rank runs.

The server imports torch and bmtrain once (seconds) and forks ranks from there (milliseconds), so that a test
may kill its ranks without making the next test wait. It touches no device and starts no thread before a fork.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import marshal
import os
import pickle
import random
import signal
import socket
import sys
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Call", "Raised", "Returned", "Setup", "compiled", "main"]

_PR_SET_PDEATHSIG = 1
_TORN_DOWN = ("__main__", "bmtrain", "builtins", "harness", "sys")  # at the end of a rank, however brief


@dataclass(frozen=True)
class Setup:
    """What a rank has to know before its first call.

    `init`: keywords of init_distributed, or None. `brief`: the rank leaves torch as it is when it ends.
    """

    path: list[str]
    environment: dict[str, str]
    init: dict[str, Any] | None
    brief: bool


@dataclass(frozen=True)
class Call:
    """A function by module and name, so that the module can be loaded before its arguments are unpickled.

    `code`: of the module's file, as `compiled` gives it; None where the ranks have the module, or read the file.
    """

    module: str
    file: str | None
    qualname: str
    arguments: bytes
    code: bytes | None = None


@dataclass(frozen=True)
class Returned:
    """What a rank sends back when the function returned: its pickled value."""

    value: bytes
    seconds: float


@dataclass(frozen=True)
class Raised:
    """What a rank sends back when the function raised: plain text, as not every exception can be pickled."""

    type_name: str
    message: str
    traceback: str
    seconds: float
    mro: tuple[str, ...] = field(default=())


def _die_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


@functools.cache
def compiled(file: str) -> bytes:
    """The code of a test module, its asserts explained as pytest's are: made once, and not by every rank."""
    with open(file, "rb") as stream:
        source = stream.read()
    tree = ast.parse(source, filename=file)
    try:
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source, file)
    except (
        ImportError,
        TypeError,
    ):  # a private function of pytest: without it, asserts are only less talkative
        pass
    return marshal.dumps(compile(tree, file, "exec", dont_inherit=True))


def _load(call: Call) -> types.ModuleType:
    """Import a test module from its file under the name that pytest gave it."""
    if call.module in sys.modules or call.file is None:
        return importlib.import_module(call.module)
    spec = importlib.util.spec_from_file_location(call.module, call.file)
    if spec is None:
        raise ImportError(f"{call.file} is not a Python source file")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[call.module] = loaded
    try:
        exec(marshal.loads(call.code or compiled(call.file)), loaded.__dict__)
    except BaseException:
        del sys.modules[call.module]
        raise
    return loaded


def _resolve(call: Call) -> Callable[..., Any]:
    found: Any = _load(call)
    for name in call.qualname.split("."):
        found = getattr(found, name)
    function: Callable[..., Any] = found
    return function


def _reset(environment: dict[str, str], directory: str) -> None:
    """Give every call the same start, whatever the calls before it left behind."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    warnings.resetwarnings()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # asked, because the setter imports a compiler
        torch.use_deterministic_algorithms(False)
    gc.collect()
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "bmtrain.nn.sequence" in sys.modules:
        sys.modules["bmtrain.nn.sequence"].whole_sequences()


def _on_host(value: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, torch.Tensor.cpu, value) if torch.cuda.is_initialized() else value


def _attempt(function: Callable[[], Any]) -> Returned | Raised:
    started = time.monotonic()
    try:
        value = pickle.dumps(_on_host(function()))
        return Returned(value, time.monotonic() - started)
    except BaseException as error:
        seconds = time.monotonic() - started
        mro = tuple(cls.__name__ for cls in type(error).__mro__)
        return Raised(type(error).__name__, str(error), traceback.format_exc(), seconds, mro)


def _initialize(setup: Setup) -> None:
    import torch

    torch.set_num_threads(1)
    if setup.init is not None:
        import bmtrain

        bmtrain.init_distributed(**setup.init)
        if torch.cuda.is_available():
            from .on_device import MadeOn

            MadeOn(bmtrain.config["device"]).__enter__()


def _run_rank(connection: Connection) -> None:
    """Serve calls until the test run closes the connection, or sends nothing: then the end is brief."""
    setup: Setup = pickle.loads(connection.recv_bytes())
    if setup.brief:
        _end_briefly()
    sys.path[:] = setup.path
    os.environ.clear()
    os.environ.update(setup.environment)
    directory = os.getcwd()
    connection.send_bytes(pickle.dumps(_attempt(lambda: _initialize(setup))))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if not message:
            _end_briefly()
            return
        call: Call = pickle.loads(message)

        def run(call: Call = call) -> Any:
            function = _resolve(call)
            args, kwargs = pickle.loads(call.arguments)
            _reset(setup.environment, directory)
            return function(*args, **kwargs)

        outcome = _attempt(run)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(pickle.dumps(outcome))


_brief: list[bool] = []  # not empty: `_shorten_end` does something
_finalizers: list[weakref.finalize[Any, Any]] = []  # those of preloaded modules: torch's take operators back


def _end_briefly() -> None:
    _brief.append(True)
    for finalizer in _finalizers:
        finalizer.atexit = False


def _shorten_end(ours: list[str], last: list[str], status: list[int]) -> None:
    """Leave torch and the interpreter as they are: their teardown copies the pages that forks share, and takes a rank
    a quarter of a second.

    The rest of an orderly end remains: handlers of `atexit` have run, modules of bmtrain and of tests are cleared.
    """
    if not _brief:
        return
    later = itertools.takewhile(lambda name: name != last[0], reversed(sys.modules))
    left = {name: sys.modules[name] for name in [*ours, *reversed([*later])] if name in sys.modules}
    # Made here: frames of `main` live on in what modules keep of their import, and with them all that it has.
    sys._end = _End(status[0], dict(sys.modules))  # type: ignore[attr-defined]
    sys.modules.clear()
    sys.modules.update(left)


class _End:
    """In the module ``sys``, which is cleared after all others: ends the process then.

    It has what it needs, as modules are empty by then, and keeps the modules that stay as they are.
    """

    def __init__(self, status: int, modules: dict[str, Any]) -> None:
        self._status = status
        self._modules = modules
        self._exit = os._exit
        self._flushes = [
            sys.stdout.flush,
            sys.stderr.flush,
            functools.partial(ctypes.CDLL(None).fflush, None),
        ]

    def __del__(self) -> None:
        for flush in self._flushes:
            flush()
        self._exit(self._status)


def _become_rank(parent: int, channel: int, log: str, stacks: str) -> Connection:
    """Turn the fork into a rank: own process group, output to a file, stacks to a file on SIGUSR1."""
    _die_with_parent(parent)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # Kept open for the life of the process: faulthandler holds only the number.
    stack_file = open(stacks, "ab", buffering=0)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed rank flushes nothing
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True, chain=False)
    connection = Connection(channel)
    _keep.append(stack_file)
    return connection


_keep: list[Any] = []  # files that must live as long as the process


def _reap(pids: list[int]) -> list[int | None]:
    """The exit status of each process (negative: a signal), None for one that still runs."""
    codes: list[int | None] = []
    for pid in pids:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            done, status = 0, 0
        codes.append(os.waitstatus_to_exitcode(status) if done else None)
    return codes


def _become_program(parent: int, request: dict[str, Any], streams: list[int]) -> None:
    """Turn the fork into what ``python -c`` starts, with the standard streams given."""
    _die_with_parent(parent)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [""]
    sys.argv = ["-c"]
    _end_briefly()


def _run_program(code: str) -> None:
    """Run it as the main module. A traceback begins with the program's own line."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(code, "<string>", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        assert error.__traceback__ is not None
        own = error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(own), own)
        raise SystemExit(1) from None


def _serve(control: socket.socket) -> Callable[[], None] | None:
    """Fork on request. Returns what a fork has to do, None in the server at the end of the run."""
    server = os.getpid()
    while True:
        message, channels, _, _ = socket.recv_fds(control, 1 << 20, 64)
        if not message:
            return None
        request = json.loads(message)
        if request["do"] == "reap":
            control.send(json.dumps(_reap(request["pids"])).encode())
            continue
        if request["do"] == "run":
            pids = [os.fork()]
            if pids == [0]:
                control.close()
                _become_program(server, request, channels)
                return functools.partial(_run_program, request["code"])
        else:
            pids = []
            for rank, channel in enumerate(channels):
                pid = os.fork()
                if pid == 0:
                    control.close()
                    for other in channels:
                        if other != channel:  # else a peer's death would not close its connection
                            os.close(other)
                    connection = _become_rank(server, channel, request["logs"][rank], request["stacks"][rank])
                    return functools.partial(_run_rank, connection)
                pids.append(pid)
        for channel in channels:
            os.close(channel)
        control.send(json.dumps(pids).encode())


def main() -> None:
    """Import what every rank needs, then serve. argv: the control socket's number, the parent's id, further modules."""
    _die_with_parent(int(sys.argv[2]))
    ours: list[str] = []  # modules that ends tear down
    last: list[str] = []  # module that was imported before ranks were forked
    status = [0]
    atexit.register(_shorten_end, ours, last, status)  # the first to be registered is the last to be called
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Any torch optimizer imports torch._dynamo when it is made: a second of every new rank that trains.
    parts = ("init", "optim", "distributed", "nn", "loss", "wrapper", "inspect")
    general = ("torch", "torch._dynamo", "numpy", "pytest", "_pytest.assertion.rewrite", "encodings.idna")
    for name in (*general, *(f"bmtrain.{part}" for part in parts), *sys.argv[3:]):
        try:
            importlib.import_module(name)
        except Exception:  # what is missing shows in the call that needs it, with that rank's traceback
            continue
    ours += [name for name in sys.modules if name.partition(".")[0] in _TORN_DOWN]
    last += [*sys.modules][-1:]
    _finalizers.extend(getattr(weakref.finalize, "_registry", ()))
    gc.collect()
    gc.freeze()  # torch's objects are never garbage: without them a rank's collections take no time
    control = socket.socket(fileno=int(sys.argv[1]))
    control.send(b"ready")
    task = _serve(control)
    if task is not None:
        try:
            task()
        except SystemExit as error:
            status[0] = error.code if isinstance(error.code, int) else int(error.code is not None)
            raise
        except BaseException:
            status[0] = 1
            raise
