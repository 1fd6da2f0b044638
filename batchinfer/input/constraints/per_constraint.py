"""Caches results per constraint, since many rows share one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from batchinfer.core.sampling import SamplingParams

KEPT = 1024  # maximum number of cached constraints
_T = TypeVar("_T")


class PerConstraint(Generic[_T]):
    """Caches the results of a function of constraints, since many requests share a constraint.

    The cache is keyed by a digest, since a constraint may have a megabyte.

    Args:
        find: Returns the result for the constraint of the given parameters.
    """

    def __init__(self, find: Callable[[SamplingParams], _T]) -> None:
        self._find = find
        self._results: dict[bytes, _T] = {}

    def of(self, params: SamplingParams) -> _T:
        """Return the result for the constraint of `params`, cached or computed. `params` must have a constraint."""
        key = params.constraint_digest
        if key not in self._results:
            if len(self._results) >= KEPT:
                self._results.clear()
            self._results[key] = self._find(params)
        return self._results[key]
