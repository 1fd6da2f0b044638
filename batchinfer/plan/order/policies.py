"""The orders in which a job may run, from the simplest to the one that mixes unlike work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import Ints, PrefixForest
from batchinfer.plan.order.run_order import depth_first, efforts, walk

# A row starts when this many times its own steps are left, or earlier: the steps that are left are reckoned as if the
# batch were full throughout (docs/measurements/order.md).
_STEPS_LEFT = 1.3


class OrderPolicy(StrEnum):
    """A policy orders the rows of a job. `blended` mixes rows whose prompts are most of their work with rows that
    mostly decode."""

    ARRIVAL = "arrival"
    LENGTH_SORTED = "length-sorted"
    DEPTH_FIRST = "depth-first"
    BLENDED = "blended"


BY_DEFAULT = OrderPolicy.DEPTH_FIRST  # what `plan_job` writes


@dataclass(frozen=True, slots=True)
class OrderChoice:
    """An order, why it is that one, and what the engine was simulated to take in each, in seconds; empty where none was
    compared."""

    policy: OrderPolicy
    why: str
    seconds: Mapping[OrderPolicy, float] = field(default_factory=dict)
    share: float = 0.0  # of the rows were simulated
    failed: bool = False  # another one is faster, but the plan could not be written in it


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity is the number of rows and tokens that an engine has room for at a time."""

    seqs: int
    tokens: int  # of the KV cache


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """Prompts in an order in which each node of their forest has consecutive ones."""

    forest: PrefixForest
    prompts: Ints  # tokens of each
    outputs: Ints  # tokens at most
    arrival: NDArray[np.int64]  # larger for what comes later in the input

    def places(self, policy: OrderPolicy, capacity: Capacity) -> Ints:
        """Return the place of each prompt under a policy."""
        effort = efforts(self.prompts, self.outputs)
        if policy is OrderPolicy.ARRIVAL:
            return _ranks(self.arrival)
        if policy is OrderPolicy.LENGTH_SORTED:
            return _ranks(-effort)
        if policy is OrderPolicy.DEPTH_FIRST:
            return depth_first(self.forest, effort)
        return self._blended(capacity)

    def _blended(self, capacity: Capacity) -> Ints:
        """The dual scan of BlendServe (Zhao et al., 2024) over the walk of the forest by density.

        Density is prompt tokens to run for a share of the engine's time. One scan comes from the densest rows and one
        from the least dense ones, and the next row is taken where it keeps the mixture of what was taken nearest to
        that of the whole job: so each step has both prompts to read and rows to decode.
        """
        reading, holding = self._reading(), self._holding(capacity)
        walked = np.argsort(
            walk(self.forest, reading / holding, self._totals(reading) / self._totals(holding))
        )
        scanned = walked[_dual_scan(reading[walked], holding[walked])]
        starts = np.cumsum(holding[scanned]) - holding[scanned]
        latest = np.maximum(0, holding.sum() - _STEPS_LEFT * self.outputs[scanned])
        return _places(scanned[np.argsort(np.minimum(starts, latest), kind="stable")])

    def _reading(self) -> NDArray[np.float64]:
        """Return the prompt tokens that each row has to run: shared tokens count in equal parts for all that share
        them."""
        forest = self.forest
        shared = np.append(forest.from_root(forest.own / forest.users), 0.0)[forest.node_of]
        own = self.prompts - np.append(forest.depth, 0)[forest.node_of]
        return np.asarray(own + shared, np.float64)

    def _holding(self, capacity: Capacity) -> NDArray[np.float64]:
        """Return the steps of the whole engine that each row takes: its own, times its share of rows or of the
        cache."""
        outputs = np.maximum(self.outputs, 1)
        context = self.prompts + outputs / 2
        return np.asarray(outputs * np.maximum(1 / capacity.seqs, context / capacity.tokens), np.float64)

    def _totals(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum the values over each node's prompts."""
        sums, forest = np.append(0.0, np.cumsum(values)), self.forest
        return np.asarray(sums[forest.first + forest.users] - sums[forest.first], np.float64)


def _dual_scan(reading: NDArray[np.float64], holding: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the places of a sequence by falling density, taken from both ends."""
    ratio = float(reading.sum() / max(holding.sum(), 1e-300))
    surplus = (reading - ratio * holding).tolist()  # of reading, over what the whole job's mixture has
    left, right, taken, ahead = 0, len(surplus) - 1, [], 0.0
    while left <= right:
        place = left if ahead <= 0 else right
        left, right = (left + 1, right) if ahead <= 0 else (left, right - 1)
        taken.append(place)
        ahead += surplus[place]
    return np.array(taken, np.int64)


def _ranks(values: NDArray[np.int64]) -> Ints:
    """Return the place of each value, the smallest first."""
    return _places(np.argsort(values, kind="stable"))


def _places(order: NDArray[np.int64]) -> Ints:
    places = np.empty(len(order), np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    return places
