"""The roll call of ranks that load: which of them are still heard."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from batchinfer.machine.waiting import Waited
from batchinfer.pipeline.workers.heartbeat import BEAT_S, STARTING_S

MISSED_S = 5 * BEAT_S  # that a rank may say nothing once it has


class RollCall:
    """Notes when each rank was heard, until it has loaded. One thread may note while another one asks."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._lock = threading.Lock()
        self._waited = {rank: Waited(most_s=2 * BEAT_S) for rank in ranks}
        self._started: set[int] = set()

    def heard(self, rank: int) -> None:
        """Note that a rank has said something."""
        with self._lock:
            self._started.add(rank)
            if rank in self._waited:
                self._waited[rank].again()

    def done(self, rank: int) -> None:
        """Note that a rank has loaded: whether it is at work shows elsewhere."""
        with self._lock:
            self._waited.pop(rank, None)

    def silent(self) -> int | None:
        """Return a rank that has said nothing for too long; to be asked every BEAT_S seconds."""
        with self._lock:
            late = [rank for rank, waited in self._waited.items() if waited.look() > self._limit_s(rank)]
        return min(late, default=None)

    def _limit_s(self, rank: int) -> float:
        return MISSED_S if rank in self._started else STARTING_S
