"""The tokens that rows make likelier or less likely: parts of a sampling plan that do not change while rows run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Pickled = tuple[Callable[..., Any], tuple[Any, ...]]


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
