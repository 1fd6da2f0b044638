"""Tasks of child processes in tests. The module imports little: children start fast and use little CPU time."""

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
    """Ignore the connection and never end."""
    time.sleep(SLEEP_S)


def greet(connection: Connection[Any, Any]) -> None:
    """Send a greeting and never end."""
    connection.send("here")
    time.sleep(SLEEP_S)


def echo(*arguments: Any) -> None:
    """Send back the arguments and the blocked signals."""
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
    """End after half of a message is sent."""
    break_the_next_message()
    connection.send("a message that is cut in half when it arrives")


def break_the_next_message() -> None:
    """Make the next send of this process end it halfway."""

    def half(self: Connection[Any, Any], data: bytes) -> None:
        os.write(self.fileno(), bytes(data[: len(data) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SLEEP_S)

    Connection._send = half  # type: ignore[attr-defined]


def limit_cpu_time() -> None:
    """Limit this process to 0.5 to 1.5 more seconds of CPU time."""
    soft = math.ceil(time.process_time() + 0.5)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 2))


def render_with_little_cpu_time(*arguments: Any) -> None:
    """Run a render worker, with little CPU time in the first LIMITED_MOST starts, counted in the file
    LIMITED_STARTS."""
    from batchinfer.input.prompts.render_worker import serve

    if _starts() < int(os.environ["LIMITED_MOST"]):
        limit_cpu_time()
    serve(*arguments)


def render_and_be_ended(*arguments: Any) -> None:
    """Run a render worker that signal ENDED_BY ends at the row "victim" in the first ENDED_MOST starts."""
    from batchinfer.input.prompts import render_worker

    if _starts() < int(os.environ["ENDED_MOST"]):
        whole = render_worker.Preparer.prepare

        def prepare(self: Any, chunk: Any, piece: Any = None) -> Any:
            build = self._builder.build

            def ended(row: Any) -> Any:
                if row["text"] == "victim":
                    os.kill(os.getpid(), int(os.environ["ENDED_BY"]))
                    time.sleep(SLEEP_S)
                return build(row)

            self._builder.build = ended
            return whole(self, chunk, piece)

        render_worker.Preparer.prepare = prepare  # type: ignore[method-assign]
    render_worker.serve(*arguments)


def render_and_be_ended_at_a_check(*arguments: Any) -> None:
    """Run a render worker that ENDED_BY ends while another process checks a constraint for it, in the first
    ENDED_MOST starts."""
    from batchinfer.input.prompts import prepare, render_worker

    if _starts() < int(os.environ["ENDED_MOST"]):

        def ended(*_: Any) -> None:
            os.kill(os.getpid(), int(os.environ["ENDED_BY"]))
            time.sleep(SLEEP_S)

        prepare.CheckedConstraints.check = ended  # type: ignore[method-assign]
    render_worker.serve(*arguments)


def check_constraints_and_be_ended(*arguments: Any) -> None:
    """Run a checker of constraints that signal ENDED_BY ends at a constraint, in the first ENDED_MOST starts."""
    from batchinfer.input.constraints import constraint_check

    if _starts() < int(os.environ["ENDED_MOST"]):
        limited = constraint_check._cpu_time

        def ended(within_s: float) -> Any:
            os.kill(os.getpid(), int(os.environ["ENDED_BY"]))
            return limited(within_s)

        constraint_check._cpu_time = ended  # type: ignore[assignment]
    constraint_check.serve(*arguments)


def answer_once_others_ended(connection: Connection[Any, Any]) -> None:
    """Send "answered", or be killed in the first ENDED_MOST starts."""
    if _starts() < int(os.environ["ENDED_MOST"]):
        os.kill(os.getpid(), int(os.environ["ENDED_BY"]))
    connection.send("answered")


def render_and_die_in_the_reply(*arguments: Any) -> None:
    """Run a render worker whose first start ends halfway through its first reply."""
    from batchinfer.input.prompts.render_worker import serve

    if not _starts():
        break_the_next_message()
    serve(*arguments)


def _starts() -> int:
    """Return the number of earlier starts, and count this one."""
    with open(os.environ["LIMITED_STARTS"], "a+b") as file:
        file.seek(0)
        starts = len(file.read())
        file.write(b".")
    return starts
