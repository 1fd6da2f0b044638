"""Limits the time that a run waits for resources of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable

from batchinfer.core.errors import Unavailable
from batchinfer.machine.waiting import WaitTimer
from batchinfer.pipeline.workers.transport import Transport
from batchinfer.pipeline.workers.worker_handle import CONTINUES

FIRST_S = 10.0  # seconds until the first notice
TELL_S = 60.0  # seconds between two notices


class ResourceWait:
    """Measures how long all engines of a run have been waiting for resources of a cluster, and notifies the user."""

    def __init__(self, transport: Transport, notice: Callable[[str], None]) -> None:
        self._transport, self._notice = transport, notice
        self._waited, self._tell_at_s = WaitTimer(), FIRST_S

    def update(self, all_wait: bool) -> None:
        """Measure how long all engines have been waiting for resources. Call it regularly.

        While they wait, the user gets a notice about once a minute.

        Args:
            all_wait: Whether all engines wait for resources now.

        Raises:
            Unavailable: All engines have waited for `transport.wait_s` seconds.
        """
        if not all_wait:
            self._waited.reset()
            self._tell_at_s = FIRST_S
            return
        limit_s, waited_s = self._transport.wait_s, self._waited.update()
        if waited_s >= limit_s:
            raise Unavailable(
                f"there was no {self._transport.wanted} for {limit_s:.0f} s (ray.wait_s); {CONTINUES}"
            )
        if waited_s >= self._tell_at_s:
            self._tell_at_s += TELL_S
            self._notice(f"waiting up to {limit_s - waited_s:.0f} s for a {self._transport.wanted}")
