"""Runs commands as forks of a process that has imported everything, for tests that need no new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from tests.warm_children import WarmChildren

# Variables that an interpreter reads at its start, or a library at its import
READ_EARLY = ("PYTHON", "LANG", "LC_", "LD_", "OMP_", "MKL_", "TORCH", "TRITON", "ARROW", "MALLOC", "COLUMNS")
LOOK_S = 0.002

Ran = subprocess.CompletedProcess[Any]
warm: WarmChildren | None = None  # while tests have one


class WarmCommand:
    """A fork that is `python -m module …`, with the parts of `subprocess.Popen` that tests use.

    /proc shows the command line of the forked process.
    """

    def __init__(
        self, forks: WarmChildren, words: Sequence[str], env: dict[str, str], folder: str,
        streams: Sequence[Any], text: bool, leads: bool,
    ) -> None:  # fmt: skip
        """Fork the command.

        Args:
            streams: files, descriptors, PIPE, or None for this process's own.
            leads: if True, it gets its own session.
        """
        self.returncode: int | None = None
        self._words = words
        pipes = [os.pipe() if stream == subprocess.PIPE else None for stream in streams]
        theirs = [
            pipe[1]
            if pipe
            else number
            if stream is None
            else stream
            if isinstance(stream, int)
            else stream.fileno()
            for number, (stream, pipe) in enumerate(zip(streams, pipes, strict=True))
        ]
        self.pid = forks.command(words, env, folder, theirs, leads)
        for pipe in filter(None, pipes):
            os.close(pipe[1])
        self.stdout, self.stderr = (
            os.fdopen(pipe[0], "r" if text else "rb") if pipe else None for pipe in pipes[1:]
        )

    def __enter__(self) -> WarmCommand:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in filter(None, (self.stdout, self.stderr)):
            stream.close()
        self.wait()

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code. Raises TimeoutExpired."""
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired([*self._words], timeout or 0.0)
            time.sleep(LOOK_S)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[Any, Any]:
        """Return its output after its end. Raises TimeoutExpired."""
        with ThreadPoolExecutor(2) as readers:
            read = [readers.submit(_rest, stream) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
        out, err = (each.result() for each in read)
        return out, err

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _rest(stream: IO[Any] | None) -> Any:
    if stream is None:
        return None
    with stream:
        return stream.read()


def start(
    command: Sequence[str], *, cwd: Any = None, env: dict[str, str] | None = None, stdin: Any = None,
    stdout: Any = None, stderr: Any = None, text: bool = False, start_new_session: bool = False,
    preexec_fn: Any = None,
) -> WarmCommand | subprocess.Popen[Any]:  # fmt: skip
    """Start a command like `subprocess.Popen`, as a fork if possible.

    In `make test-all`, and if an environment variable differs that is read early, it is a new interpreter.
    """
    if warm is None or [*command[:2]] != [sys.executable, "-m"] or _is_read_early(env):
        return subprocess.Popen(
            command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, text=text,
            start_new_session=start_new_session, preexec_fn=preexec_fn,
        )  # fmt: skip
    env = dict(os.environ) if env is None else env
    folder = os.path.realpath(cwd or os.getcwd())
    streams = stdin, stdout, stderr
    return WarmCommand(warm, [*map(str, command[2:])], env, folder, streams, text, start_new_session)


def _is_read_early(env: dict[str, str] | None) -> bool:
    """Return True if a variable differs from ours that a running process would not read again."""
    if env is None:
        return False
    differs = {name for name in {*env, *os.environ} if env.get(name) != os.environ.get(name)}
    return any(name.startswith(READ_EARLY) for name in differs - {"PYTHONPATH"})


def run(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    capture_output: bool = False,
    check: bool = False,
    **how: Any,
) -> Ran:
    """Run a command like `subprocess.run`."""
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(command, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    ran = subprocess.CompletedProcess(command, process.returncode or 0, out, err)
    if check:
        ran.check_returncode()
    return ran
