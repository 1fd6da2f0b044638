"""Forks child processes from one that has imported everything, which saves a second of CPU time per job.

A job in a test's process starts children, whose imports take the main part of the job's time. Here one
process imports everything once. Each child is a fork of it, with the descriptors, environment, folder and
blocked signals of a new interpreter. Commands that tests start by `tests.warm_commands`, and their children,
are forks, too. Other commands have usual children, and so do all in `make test-all`.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).parents[1]
# What commands and children of jobs import; nothing that reads its environment when it is imported, as Hugging Face's
# packages do
MODULES = (
    "batchinfer.cli",
    "batchinfer.input.constraints.constrained",
    "batchinfer.input.constraints.constraint_check",
    "batchinfer.input.prompts.render_worker",
    "batchinfer.input.tokenizer.stop_strings",
    "batchinfer.engine.load.build",
    "batchinfer.pipeline.run",
    "batchinfer.pipeline.workers.worker",
    "batchinfer_kernels.cpu.spinning",
    "tests.batchinfer.costed_engine",
    "tests.batchinfer.dying_engine",
    "tests.batchinfer.dying_rank",
    "tests.fake_engine",
    "tests.scripted_engine",
)
WORKER = "batchinfer.pipeline.workers.worker:main"
MESSAGE_BYTES = 1 << 20
ABOVE = 100  # descriptors that no test has
MOST_DESCRIPTORS = 200  # of a child
PDEATHSIG, CHILD_SUBREAPER = 1, 36  # of prctl


_ENVIRONMENT = dict(os.environ)


class HasFileno(Protocol):
    """A file, as `os.fsync` takes it."""

    def fileno(self) -> int: ...


class WarmChildren:
    """Forks child processes. `spawn` replaces `spawning._spawn`. The forking process starts at the first use."""

    def __init__(self, orders: socket.socket | None = None) -> None:
        """`orders` is the socket of a forking process that already runs."""
        self._lock = threading.Lock()
        self._forks: subprocess.Popen[bytes] | None = None
        self._runs = orders is not None
        if orders is None:
            orders, self._theirs = _ends()
        self._orders = orders

    def __enter__(self) -> WarmChildren:
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.close()
        if not self._runs:
            self._theirs.close()
        if self._forks is not None:
            self._forks.wait()

    def spawn(self, target: str, connection: int, files: Sequence[int], imports: Sequence[str]) -> int:
        """Fork a child of this process that runs `target` with these descriptors, and return its pid."""
        descriptors = [0, 1, 2, connection, *files]
        order = self._order(dict(os.environ), os.getcwd(), descriptors)
        return self._asked(
            {**order, "target": target, "imports": ",".join(imports), "path": [*sys.path]}, descriptors
        )

    def command(
        self, words: Sequence[str], env: dict[str, str], folder: str, streams: Sequence[int], leads: bool
    ) -> int:
        """Fork a child that is `python -m words` with these standard streams, and return its pid.

        Args:
            leads: if True, it gets its own session.
        """
        return self._asked(
            {**self._order(env, folder, [0, 1, 2]), "words": [*words], "leads": leads}, streams
        )

    def _order(self, env: dict[str, str], folder: str, descriptors: list[int]) -> dict[str, Any]:
        return {
            "descriptors": descriptors,
            "parent": os.getpid(),
            "environment": env,
            "folder": folder,
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        }

    def _asked(self, order: dict[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock:
            if not self._runs:
                self._forks = self._started()
                self._runs = True
            _prctl(CHILD_SUBREAPER, 1)  # children of a forked fork become children of this process
            try:
                socket.send_fds(self._orders, [pickle.dumps(order)], descriptors)
                return int(self._orders.recv(MESSAGE_BYTES))
            finally:
                _prctl(CHILD_SUBREAPER, 0)

    def _started(self) -> subprocess.Popen[bytes]:
        end = self._theirs.fileno()
        command = [sys.executable, "-P", "-m", "tests.warm_children", str(end)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        started = subprocess.Popen(command, pass_fds=[end], cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
        self._theirs.close()
        return started


def _ends() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _prctl(what: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(what, *map(ctypes.c_ulong, (value, 0, 0, 0))) != 0:
        raise OSError(f"prctl({what}) failed")


def unflushed(fd: int | HasFileno) -> None:
    """Replace `os.fsync` without waiting for the disk. Raises OSError for a closed descriptor."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


