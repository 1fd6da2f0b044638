"""Detects answers that repeat themselves, in constant time per token."""

from __future__ import annotations

from array import array

REPEATS = 4  # repetitions of a cycle that make a loop


class LoopDetector:
    """Detects that an answer repeats itself.

    A loop is a range of tokens at the end of the answer that repeats a short cycle. The range has at least `least`
    tokens (set in `__init__`), and the cycle at most a quarter of that.
    """

    __slots__ = ("_begin", "_cycle", "_least", "_longest", "_next_search", "_since")

    def __init__(self, least: int, begin: int) -> None:
        """Create a detector for one answer.

        Args:
            least: The minimum number of tokens of a loop.
            begin: The number of prompt tokens, which come before the answer in the sequence's tokens.
        """
        # Every n / 2 tokens, the newest n / 2 tokens are searched for a cycle. Every loop contains a full search
        # range, and two different cycles of at most n / 4 tokens cannot both fill it (theorem of Fine and Wilf).
        self._least, self._begin = max(least, REPEATS), begin
        self._longest = self._least // REPEATS  # maximum length of a cycle, in tokens
        self._cycle = 0  # length of the current cycle; 0: none
        self._since = begin  # index of the first token of the current cycle
        self._next_search = begin + 2 * self._longest

    def closes(self, tokens: array[int], end: int) -> bool:
        """Return True if the newest token of an answer completes a loop: a text that repeats a short cycle of tokens.

        It must be called for every token of the answer, in order.

        Args:
            tokens: The tokens of the sequence: prompt and answer, and possibly further tokens.
            end: The number of tokens up to and including the newest token of the answer.
        """
        cycle = self._cycle
        if cycle:
            if tokens[end - 1] == tokens[end - 1 - cycle]:
                return end - self._since >= self._least
            self._cycle, self._next_search = 0, end + 2 * self._longest
        elif end >= self._next_search:
            return self._search(tokens, end)
        return False

    def _search(self, tokens: array[int], end: int) -> bool:
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
    """Return the length of the shortest cycle whose repetition gives `tokens`, or 0 if there is none.

    The cycle must occur at least twice. The last repetition may be incomplete.
    """
    data, size = tokens.tobytes(), tokens.itemsize
    head = data[: len(tokens) // 2 * size]
    at = data.find(head, 1)
    while at > 0:
        if at % size == 0:  # other matches are not at the start of a token
            return at // size if data[at:] == data[:-at] else 0
        at = data.find(head, at + 1)
    return 0
