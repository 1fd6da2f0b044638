"""Runs a function in a child process and retries once if the process dies."""

from __future__ import annotations

from typing import Any

from batchinfer.core.errors import OutOfMemory, Unavailable
from batchinfer.machine.spawning import Child, ChildExit, receiving
from batchinfer.machine.waiting import wait_for_message

_LEAVE_S = 10.0
_CONTINUES = "run the same command again"


class ChildDied(Exception):
    """The child process of an `ask_child` call died, and so did the child process that repeated its work.

    The cause is not a limit on memory or CPU time. Probably it is the arguments of the call.
    """

    def __init__(self, ended: ChildExit | None) -> None:
        super().__init__("closed its connection" if ended is None else str(ended))


def ask_child(what: str, target: str, *arguments: object, within_s: float) -> Any:
    """Run a function in a child process, and return the value that the function sends. Retry once if the process dies.

    Args:
        what: The name of the process for error messages.
        target: The function, as "module:function". Its last argument is its end of the pipe, through which it sends the
            value.
        arguments: The other arguments of the function.
        within_s: The time limit of each try, in seconds.

    Raises:
        ChildDied: The process died twice.
        Unavailable: The process did not answer in time, or reached its limit on CPU time.
        OutOfMemory: The process was killed, most likely because memory ran out.
    """
    ended: ChildExit | None = None
    silent = False
    for _ in range(2):
        with Child(target, *arguments) as child:
            try:
                with receiving():
                    if wait_for_message(child.connection, within_s):
                        return child.connection.recv()
                silent = True
            except EOFError:
                ended, silent = child.wait(_LEAVE_S), False
    if silent:
        raise Unavailable(f"{what} has not answered for {within_s:.0f} s; {_CONTINUES}")
    if ended is not None and ended.out_of_memory:
        raise OutOfMemory(f"{what} {ended}; free some memory, then {_CONTINUES}")
    if ended is not None and ended.out_of_cpu_time:
        raise Unavailable(f"{what} {ended}; raise it, then {_CONTINUES}")
    raise ChildDied(ended)
