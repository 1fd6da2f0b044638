"""The tokens that rows make likelier or less likely: parts of a sampling plan that do not change while rows run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Pickled = tuple[Callable[..., Any], tuple[Any, ...]]


class BadTokens:
    """Tokens that an answer may not have one behind the other: the last of them is barred where the others were just
    said."""

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self.always: list[int] = []  # those that are barred by themselves
        self._behind: dict[int, list[tuple[list[int], int]]] = {}  # by the last token before the barred one
        for *before, last in sequences:
            if before:
                self._behind.setdefault(before[-1], []).append((before, last))
            else:
                self.always.append(last)

    @property
    def looks_back(self) -> bool:
        """Whether what is barred depends on the tokens before."""
        return bool(self._behind)

    def behind(self, tokens: Ints, start: int, end: int) -> list[int]:
        """Return the tokens that may not follow the answer that is tokens[start:end]."""
        known = self._behind.get(int(tokens[end - 1]), ()) if end > start else ()
        said = (
            last
            for before, last in known
            if end - len(before) >= start and tokens[end - len(before) : end].tolist() == before
        )
        return [*self.always, *said]


@lru_cache(maxsize=64)
def bad_tokens(sequences: tuple[tuple[int, ...], ...]) -> BadTokens:
    """Return those of some parameters. They are remembered: rows mostly have the same."""
    return BadTokens(sequences)


class BiasedTokens(NamedTuple):
    """Say what is added to the logits of which tokens, for all rows that ask for it."""

    rows: Ints  # (n,): the sampled row of each token, ascending
    tokens: Ints  # (n,): those of a row differ
    biases: NDArray[np.float32]  # (n,)

    @classmethod
    def of(cls, asked: list[tuple[int, tuple[tuple[int, float], ...]]]) -> BiasedTokens:
        """Make it of rows, ascending, and the tokens of each with their biases."""
        rows = np.repeat([row for row, _ in asked], [len(own) for _, own in asked])
        pairs = [pair for _, own in asked for pair in own]
        tokens, biases = (np.array(column) for column in zip(*pairs, strict=True))
        return cls(rows.astype(np.int32), tokens.astype(np.int32), biases.astype(np.float32))

    def part(self, first: int, end: int) -> BiasedTokens | None:
        """Return those of the rows [first, end), which then begin at 0."""
        inside = slice(*np.searchsorted(self.rows, (first, end)).tolist())
        rows = self.rows[inside] - np.int32(first)
        return BiasedTokens(rows, self.tokens[inside], self.biases[inside]) if len(rows) else None

    def __reduce__(self) -> Pickled:
        return _biased, tuple(array.tobytes() for array in self)


class AllowedTokens(NamedTuple):
    """The tokens that rows may get at all, of all rows that name some."""

    rows: Ints  # (n,): the sampled row of each token, ascending
    tokens: Ints  # (n,): those of a row differ

    @classmethod
    def of(cls, asked: list[tuple[int, tuple[int, ...]]]) -> AllowedTokens:
        """Make it of rows, ascending, and the tokens of each."""
        rows = np.repeat([row for row, _ in asked], [len(own) for _, own in asked])
        return cls(rows.astype(np.int32), np.array([token for _, own in asked for token in own], np.int32))

    def part(self, first: int, end: int) -> AllowedTokens | None:
        """Return those of the rows [first, end), which then begin at 0."""
        inside = slice(*np.searchsorted(self.rows, (first, end)).tolist())
        rows = self.rows[inside] - np.int32(first)
        return AllowedTokens(rows, self.tokens[inside]) if len(rows) else None

    def __reduce__(self) -> Pickled:
        return _allowed, tuple(array.tobytes() for array in self)


def _allowed(rows: bytes, tokens: bytes) -> AllowedTokens:
    return AllowedTokens(np.frombuffer(rows, np.int32), np.frombuffer(tokens, np.int32))


def _biased(rows: bytes, tokens: bytes, biases: bytes) -> BiasedTokens:
    values = np.frombuffer(biases, np.float32)
    return BiasedTokens(np.frombuffer(rows, np.int32), np.frombuffer(tokens, np.int32), values)
