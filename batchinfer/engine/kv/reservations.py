"""Which contents of KV blocks waiting sequences will look for. Ints only."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class Reservations:
    """For each content the arrivals of the sequences that reserve it; a smaller arrival comes earlier."""

    def __init__(self) -> None:
        self.arrivals: dict[bytes, list[int]] = {}  # ascending

    def __contains__(self, content: bytes) -> bool:
        return content in self.arrivals

    def add(self, contents: Iterable[bytes], arrival: int) -> None:
        for content in contents:
            arrivals = self.arrivals.setdefault(content, [])
            if arrivals and arrival < arrivals[-1]:
                insort(arrivals, arrival)  # a preempted sequence is back
            else:
                arrivals.append(arrival)

    def remove(self, content: bytes, arrival: int) -> bool:
        """Whether nobody else reserves it."""
        arrivals = self.arrivals[content]
        del arrivals[bisect_left(arrivals, arrival)]
        if not arrivals:
            del self.arrivals[content]
        return not arrivals

    def count(self, content: bytes | None) -> int:
        """How many sequences reserve it."""
        return len(self.arrivals.get(content, ())) if content is not None else 0

    def first(self, content: bytes) -> int | None:
        """The arrival that comes first of those that reserve it."""
        arrivals = self.arrivals.get(content)
        return arrivals[0] if arrivals else None
