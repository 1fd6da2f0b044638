"""What child processes do in tests. It imports little: children start fast, and have used hardly any CPU time."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

SLEEP_S = 600.0


def sleep(connection: Connection[Any, Any]) -> None:
    """Neither read the connection nor end."""
    time.sleep(SLEEP_S)


def greet(connection: Connection[Any, Any]) -> None:
    """Say that it runs, and then do not end."""
    connection.send("here")
    time.sleep(SLEEP_S)


def echo(*arguments: Any) -> None:
    """Send back what came, and which signals are blocked."""
    *values, connection = arguments
    connection.send((values, sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))))


def end(how: str, connection: Connection[Any, Any]) -> None:
    """End with an exit status, by "signal N", or by the soft limit on "cpu" time."""
    if how == "cpu":
        limit_cpu_time()
        while True:
            pass
    if how.startswith("signal"):
        os.kill(os.getpid(), int(how.removeprefix("signal ")))
        time.sleep(SLEEP_S)
    os._exit(int(how))


def die_in_a_message(connection: Connection[Any, Any]) -> None:
    """End when half of a message is sent."""
    break_the_next_message()
    connection.send("a message of which the other side gets the first half")


def break_the_next_message() -> None:
    """Whatever this process sends next ends it halfway."""

    def half(self: Connection[Any, Any], data: bytes) -> None:
        os.write(self.fileno(), bytes(data[: len(data) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SLEEP_S)

    Connection._send = half  # type: ignore[attr-defined]


def limit_cpu_time() -> None:
    """A second or two from here."""
    soft = math.ceil(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 2))


def render_with_little_cpu_time(*arguments: Any) -> None:
    """A render worker with such a limit in the first LIMITED_MOST starts, which the file LIMITED_STARTS counts."""
    from batchinfer.data.prompts.render_worker import serve

    if _starts() < int(os.environ["LIMITED_MOST"]):
        limit_cpu_time()
    serve(*arguments)


def render_and_die_in_the_reply(*arguments: Any) -> None:
    """A render worker whose first start, counted in the same way, ends halfway through its first reply."""
    from batchinfer.data.prompts.render_worker import serve

    if not _starts():
        break_the_next_message()
    serve(*arguments)


def _starts() -> int:
    """How many there were before this one."""
    with open(os.environ["LIMITED_STARTS"], "a+b") as file:
        file.seek(0)
        starts = len(file.read())
        file.write(b".")
    return starts
