"""Chooses the cases of a sweep or property that a run of the tests tries: a few by default, or all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

EVERYTHING = "BATCHINFER_TEST_EVERYTHING"  # set by `make test-all`
SEED = "BATCHINFER_TEST_SAMPLE"  # any text; another one draws other samples


def examples(few: int, many: int) -> int:
    """Return `max_examples` of a slow property."""
    return many if everything() else few


def first_of(values: Iterable[Any], few: int) -> list[Any]:
    """Mark all values except the first `few` as slow, for `parametrize`."""
    cases = (one if isinstance(one, tuple) else (one,) for one in values)
    return [pytest.param(*case, marks=[pytest.mark.slow] * (at >= few)) for at, case in enumerate(cases)]


def sampled(items: Iterable[pytest.Item]) -> int:
    """Apply `@pytest.mark.sample(n)`: mark all cases of the function except n as slow, and return their
    number.

    Cases that were already slow are not sampled. The sample covers the maximum number of values of each
    argument.
    """
    sweeps: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and item.get_closest_marker("slow") is None:
            sweeps.setdefault((item.nodeid.partition("[")[0], mark.args[0]), []).append(item)
    left_out = 0
    for (_, most), cases in sweeps.items():
        kept = spread([case.nodeid for case in cases], most, seed())
        others = [case for case in cases if case.nodeid not in kept]
        for case in others:
            case.add_marker(pytest.mark.slow)
        left_out += len(others)
    return left_out


def spread(cases: Sequence[str], most: int, seed: str) -> set[str]:
    """Choose at most `most` cases by their names, such as "test[a-b]" of the values a and b.

    The next case is the one with the maximum number of new values; the seed decides between equals. Once all
    values are chosen, the count starts again. Parallel test processes choose equally.
    """
    values = {case: set(case.partition("[")[2].removesuffix("]").split("-")) for case in cases}
    left = sorted(cases, key=lambda case: hashlib.sha256(f"{seed} {case}".encode()).digest())
    wanted, chosen = set().union(*values.values()), set[str]()
    while left and len(chosen) < most:
        best = max(left, key=lambda case: len(values[case] & wanted))
        if not values[best] & wanted:
            wanted = set().union(*values.values())
            best = max(left, key=lambda case: len(values[case] & wanted))
        wanted -= values[best]
        left.remove(best)
        chosen.add(best)
    return chosen


def seed() -> str:
    """Return the seed of samples."""
    return os.environ.get(SEED, "0")


def everything() -> bool:
    """Return True if the run includes slow cases."""
    return bool(os.environ.get(EVERYTHING))
