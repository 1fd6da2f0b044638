"""Changes of logits that do not depend on a row's text: biases, allowed tokens and bad words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Pickled = tuple[Callable[..., Any], tuple[Any, ...]]


class BadTokens:
    """Token sequences that an answer must not contain (bad words).

    If an answer ends with all tokens of a sequence except the last one, the last one is banned as the next token.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]]) -> None:
        self.always: list[int] = []  # sequences of a single token
        self._by_last_token: dict[int, list[tuple[list[int], int]]] = {}  # by the token before the banned one
        for *before, last in sequences:
            if before:
                self._by_last_token.setdefault(before[-1], []).append((before, last))
            else:
                self.always.append(last)

    @property
    def looks_back(self) -> bool:
        """True if the next banned tokens depend on the last tokens of the answer."""
        return bool(self._by_last_token)

    def banned_after(self, tokens: Ints, start: int, end: int) -> list[int]:
        """Return the tokens that must not come next in an answer.

        Args:
            tokens: The token ids of the prompt and the answer.
            start: The index of the answer's first token.
            end: The index after the answer's last token.
        """
        candidates = self._by_last_token.get(int(tokens[end - 1]), ()) if end > start else ()
        banned = (
            last
            for before, last in candidates
            if end - len(before) >= start and tokens[end - len(before) : end].tolist() == before
        )
        return [*self.always, *banned]


@lru_cache(maxsize=64)
def bad_tokens(sequences: tuple[tuple[int, ...], ...]) -> BadTokens:
    """Return the `BadTokens` of some token sequences.

    Results are cached, because the rows of a job usually have the same bad words.
    """
    return BadTokens(sequences)


class BiasedTokens(NamedTuple):
    """Biases that are added to the logits of n tokens, in the rows of a step that have biases.

    Attributes:
        rows: [n], the row of each token, as an index among the rows that get tokens, ascending.
        tokens: [n], the token ids, distinct within a row.
        biases: [n], the values to add.
    """

    rows: Ints
    tokens: Ints
    biases: NDArray[np.float32]

    @classmethod
    def of(cls, entries: list[tuple[int, tuple[tuple[int, float], ...]]]) -> BiasedTokens:
        """Create the arrays from a list of rows.

        Args:
            entries: For each row with biases: its index, ascending, and its pairs of (token id, bias).
        """
        rows = np.repeat([row for row, _ in entries], [len(own) for _, own in entries])
        pairs = [pair for _, own in entries for pair in own]
        tokens, biases = (np.array(column) for column in zip(*pairs, strict=True))
        return cls(rows.astype(np.int32), tokens.astype(np.int32), biases.astype(np.float32))

    def part(self, first: int, end: int) -> BiasedTokens | None:
        """Return the entries of the rows [first, end), as a micro-batch with renumbered rows needs them.

        The result is None if none of these rows has biases.
        """
        inside = slice(*np.searchsorted(self.rows, (first, end)).tolist())
        rows = self.rows[inside] - np.int32(first)
        return BiasedTokens(rows, self.tokens[inside], self.biases[inside]) if len(rows) else None

    def __reduce__(self) -> Pickled:
        return _biased, tuple(array.tobytes() for array in self)


class AllowedTokens(NamedTuple):
    """The tokens that rows with `allowed_token_ids` may get. Rows without entries may get all tokens.

    Attributes:
        rows: [n], the row of each token, as an index among the rows that get tokens, ascending.
        tokens: [n], the token ids, distinct within a row.
    """

    rows: Ints
    tokens: Ints

    @classmethod
    def of(cls, entries: list[tuple[int, tuple[int, ...]]]) -> AllowedTokens:
        """Create the arrays from a list of rows.

        Args:
            entries: For each row with `allowed_token_ids`: its index, ascending, and its allowed token ids.
        """
        rows = np.repeat([row for row, _ in entries], [len(own) for _, own in entries])
        return cls(rows.astype(np.int32), np.array([token for _, own in entries for token in own], np.int32))

    def part(self, first: int, end: int) -> AllowedTokens | None:
        """Return the entries of the rows [first, end), as a micro-batch with renumbered rows needs them.

        The result is None if none of these rows has entries.
        """
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
