"""Thins sweeps like orthogonal arrays: all pairs of values of two axes occur, not all combinations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return some combinations of the axes' values that contain each pair of values of two axes at least
    once.

    The first combinations add a new pair for each two axes, later ones add fewer.
    """
    missing = {pair for at in _places(axes) for pair in _pairs(at)}
    chosen = []
    for least in range(len(axes) * (len(axes) - 1) // 2, 0, -1):
        for at in _places(axes):
            added = missing & _pairs(at)
            if len(added) >= least:
                missing -= added
                chosen.append(at)
    return [tuple(axis[at] for axis, at in zip(axes, place, strict=True)) for place in sorted(chosen)]


def pairs_first(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations for `parametrize`, marked as slow if they are not in `every_pair`."""
    return _others_slow(axes, every_pair(*axes))


def each_first(*axes: Sequence[Any]) -> list[Any]:
    """Return few combinations in which each value of each axis occurs, and mark the others as slow."""
    longest = max(map(len, axes))
    return _others_slow(axes, [tuple(axis[i % len(axis)] for axis in axes) for i in range(longest)])


def _others_slow(axes: Sequence[Sequence[Any]], few: list[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, marks=[] if case in few else [pytest.mark.slow]) for case in product(*axes)]


def _places(axes: Sequence[Sequence[Any]]) -> Iterator[tuple[int, ...]]:
    """Yield each combination of the axes' values as indices."""
    return product(*(range(len(axis)) for axis in axes))


def _pairs(at: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(i, j, at[i], at[j]) for i, j in combinations(range(len(at)), 2)}
