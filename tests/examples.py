"""What each run of the tests tries of a sweep or a property: a few cases, and all where everything is asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

EVERYTHING = "BATCHINFER_TEST_EVERYTHING"  # set by `make test-all`
SEED = "BATCHINFER_TEST_SAMPLE"  # any text; another one draws other samples


def examples(few: int, many: int) -> int:
    """For `max_examples` of a property whose examples take long."""
    return many if everything() else few


def first_of(values: Iterable[Any], few: int) -> list[Any]:
    """For `parametrize`: the first few values belong to every run of the tests, the others to the slow sweep."""
    cases = (one if isinstance(one, tuple) else (one,) for one in values)
    return [pytest.param(*case, marks=[pytest.mark.slow] * (at >= few)) for at, case in enumerate(cases)]


def sampled(items: Iterable[pytest.Item]) -> int:
    """Apply `@pytest.mark.sample(n)`: n cases of the function that it marks belong to every run, the others to the slow
    sweep. Return how many cases that leaves out.

    What was slow before is no part of the sample, which has as many of the values of all arguments as n cases can.
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
    """What samples are drawn by."""
    return os.environ.get(SEED, "0")


def everything() -> bool:
    """Whether all is asked for that takes long."""
    return bool(os.environ.get(EVERYTHING))
