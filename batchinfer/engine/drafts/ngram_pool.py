"""Remembers which token the model said behind two others: the n-grams of lookahead decoding (Fu et al., 2024)."""

from __future__ import annotations

MOST_NGRAMS = 1 << 15  # that are remembered: 5 MB


class NgramPool:
    """Knows the newest token behind each pair of tokens. Longer n-grams are pairs that overlap. Once there are too
    many, the oldest half is forgotten."""

    def __init__(self, most: int = MOST_NGRAMS) -> None:
        self._most = most
        self._new: dict[int, int] = {}  # by pair
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def learn(self, before: int, last: int, token: int) -> None:
        """Remember that the model said `token` behind these two."""
        self._new[_pair(before, last)] = token
        if len(self._new) >= self._most // 2:
            self._old, self._new = self._new, {}

    def continued(self, before: int, last: int, most: int) -> list[int]:
        """Return what it knows behind two tokens, one token behind the other, up to `most`."""
        found = list[int]()
        while len(found) < most:
            pair = _pair(before, last)
            token = self._new.get(pair)
            if token is None:
                token = self._old.get(pair)
            if token is None:
                break
            found.append(token)
            before, last = last, token
        return found


def _pair(before: int, last: int) -> int:
    return before << 32 | last
