"""Splits the time of a step into parts: time of each kind of work at the peaks, and fixed times per layer and row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.statistics.least_squares import nonnegative
from batchinfer_kernels.cost import Cost, ModelCost, OperatorCost, Peaks, StepShape, expected_hit

# Seconds at the peaks, or counts. The bytes of a product are its weights, because activations stay in caches.
PRODUCTS, WEIGHTS, ATTENTION, KV_CACHE = "products", "weights", "attention", "kv_cache"
SAMPLER, ELEMENTWISE, LAYERS, ROWS = "sampler", "elementwise", "layers", "rows"
PARTS = (PRODUCTS, WEIGHTS, ATTENTION, KV_CACHE, SAMPLER, ELEMENTWISE, LAYERS, ROWS)
# Products have hundreds of operations per byte of a token, other operators at most three
PRODUCT_INTENSITY = 8
# Undisturbed steps were within 3 % of the sum of their parts on average (two Zen 4 server cores)
USUAL_ERROR = 0.05
ROUNDS = 20
# Lower bound while solving: a product with a zero coefficient tells nothing about its other side
LEAST_TIMES = 0.1


class TimedStep(NamedTuple):
    """A measured step.

    Attributes:
        cost: FLOPs and bytes of the model's steps.
        shape: Tokens and attention of the step.
        rows: Rows of the step.
        seconds: Measured seconds in the model and the sampler.
    """

    cost: ModelCost
    shape: StepShape
    rows: int
    seconds: float


class StepParts(NamedTuple):
    """The parts of a step, such as matrix products, attention and layers, with the time or count of each.

    The duration of a step is predicted from these parts and a coefficient per part.

    Attributes:
        products: (seconds of computing, seconds of reading weights) at the peaks of the machine, first for matrix
            products over all tokens, then for those over sampled tokens only.
        others: The other parts, by their names in PARTS: seconds at the peaks, or numbers of layers or rows.
    """

    products: tuple[tuple[float, float], tuple[float, float]]
    others: dict[str, float]

    def shares(self, coefficients: Mapping[str, float]) -> dict[str, float]:
        """Return for each part a share. The step's duration is the sum of coefficient × share over all parts.

        Computing and reading weights overlap in part: a matrix product takes the root of the sum of the squares of
        their times.

        Args:
            coefficients: The coefficient of each part, by its name in PARTS.
        """
        found = {PRODUCTS: 0.0, WEIGHTS: 0.0, **self.others}
        for computing, reading in self.products:
            # For equal times, the plain sum was 20 % too high (a decode step of 24 rows in float32), and the maximum
            # is too low (two Zen 4 server cores)
            together = math.hypot(coefficients[PRODUCTS] * computing, coefficients[WEIGHTS] * reading)
            if together:
                found[PRODUCTS] += coefficients[PRODUCTS] * computing**2 / together
                found[WEIGHTS] += coefficients[WEIGHTS] * reading**2 / together
        return found


def step_parts(cost: ModelCost, shape: StepShape, rows: int, peaks: Peaks) -> StepParts:
    """Split the work of a step into parts, with the time of each at the peaks of the machine.

    Args:
        cost: FLOPs and bytes of the model's steps.
        shape: Tokens and attention of the step.
        rows: Rows of the step.
        peaks: Peak FLOP/s and bandwidth of the machine.
    """
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
    if not operator.experts:
        return operator.step.bytes
    return operator.step.bytes + operator.expert.bytes * expected_hit(
        shape.tokens, operator.experts, operator.chosen
    )


def fit_step_parts(steps: Iterable[TimedStep], peaks: Peaks) -> dict[str, float]:
    """Find the coefficients of the parts of a step with which predicted durations are closest to measured steps.

    Relative errors are minimised. Outliers get less weight (Huber), because other processes probably disturbed the
    machine.

    Args:
        steps: The measured steps.
        peaks: Peak FLOP/s and bandwidth of the machine.

    Returns:
        The coefficients, by the names in PARTS: multiples of the time at the peaks, or seconds per layer and per row.
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
        errors = np.abs([predict_seconds(times, one) for one in parts] / took - 1)
        weights = np.sqrt(np.minimum(1, USUAL_ERROR / np.maximum(errors, USUAL_ERROR)))
    return times


def _scaled_solution(shares: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = np.maximum(shares.max(axis=0), np.finfo(float).tiny)
    found: NDArray[np.float64] = nonnegative(shares / largest, wanted) / largest
    return found


def predict_seconds(coefficients: Mapping[str, float], parts: StepParts) -> float:
    """Return the predicted duration of a step in seconds.

    Args:
        coefficients: Coefficients by part, from `fit_step_parts`.
        parts: The parts of the step.
    """
    return sum(coefficients[part] * share for part, share in parts.shares(coefficients).items())
