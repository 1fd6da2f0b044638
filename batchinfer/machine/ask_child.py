"""One question to a process of its own, which may be ended by anything: then another one is asked."""

from __future__ import annotations

from typing import Any

from batchinfer.core.errors import OutOfMemory, Unavailable
from batchinfer.machine.spawning import Child, Ended, receiving
from batchinfer.machine.waiting import comes

_LEAVE_S = 10.0
_CONTINUES = "run the same command again"


class Died(Exception):
    """Two processes ended at the same question, and not for want of memory or of time: it is the question's fault."""

    def __init__(self, ended: Ended | None) -> None:
        super().__init__("closed its connection" if ended is None else str(ended))


def ask_child(what: str, target: str, *arguments: object, within_s: float) -> Any:
    """Return what `target`, as in `Child`, sends. `what` names the process for people.

    Raises Died, Unavailable and OutOfMemory: the latter two say nothing of what was asked.
    """
    ended: Ended | None = None
    silent = False
    for _ in range(2):
        with Child(target, *arguments) as child:
            try:
                with receiving():
                    if comes(child.connection, within_s):
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
    raise Died(ended)
