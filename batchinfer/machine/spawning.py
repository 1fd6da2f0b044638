"""Child processes: a terminal's signals do not reach them, and none of them outlives its parent."""

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

from batchinfer.core.errors import known
from batchinfer.machine.absent_pandas import leave_pandas_out
from batchinfer.machine.garbage import not_collecting

# A terminal sends these to the whole group, also to a child that is still importing: they are blocked from its first
# instruction on, because its parent decides what ends it.
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.01

# A child's first lines, before anything that takes time: the kernel is to kill it with its parent (1:
# PR_SET_PDEATHSIG). A parent that died before that was asked for is no longer the parent.
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
class Ended:
    """How a child ended. `code`: its exit status, or minus the signal that ended it; None: the system does not tell."""

    code: int | None
    cpu_s: float = 0.0

    @property
    def out_of_cpu_time(self) -> bool:
        """Whether the limit on CPU time ended it. Where the soft limit equals the hard one the kernel sends SIGKILL."""
        if self.code == -signal.SIGXCPU:
            return True
        limit = cpu_limit_s()
        return self.code == -signal.SIGKILL and limit is not None and self.cpu_s >= limit - 1

    @property
    def out_of_memory(self) -> bool:
        """Whether it was killed, and not for CPU time: as a rule by the kernel, when memory has run out."""
        return self.code == -signal.SIGKILL and not self.out_of_cpu_time

    def __str__(self) -> str:
        if self.out_of_cpu_time:
            limit = cpu_limit_s()
            seconds = "" if limit is None else f" of {limit} s"
            return f"reached the limit{seconds} on a process's CPU time (RLIMIT_CPU; `ulimit -t` shows it)"
        if self.out_of_memory:
            return "was killed (signal 9, SIGKILL), most likely by the kernel because memory ran out"
        if self.code is None:
            return "ended, and the system does not tell how"
        if self.code < 0:
            return f"ended by signal {-self.code} ({signal.Signals(-self.code).name})"
        return f"ended with exit status {self.code}"


def cpu_limit_s() -> int | None:
    """Seconds of CPU time after which the system ends a process; None: no limit."""
    limits = [limit for limit in resource.getrlimit(resource.RLIMIT_CPU) if limit != resource.RLIM_INFINITY]
    return min(limits) if limits else None


@contextmanager
def receiving() -> Iterator[None]:
    """Make `recv` and `recv_bytes` raise EOFError when the other process is gone, at whatever instant it ended.

    In the middle of a message they raise a plain OSError, and a ConnectionResetError where something was left unread.
    """
    try:
        yield
    except OSError as error:
        raise EOFError(f"the other process is gone: {error}") from error


class Child:
    """A Python process that calls `target`, "module:function", with `arguments` and its end of `connection`.

    On Linux it is killed when the *thread* that made it ends: make it in one that lives as long as the child is to.
    Elsewhere it has to leave when its connection ends. `files` are descriptors that it has too, by the same numbers.
    """

    def __init__(self, target: str, *arguments: object, files: Sequence[int] = ()) -> None:
        self._start(target, files, ())
        self.begin(*arguments)

    @classmethod
    def standing_by(cls, target: str, imports: Sequence[str]) -> Child:
        """Start a child whose arguments are not known yet: it imports these modules, and waits for `begin`."""
        child = cls.__new__(cls)
        child._start(target, (), imports)
        return child

    def _start(self, target: str, files: Sequence[int], imports: Sequence[str]) -> None:
        self.connection, theirs = Pipe()
        self._ended: Ended | None = None
        with theirs:
            self.pid = _spawn(target, theirs.fileno(), files, imports)

    def begin(self, *arguments: object) -> None:
        """Have it call its target with these arguments; once."""
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it died: whoever waits for it learns how
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

    def wait(self, within_s: float) -> Ended | None:
        """Wait that many seconds for its end, and return how it ended; None if it still runs."""
        deadline = time.monotonic() + within_s
        while self._ended is None:
            try:
                pid, status, used = os.wait4(self.pid, os.WNOHANG)
            except ChildProcessError:  # nobody keeps what is told of it: SIGCHLD is ignored here
                self._ended = Ended(None)
                break
            if pid:
                self._ended = Ended(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(_LOOK_S)
        return self._ended

    @property
    def alive(self) -> bool:
        return self.wait(0) is None

    def kill(self) -> None:
        """End it now, if it still runs, and wait until it has."""
        while self.alive:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(1.0)

    def close(self) -> None:
        """Kill it if it still runs; safe to call twice."""
        self.kill()
        self.connection.close()


def _spawn(target: str, connection: int, files: Sequence[int], imports: Sequence[str]) -> int:
    """The pid of a new interpreter like this one, which has these descriptors of ours and no other."""
    options = ["-P", *(["-I"] if sys.flags.isolated else []), *(["-B"] if sys.dont_write_bytecode else [])]
    options += [f"-W{warning}" for warning in sys.warnoptions]
    arguments = [str(os.getpid()), str(connection), target, ",".join(imports), *sys.path]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ()) | set(_DEAF_TO)
    kept = (connection, *files)
    try:
        for number in kept:
            os.set_inheritable(number, True)
        command = [sys.executable, *options, "-c", _BOOT, *arguments]
        return os.posix_spawn(sys.executable, command, os.environ, setsigmask=blocked)
    except BlockingIOError as error:
        raise known(error) from error
    finally:
        for number in kept:
            os.set_inheritable(number, False)


def run_child(connection: int, target: str, imports: str) -> None:
    """Do, in the child, what it was started for. `imports`: the modules that it imports meanwhile, with commas."""
    for signum in _DEAF_TO:
        signal.signal(signum, signal.SIG_IGN)  # also should somebody unblock them
    theirs: Connection[Any, Any] = Connection(connection)
    leave_pandas_out()
    module, _, name = target.partition(":")
    function = getattr(_imported(module, imports), name)
    try:
        with receiving():
            arguments = theirs.recv()
    except EOFError:
        return  # the parent has ended, or wants nothing any more
    function(*arguments, theirs)


def _imported(module: str, more: str) -> ModuleType:
    """Import a module and more of them. The garbage collector, which finds nothing to free in modules, would take a
    third of torch's import; what they have made is never looked at again."""
    with not_collecting():
        imported = importlib.import_module(module)
        for name in filter(None, more.split(",")):
            with suppress(ImportError):  # who needs it imports it again, and tells why that fails
                importlib.import_module(name)
    gc.freeze()
    return imported
