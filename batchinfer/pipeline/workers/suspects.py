"""Suspects: rows that were in work when an engine died. A binary search finds the rows that kill engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

from batchinfer.core.request import Request


@dataclass(slots=True, eq=False)
class RowGroup:
    """Rows that an engine runs without other rows."""

    requests: list[Request]
    twin: RowGroup | None = None  # the other half of a group that died
    died_in: int | None = None  # the replica that a group of one row killed
    is_probe: bool = False  # a row that was answered before, which tests whether an engine works


def probe_of(answered: Request) -> RowGroup:
    """Return a copy of an answered row with another key, to test whether an engine works."""
    key = sha256(b"proof" + answered.key).digest()
    return RowGroup([replace(answered, key=key, shares_next=0)], is_probe=True)


class Suspects:
    """Groups of suspects that wait to run.

    A group that kills its engine is halved. If one half finishes, the cause is in the other half, which is halved again
    before it runs. So one bad row among n is found after log2(n) groups, and about half of them die.
    """

    def __init__(self) -> None:
        self._waiting: list[RowGroup] = []  # a stack: the last group runs next

    def __len__(self) -> int:
        """Return the number of waiting groups."""
        return len(self._waiting)

    def add(self, requests: Sequence[Request]) -> None:
        """Add rows that were in work when an engine died."""
        if requests:
            self._waiting.append(RowGroup([replace(request, shares_next=0) for request in requests]))

    def take(self, one: bool = False, not_of: int | None = None) -> RowGroup | None:
        """Remove and return the next group, or None if there is none.

        Args:
            one: Return a single row, preferably not one that already killed an engine.
            not_of: Skip single rows that killed this replica.
        """
        fit = [group for group in self._waiting if not_of is None or group.died_in != not_of]
        if not fit:
            return None
        group = next((far for far in fit if far.died_in is None), fit[0]) if one else fit[-1]
        self._waiting.remove(group)
        if one and len(group.requests) > 1:
            self.add(group.requests[1:])
            return RowGroup(group.requests[:1])
        return group

    def died(self, requests: Sequence[Request], engine: int) -> None:
        """Add the unfinished rows of a group that killed its engine: a single row as it is, others as two halves."""
        if len(requests) == 1:
            self._waiting.append(RowGroup(list(requests), died_in=engine))
        else:
            self._halve(requests)

    def finished(self, group: RowGroup) -> None:
        """Handle the end of a group without a death: its twin has the cause, and is halved."""
        twin = group.twin
        if twin in self._waiting and twin is not None and len(twin.requests) > 1:
            self._waiting.remove(twin)
            self._halve(twin.requests)

    def _halve(self, requests: Sequence[Request]) -> None:
        middle = len(requests) // 2
        first, second = RowGroup(list(requests[:middle])), RowGroup(list(requests[middle:]))
        first.twin, second.twin = second, first
        self._waiting += [second, first]
