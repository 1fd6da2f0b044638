"""The wait of a run whose engines have no resources."""

from __future__ import annotations

from collections.abc import Callable

from batchinfer.core.errors import Unavailable
from batchinfer.machine.waiting import Waited
from batchinfer.pipeline.workers.transport import Transport
from batchinfer.pipeline.workers.worker_handle import CONTINUES

FIRST_S = 10.0  # an engine that starts at once has nothing to say
TELL_S = 60.0  # between two lines about the wait


class Vacancies:
    """Limits the time for which no engine of a run has resources. `notice` gets one line per minute."""

    def __init__(self, transport: Transport, notice: Callable[[str], None]) -> None:
        self._transport, self._notice = transport, notice
        self._waited, self._tell_at_s = Waited(), FIRST_S

    def look(self, all_wait: bool) -> None:
        """Note that time has passed. Raises Unavailable after `transport.wait_s`.

        Args:
            all_wait: Whether all engines wait for resources.
        """
        if not all_wait:
            self._waited.again()
            self._tell_at_s = FIRST_S
            return
        limit_s, waited_s = self._transport.wait_s, self._waited.look()
        if waited_s >= limit_s:
            raise Unavailable(
                f"there was no {self._transport.wanted} for {limit_s:.0f} s (ray.wait_s); {CONTINUES}"
            )
        if waited_s >= self._tell_at_s:
            self._tell_at_s += TELL_S
            self._notice(f"waiting up to {limit_s - waited_s:.0f} s for a {self._transport.wanted}")
