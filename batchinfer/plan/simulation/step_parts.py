"""The parts of a step's time: kinds of work, each at the machine's peaks, and numbers of layers and rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.statistics.least_squares import nonnegative
from batchinfer_kernels.cost import Cost, ModelCost, OperatorCost, Peaks, StepShape, expected_hit

# Seconds at the peaks, and how often there is one. A product's bytes are its weights': activations stay in caches.
PRODUCTS, WEIGHTS, ATTENTION, KV_CACHE = "products", "weights", "attention", "kv_cache"
SAMPLER, ELEMENTWISE, LAYERS, ROWS = "sampler", "elementwise", "layers", "rows"
PARTS = (PRODUCTS, WEIGHTS, ATTENTION, KV_CACHE, SAMPLER, ELEMENTWISE, LAYERS, ROWS)
# A product has hundreds of operations for each byte of a token, any other operator at most three.
PRODUCT_INTENSITY = 8
# Steps that nothing disturbed were within 3 % of the sums of their parts in the mean (two Zen 4 server cores).
USUAL_ERROR = 0.05
ROUNDS = 20
LEAST_TIMES = 0.1  # while solving: of a product without one of its sides no step would tell anything about it


class TimedStep(NamedTuple):
    """A step of a model that was timed: what it ran, how many rows it had, seconds in the model and the sampler."""

    cost: ModelCost
    shape: StepShape
    rows: int
    seconds: float


class StepParts(NamedTuple):
    """The parts of a step: the least seconds of each at the peaks; of layers and rows, how many there are.

    `products`: seconds of computing, and of reading weights, for products over all tokens and for those over sampled
    ones.
    """

    products: tuple[tuple[float, float], tuple[float, float]]
    others: dict[str, float]

    def shares(self, times: Mapping[str, float]) -> dict[str, float]:
        """Return what each part adds for a unit of its coefficient: the step takes the sum of coefficients times these.

        A product reads its weights while it computes, but not all the time: it takes the root of the squares' sum. The
        sum would be 20 % too much where the two are alike (a decode step of 24 rows in float32), the larger of the two
        too little (measured on two Zen 4 server cores).
        """
        found = {PRODUCTS: 0.0, WEIGHTS: 0.0, **self.others}
        for computing, reading in self.products:
            together = math.hypot(times[PRODUCTS] * computing, times[WEIGHTS] * reading)
            if together:
                found[PRODUCTS] += times[PRODUCTS] * computing**2 / together
                found[WEIGHTS] += times[WEIGHTS] * reading**2 / together
        return found


def step_parts(cost: ModelCost, shape: StepShape, rows: int, peaks: Peaks) -> StepParts:
    """Return the parts of a step of `rows` rows."""
    others = dict.fromkeys(PARTS[2:], 0.0)
    over_tokens, over_sampled = [0.0, 0.0], [0.0, 0.0]
    for operator in cost.operators:
        whole = operator.of(shape)
        computing = Cost(whole.flops, 0, whole.coded_ops).seconds(peaks)
        moving = whole.bytes / peaks.bytes_per_s
        if operator.pair.flops:
            others[ATTENTION] += computing
            others[KV_CACHE] += moving
        elif operator.only_sampled and not shape.sampled:
            continue
        elif _is_product(operator):
            product = over_sampled if operator.only_sampled else over_tokens
            product[0] += computing
            product[1] += _weights(operator, shape) / peaks.bytes_per_s
        else:
            others[SAMPLER if operator.only_sampled else ELEMENTWISE] += max(computing, moving)
    others[LAYERS], others[ROWS] = float(cost.layers), float(rows)
    return StepParts(((over_tokens[0], over_tokens[1]), (over_sampled[0], over_sampled[1])), others)


def _is_product(operator: OperatorCost) -> bool:
    each = operator.sampled if operator.only_sampled else operator.token
    return bool(operator.experts) or each.flops > PRODUCT_INTENSITY * each.bytes


def _weights(operator: OperatorCost, shape: StepShape) -> int:
    """Bytes of the weights that a step reads."""
    if not operator.experts:
        return operator.step.bytes
    return operator.step.bytes + operator.expert.bytes * expected_hit(
        shape.tokens, operator.experts, operator.chosen
    )


def fitted(steps: Iterable[TimedStep], peaks: Peaks) -> dict[str, float]:
    """By part, what makes the sums of parts come nearest to what these steps took, by relative error: how many times
    its least time a kind of work takes, and seconds of a layer and of a row.

    A step that is far from what the others say counts for less (Huber's weights): the machine was busy with something
    else.
    """
    seen = list(steps)
    parts = [step_parts(step.cost, step.shape, step.rows, peaks) for step in seen]
    took = np.array([step.seconds for step in seen])
    times, weights = dict.fromkeys(PARTS, 1.0), np.ones(len(seen))
    for _ in range(ROUNDS):
        at_least = {part: max(value, LEAST_TIMES) for part, value in times.items()}
        found = [one.shares(at_least) for one in parts]
        shares = np.array([[one[part] for part in PARTS] for one in found]) / took[:, None]
        coefficients = _scaled_solution(shares * weights[:, None], weights)
        times = dict(zip(PARTS, coefficients.tolist(), strict=True))
        errors = np.abs([predicted(times, one) for one in parts] / took - 1)
        weights = np.sqrt(np.minimum(1, USUAL_ERROR / np.maximum(errors, USUAL_ERROR)))
    return times


def _scaled_solution(shares: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Columns have very different units: each is solved for as a part of its own largest."""
    largest = np.maximum(shares.max(axis=0), np.finfo(float).tiny)
    found: NDArray[np.float64] = nonnegative(shares / largest, wanted) / largest
    return found


def predicted(times: Mapping[str, float], parts: StepParts) -> float:
    """Return the seconds of a step with these parts."""
    return sum(times[part] * share for part, share in parts.shares(times).items())
