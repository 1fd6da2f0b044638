"""Answers that run in circles: found as their tokens come, in a time per token that does not grow with the answer."""

from __future__ import annotations

from array import array

REPEATS = 4  # a cycle that came so often is a loop


class LoopDetector:
    """Says of each token of an answer whether the last `least` tokens repeat a cycle of at most a quarter of them.

    It looks for a cycle once in half of `least` tokens, as a search takes a time in proportion to that. Where it finds
    one, it compares each token with the one a cycle before. That misses nothing: a loop is twice as long as what is
    searched, so that a search lies within it; and two cycles of a quarter cannot both fill a half (Fine and Wilf).
    """

    __slots__ = ("_begin", "_cycle", "_least", "_longest", "_next_search", "_since")

    def __init__(self, least: int, begin: int) -> None:
        """begin: the place of the answer's first token among the `tokens` of `closes`."""
        self._least, self._begin = max(least, REPEATS), begin
        self._longest = self._least // REPEATS  # tokens of the longest cycle
        self._cycle = 0  # tokens of the cycle that goes on; 0: none
        self._since = begin  # the place of the first token that belongs to it
        self._next_search = begin + 2 * self._longest

    def closes(self, tokens: array[int], end: int) -> bool:
        """Take the token before `end`, and say whether it makes a loop. To be asked of every token, in order."""
        cycle = self._cycle
        if cycle:
            if tokens[end - 1] == tokens[end - 1 - cycle]:
                return end - self._since >= self._least
            self._cycle, self._next_search = 0, end + 2 * self._longest
        elif end >= self._next_search:
            return self._search(tokens, end)
        return False

    def _search(self, tokens: array[int], end: int) -> bool:
        """Look for a cycle that fills the newest tokens, and for where it begins."""
        searched = 2 * self._longest
        self._next_search = end + searched
        since = end - searched
        cycle = self._cycle = shortest_cycle(tokens[since:end])
        if not cycle:
            return False
        first = max(self._begin, end - self._least)
        while since > first and tokens[since - 1] == tokens[since - 1 + cycle]:
            since -= 1
        self._since = since
        return end - since >= self._least


def shortest_cycle(tokens: array[int]) -> int:
    """Return the length of the shortest cycle that all tokens repeat at least twice; 0 if there is none."""
    data, size = tokens.tobytes(), tokens.itemsize
    head = data[: len(tokens) // 2 * size]
    at = data.find(head, 1)
    while at > 0:
        if at % size == 0:  # a match between two tokens says nothing
            return at // size if data[at:] == data[:-at] else 0
        at = data.find(head, at + 1)
    return 0
