"""Engines that have lost a node, and wait until another one takes its place."""

from __future__ import annotations

from collections.abc import Callable

from batchinfer.core.errors import Unavailable
from batchinfer.machine.waiting import Waited
from batchinfer.pipeline.workers.replica import Replica
from batchinfer.pipeline.workers.transport import Transport
from batchinfer.pipeline.workers.worker_handle import CONTINUES

TELL_S = 60.0  # between lines that say what a run waits for


class Vacancies:
    """The engines that cannot be started until a node joins. While other engines work they wait as long as the run
    lasts; where no engine is left, `transport.patience_s` is the limit. `notice` hears now and then what is missing."""

    def __init__(self, transport: Transport, notice: Callable[[str], None]) -> None:
        self._transport, self._notice = transport, notice
        self._waiting: list[Replica] = []
        self._alone = Waited()  # for which no engine has been left since the last one was lost
        self._told_s = 0.0

    def __len__(self) -> int:
        """Return how many engines wait."""
        return len(self._waiting)

    def add(self, replica: Replica) -> None:
        """Have an engine wait, whose process is closed."""
        self._waiting.append(replica)
        self._alone.again()
        self._told_s = 0.0

    def clear(self) -> None:
        """Let all of them wait no longer: they are not needed."""
        self._waiting.clear()

    def take_filled(self) -> list[Replica]:
        """Return the engines that can be started again, which wait no longer."""
        found = [replica for replica in self._waiting if not self._missing(replica)]
        self._waiting = [replica for replica in self._waiting if replica not in found]
        return found

    def look(self, alone: bool) -> None:
        """Note that time has passed. alone: no other engine is left. Raises Unavailable when that has lasted too
        long."""
        if not (alone and self._waiting):
            return
        limit_s, waited_s = self._transport.patience_s, self._alone.look()
        if waited_s >= limit_s:
            raise Unavailable(
                f"{self._all_missing()}, and no other has joined in its place within {limit_s:.0f} s "
                f"(engine.nodes.wait_s); {CONTINUES}"
            )
        if waited_s >= self._told_s:
            self._told_s += TELL_S
            left_s = limit_s - waited_s
            self._notice(f"{self._all_missing()}: waiting up to {left_s:.0f} s for another one to join")

    def _missing(self, replica: Replica) -> str:
        return self._transport.missing(replica.spec)

    def _all_missing(self) -> str:
        return ", ".join(dict.fromkeys(filter(None, map(self._missing, self._waiting))))
