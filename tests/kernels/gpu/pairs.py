"""Sweeps that are thinned as orthogonal arrays are: each two values of two axes meet, not all values of all axes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A few of the combinations of the axes' values, in which each pair of values of two axes occurs at least once.

    Greedy, as AETG (Cohen et al., 1997): of all combinations the one with most pairs that are missing, the first one of
    equals. About as many as the two longest axes have pairs. Raises ValueError for fewer than two axes.
    """
    if len(axes) < 2:
        raise ValueError("pairs are of two axes")
    bits: dict[tuple[int, int, int, int], int] = {}
    left = {at: _pairs(at, bits) for at in product(*(range(len(axis)) for axis in axes))}
    missing = (1 << len(bits)) - 1
    chosen = []
    # What a combination had missing is the most that it has now, so that few of them are looked at again
    most = [(-pairs.bit_count(), at) for at, pairs in left.items()]
    heapify(most)
    while missing:
        had, best = heappop(most)
        has = -(left[best] & missing).bit_count()
        if has > had:
            heappush(most, (has, best))
            continue
        missing &= ~left[best]
        chosen.append(best)
    return [tuple(axis[at] for axis, at in zip(axes, place, strict=True)) for place in sorted(chosen)]


def pairs_first(*axes: Sequence[Any]) -> list[Any]:
    """All combinations, for `parametrize`: those that are not in `every_pair` belong to the slow sweep."""
    return _others_slow(axes, every_pair(*axes))


def each_first(*axes: Sequence[Any]) -> list[Any]:
    """The same with so few that each value of each axis occurs at least once."""
    longest = max(map(len, axes))
    return _others_slow(axes, [tuple(axis[i % len(axis)] for axis in axes) for i in range(longest)])


def _others_slow(axes: Sequence[Sequence[Any]], few: list[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, marks=[] if case in few else [pytest.mark.slow]) for case in product(*axes)]


def _pairs(at: tuple[int, ...], bits: dict[tuple[int, int, int, int], int]) -> int:
    """Return a bit for each pair: such sets are compared fast."""
    pairs = ((i, j, at[i], at[j]) for i, j in combinations(range(len(at)), 2))
    return sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs)
