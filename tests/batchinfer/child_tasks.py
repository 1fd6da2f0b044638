"""What child processes do in tests. It imports little: children start fast, and have used hardly any CPU time."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

SLEEP_S = 120.0


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


def limit_cpu_time() -> None:
    """A second or two from here."""
    soft = math.ceil(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 2))


def render_with_little_cpu_time(*arguments: Any) -> None:
    """A render worker with such a limit in the first LIMITED_MOST starts, which the file LIMITED_STARTS counts."""
    from batchinfer.data.render_worker import serve

    with open(os.environ["LIMITED_STARTS"], "a+b") as file:
        file.seek(0)
        starts = len(file.read())
        file.write(b".")
    if starts < int(os.environ["LIMITED_MOST"]):
        limit_cpu_time()
    serve(*arguments)
