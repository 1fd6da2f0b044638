"""Facts about constraints are found once for each constraint, however many rows have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from batchinfer.core.sampling import SamplingParams

KEPT = 1024  # constraints that are remembered
_T = TypeVar("_T")


class PerConstraint(Generic[_T]):
    """`find` called once for each constraint, by its digest: its text may take a megabyte."""

    def __init__(self, find: Callable[[SamplingParams], _T]) -> None:
        self._find = find
        self._known: dict[bytes, _T] = {}

    def of(self, params: SamplingParams) -> _T:
        """Return the result of `find` for the constraint of `params`, which must have one."""
        key = params.constraint_digest
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = self._find(params)
        return self._known[key]
