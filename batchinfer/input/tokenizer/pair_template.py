"""The tokens and token types that a tokenizer adds around a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Self

_PROBES = ("a", "b")  # texts that are encoded to find the template
_NOT_IN_TURN = "the tokenizer does not encode a pair as the first text followed by the second"
# Supported orders of the first text (0), the second text (1) and added tokens (None)
_ORDERS = [[0, 1], [None, 0, 1], [0, None, 1], [0, 1, None], [None, 0, None, 1], [None, 0, 1, None]]
_ORDERS += [[0, None, 1, None], [None, 0, None, 1, None]]


class NoPairs(ValueError):
    """Raised if a tokenizer does not encode a pair of texts as the tokens of the first text and then of the second."""


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The special tokens that a tokenizer adds to a pair of texts, such as [CLS] and [SEP] of BERT.

    Args:
        before: Tokens before the first text.
        between: Tokens between the texts.
        behind: Tokens after the second text.
        typed: The number of tokens in `between` that have type 0, as the first text. The other tokens in `between`,
            and all after them, have type 1. None: all tokens of the pair have type 0.
    """

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    typed: int | None

    @classmethod
    def of(cls, rust: Any) -> Self:
        """Find out which tokens a tokenizer adds to a pair, by encoding two short texts.

        Args:
            rust: The `tokenizers.Tokenizer`.

        Raises:
            NoPairs: The tokenizer encodes pairs in an unsupported way.
        """
        found, other = (cls._read(rust.encode(*texts)) for texts in (_PROBES, _PROBES[::-1]))
        if found != other:
            raise NoPairs(_NOT_IN_TURN)
        return found

    @classmethod
    def _read(cls, found: Any) -> Self:
        runs = [(of, len([*run])) for of, run in groupby(found.sequence_ids)]
        if [of for of, _ in runs] not in _ORDERS:
            raise NoPairs(_NOT_IN_TURN)
        sizes = dict(zip(_places([of for of, _ in runs]), (size for _, size in runs), strict=True))
        start = sizes.get("before", 0)
        middle = start + sizes["first"]
        second = middle + sizes.get("between", 0)
        end, ids = second + sizes["second"], found.ids
        typed = _typed(found.type_ids, middle)
        return cls(
            tuple(ids[:start]),
            tuple(ids[middle:second]),
            tuple(ids[end:]),
            None if typed is None else typed - middle,
        )

    @property
    def added(self) -> int:
        """The number of special tokens that a pair of texts gets."""
        return len(self.before) + len(self.between) + len(self.behind)

    def join(self, first: Sequence[int], second: Sequence[int]) -> list[int]:
        """Return the tokens of a pair, including the special tokens.

        Args:
            first: The tokens of the first text.
            second: The tokens of the second text.
        """
        return [*self.before, *first, *self.between, *second, *self.behind]

    def second_segment(self, first: Sequence[int], second: Sequence[int]) -> int:
        """Return the position in the joined pair from which tokens have type 1, or 0 if all tokens have type 0.

        Args:
            first: The tokens of the first text.
            second: The tokens of the second text.
        """
        if self.typed is None:
            return 0
        place = len(self.before) + len(first) + self.typed
        return place if place < self.added + len(first) + len(second) else 0


def _places(order: list[int | None]) -> list[str]:
    first, second = order.index(0), order.index(1)
    names = {first: "first", second: "second"}
    return [
        names.get(at, "before" if at < first else "between" if at < second else "behind")
        for at in range(len(order))
    ]


def _typed(types: Sequence[int], middle: int) -> int | None:
    if not any(types):
        return None
    first = next(at for at, of in enumerate(types) if of)
    if first < middle or [*types[first:]] != [1] * (len(types) - first):
        raise NoPairs(
            f"the tokenizer gives two texts the token types {[*types]}, and computed are 0 … 0 1 … 1"
        )
    return first


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts to keep, (first, second), so that both fit into `room` tokens together.

    The longer text is truncated first. If the shorter text has more than half of the room, each text gets a half. This
    is the strategy longest_first of `tokenizers`.

    Args:
        first: The number of tokens of the first text.
        second: The number of tokens of the second text.
        room: The maximum number of tokens of both texts.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    if short > room // 2:
        short, long = room // 2, room - room // 2
    else:
        long = room - short
    return (short, long) if first <= second else (long, short)