def serve(orders: socket.socket) -> None:
    """Import everything, and fork on request, until the requesting process has ended."""
    os.fsync = unflushed
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else each fork would copy what the collector looks at
    _fork_as_asked(orders)


def _fork_as_asked(orders: socket.socket) -> None:
    while True:
        data, descriptors, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, MOST_DESCRIPTORS)
        if not data:
            return
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                _live(orders, pickle.loads(data), descriptors)
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _live(orders: socket.socket, order: dict[str, Any], descriptors: list[int]) -> None:
    """Run the child from its start to its end."""
    code = 1
    try:
        if "words" in order or order["target"] == WORKER:  # whose other ranks are its children
            _have_children(descriptors)
        _become(orders, order, descriptors)
        if "words" in order:
            _run(order["words"])
        else:
            run_child = importlib.import_module("batchinfer.machine.spawning").run_child
            run_child(order["descriptors"][3], order["target"], order["imports"])
        code = 0
    except SystemExit as leaves:
        code = leaves.code if isinstance(leaves.code, int) else int(leaves.code is not None)
        if leaves.code is not None and not isinstance(leaves.code, int):
            print(leaves.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a program
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _have_children(descriptors: Sequence[int]) -> None:
    """Keep a forking process for the command's own children, before the command runs."""
    ours, theirs = _ends()
    command = os.getpid()
    if os.fork() == 0:
        _prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() != command:
            os._exit(1)
        for signum in _deaf_to():
            signal.signal(signum, signal.SIG_IGN)
        ours.close()
        for descriptor in descriptors:
            os.close(descriptor)
        _fork_as_asked(theirs)
        os._exit(0)
    theirs.close()
    spawning = importlib.import_module("batchinfer.machine.spawning")
    spawning._spawn = WarmChildren(ours).spawn  # type: ignore[attr-defined]


def _become(orders: socket.socket, order: dict[str, Any], descriptors: list[int]) -> None:
    """Become a child of the requesting process, with its state."""
    while os.getppid() != order["parent"]:
        time.sleep(0.0005)
    if "words" not in order:
        _prctl(PDEATHSIG, signal.SIGKILL)
        if os.getppid() != order["parent"]:
            os._exit(1)
    elif order["leads"]:
        os.setsid()
    deaf_to = () if "words" in order else _deaf_to()
    signal.pthread_sigmask(signal.SIG_SETMASK, {*order["blocked"], *deaf_to})
    orders.send(str(os.getpid()).encode())
    orders.close()
    kept = [fcntl.fcntl(number, fcntl.F_DUPFD, ABOVE) for number in descriptors]
    for number in descriptors:
        os.close(number)
    for number, wanted in zip(kept, order["descriptors"], strict=True):
        os.dup2(number, wanted, inheritable=wanted <= 2)
        os.close(number)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    sys.path[:] = order.get("path") or _path_of(order)


def _path_of(order: dict[str, Any]) -> list[str]:
    """Return the folders where `python -m` would search for modules."""
    named, others = (
        env.get("PYTHONPATH", "").split(os.pathsep) for env in (order["environment"], _ENVIRONMENT)
    )
    return [order["folder"], *filter(None, named), *(one for one in sys.path if one not in others)]


def _run(words: Sequence[str]) -> None:
    """Run `python -m words`, with standard streams like a new interpreter's."""
    for signum, action in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        signal.signal(signum, action)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _deaf_to() -> tuple[int, ...]:
    deaf: tuple[int, ...] = importlib.import_module("batchinfer.machine.spawning")._IGNORED_SIGNALS
    return deaf


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
