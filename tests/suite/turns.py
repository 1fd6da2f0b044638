"""Makes calls in turns, which spreads disturbances of the machine evenly, and returns their medians."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tests.suite.section import Result, Times

MARGIN = 1.2  # of the longest round's time, for the next one
Found = TypeVar("Found")
Metrics = dict[str, Any]


def in_turns(
    calls: Mapping[str, Callable[[int], Found]], rounds: int, left_s: Callable[[], float] = lambda: math.inf
) -> dict[str, list[Found]]:
    """Call every function once per round, with the round's number.

    Args:
        left_s: Returns the remaining seconds. After the first round, none starts that may take longer.
    """
    found: dict[str, list[Found]] = {name: [] for name in calls}
    longest_s = 0.0
    for number in range(rounds):
        if number and left_s() < MARGIN * longest_s:
            break
        began = time.perf_counter()
        for name, call in calls.items():
            found[name].append(call(number))
        longest_s = max(longest_s, time.perf_counter() - began)
    return found


def medians(runs: Sequence[Metrics]) -> Metrics:
    """Return the median of each metric over the runs that have it."""
    known = {name: [run[name] for run in runs if run[name] is not None] for name in runs[0]}
    return {name: statistics.median(values) for name, values in known.items() if values}


def compared(
    name: str, ways: Mapping[str, Callable[[int], Metrics]], rounds: int, timed: str, **metrics: Any
) -> list[Result]:
    """Run the ways in turns. Return the medians of each, and its time compared with the first way's.

    Args:
        timed: The metric that is the time of a run.
        metrics: Further metrics of all ways.
    """

    def shown(way: str, call: Callable[[int], Metrics], number: int) -> Metrics:
        run = call(number)
        print(f"{name}, {way}, round {number + 1}: {run}", file=sys.stderr, flush=True)
        return run

    calls = {way: lambda n, way=way, call=call: shown(way, call, n) for way, call in ways.items()}
    found = in_turns(calls, rounds)
    times = {way: Times.of([run[timed] for run in runs]) for way, runs in found.items()}
    first = next(iter(times))
    return [
        Result(
            f"{name}, {way}", times={way: times[way], first: times[first]}, metrics=medians(runs) | metrics
        )
        for way, runs in found.items()
    ]
