"""Starts child processes that ignore a terminal's signals and do not outlive their parent."""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from types import ModuleType, TracebackType
from typing import Any

from batchinfer.core.errors import classify_error
from batchinfer.machine.absent_pandas import leave_pandas_out
from batchinfer.machine.garbage import pause_garbage_collector

# A terminal sends these to the whole process group. They are blocked from a child's first instruction on: its parent
# decides when it ends
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.01

# The first statements of a child make the kernel kill it together with its parent (1: PR_SET_PDEATHSIG). If the parent
# died before, the child ends itself
_BOOT = """
import os, sys
def leave_an_orphan():
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)
leave_an_orphan()
if sys.platform == "linux":
    import ctypes
    if ctypes.CDLL(None).prctl(1, ctypes.c_ulong(9), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    leave_an_orphan()
sys.path[:] = sys.argv[5:]
from batchinfer.machine.spawning import run_child
run_child(int(sys.argv[2]), sys.argv[3], sys.argv[4])
"""


@dataclass(frozen=True, slots=True)
class ChildExit:
    """The end of a child process.

    Args:
        code: Its exit status, or minus the number of the signal that ended it. None: unknown.
        cpu_s: The CPU time that it used, in seconds.
    """

    code: int | None
    cpu_s: float = 0.0

    @property
    def out_of_cpu_time(self) -> bool:
        """Return True if the limit on CPU time ended the process."""
        if self.code == -signal.SIGXCPU:
            return True
        # The kernel sends SIGKILL if the soft limit equals the hard limit
        limit = cpu_limit_s()
        return self.code == -signal.SIGKILL and limit is not None and self.cpu_s >= limit - 1

    @property
    def out_of_memory(self) -> bool:
        """Return True if the process was killed, usually by the kernel because memory ran out."""
        return self.code == -signal.SIGKILL and not self.out_of_cpu_time

    def __str__(self) -> str:
        if self.out_of_cpu_time:
            limit = cpu_limit_s()
            seconds = "" if limit is None else f" of {limit} s"
            return f"reached the limit{seconds} on a process's CPU time (RLIMIT_CPU; `ulimit -t` shows it)"
        if self.out_of_memory:
            return "was killed (signal 9, SIGKILL), most likely by the kernel because memory ran out"
        if self.code is None:
            return "ended with an unknown exit status"
        if self.code < 0:
            return f"ended by signal {-self.code} ({signal.Signals(-self.code).name})"
        return f"ended with exit status {self.code}"


def cpu_limit_s() -> int | None:
    """Return the system's limit on the CPU time of a process, in seconds; None if there is none."""
    limits = [limit for limit in resource.getrlimit(resource.RLIMIT_CPU) if limit != resource.RLIM_INFINITY]
    return min(limits) if limits else None


@contextmanager
def receiving() -> Iterator[None]:
    """Return a context manager for receiving a message from another process, which may end at any time.

    An OSError becomes an EOFError.
    """
    try:
        yield
    except OSError as error:
        raise EOFError(f"the other process is gone: {error}") from error


class Child:
    """A child process of this Python process that runs one function.

    The attribute `connection` is the parent's end of a pipe to the child. On Linux, the child is killed when the
    *thread* that started it ends. On other systems, it must exit when its end of the pipe is closed.
    """

    def __init__(self, target: str, *arguments: object, files: Sequence[int] = ()) -> None:
        """Start the process.

        Args:
            target: The function, as "module:function". Its last argument is the child's end of the pipe.
            arguments: The other arguments of the function.
            files: File descriptors that the child inherits with the same numbers.
        """
        self._start(target, files, ())
        self.begin(*arguments)

    @classmethod
    def standing_by(cls, target: str, imports: Sequence[str]) -> Child:
        """Start a child process that imports modules, and waits until `begin` sends the arguments of its function.

        Args:
            target: The function, as "module:function". Its last argument is the child's end of the pipe.
            imports: The names of the modules to import.
        """
        child = cls.__new__(cls)
        child._start(target, (), imports)
        return child

    def _start(self, target: str, files: Sequence[int], imports: Sequence[str]) -> None:
        self.connection, theirs = Pipe()
        self._ended: ChildExit | None = None
        with theirs:
            self.pid = _spawn(target, theirs.fileno(), files, imports)

    def begin(self, *arguments: object) -> None:
        """Send the arguments of the function to a child from `standing_by`, which then runs it. Call this once."""
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it died; `wait` returns how
                self.connection.send(arguments)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait(self, within_s: float) -> ChildExit | None:
        """Wait up to `within_s` seconds for the end of the child. Return None if it is still running."""
        deadline = time.monotonic() + within_s
        while self._ended is None:
            try:
                pid, status, used = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:  # this process ignores SIGCHLD, so exit statuses are lost
                self._ended = ChildExit(None)
                break
            if pid:
                self._ended = ChildExit(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(_POLL_S)
        return self._ended

    @property
    def alive(self) -> bool:
        """Return True if the child is running."""
        return self.wait(0) is None

    def kill(self) -> None:
        """Kill the child if it is running, and wait for its end."""
        while self.alive:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(1.0)

    def close(self) -> None:
        """Kill the child if it is running, and close the pipe. May be called twice."""
        self.kill()
        self.connection.close()


def _spawn(target: str, connection: int, files: Sequence[int], imports: Sequence[str]) -> int:
    options = ["-P", *(["-I"] if sys.flags.isolated else []), *(["-B"] if sys.dont_write_bytecode else [])]
    options += [f"-W{warning}" for warning in sys.warnoptions]
    arguments = [str(os.getpid()), str(connection), target, ",".join(imports), *sys.path]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()) | set(_IGNORED_SIGNALS)
    kept = (connection, *files)
    try:
        for number in kept:
            os.set_inheritable(number, True)
        command = [sys.executable, *options, "-c", _BOOT, *arguments]
        return os.posix_spawn(sys.executable, command, os.environ, setsigmask=blocked)
    except BlockingIOError as error:
        raise classify_error(error) from error
    finally:
        for number in kept:
            os.set_inheritable(number, False)


def run_child(connection: int, target: str, imports: str) -> None:
    """Receive the arguments of a function and run it. This is the entry point of a child process.

    Args:
        connection: The file descriptor of the child's end of the pipe, through which the parent sends the arguments.
        target: The function, as "module:function".
        imports: Modules to import before the arguments arrive, separated by commas.
    """
    for signum in _IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # in case a library unblocks them
    theirs: Connection[Any, Any] = Connection(connection)
    leave_pandas_out()
    module, _, name = target.partition(":")
    function = getattr(_imported(module, imports), name)
    try:
        with receiving():
            arguments = theirs.recv()
    except EOFError:
        return  # the parent has ended or closed the connection
    function(*arguments, theirs)


def _imported(module: str, more: str) -> ModuleType:
    # Garbage collections would take a third of torch's import and free nothing. The objects of the modules are frozen
    # afterwards
    with pause_garbage_collector():
        imported = importlib.import_module(module)
        for name in filter(None, more.split(",")):
            # The code that needs the module imports it again and reports the error
            with suppress(ImportError):
                importlib.import_module(name)
    gc.freeze()
    return imported
