"""What the time of a step is made of: kinds of work, each at the machine's peaks, and what is counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.simulation.least_squares import nonnegative
from batchinfer_kernels.cost import Cost, ModelCost, OperatorCost, Peaks, StepShape, expected_hit

# Seconds at the peaks, and how often there is one. A product's bytes are its weights': activations stay in caches.
PRODUCTS, WEIGHTS, ATTENTION, KV_CACHE = "products", "weights", "attention", "kv_cache"
SAMPLING, ELEMENTWISE, LAYERS, ROWS = "sampling", "elementwise", "layers", "rows"
PARTS = (PRODUCTS, WEIGHTS, ATTENTION, KV_CACHE, SAMPLING, ELEMENTWISE, LAYERS, ROWS)
# A product has hundreds of operations for each byte of a token, any other operator at most three.
PRODUCT_INTENSITY = 8


class TimedStep(NamedTuple):
    """A step of a model that was timed: what it ran, how many rows it had, seconds in the model and the sampler."""

    cost: ModelCost
    shape: StepShape
    rows: int
    seconds: float


def step_parts(cost: ModelCost, shape: StepShape, rows: int, peaks: Peaks) -> dict[str, float]:
    """Of each part the least seconds at these peaks; of layers and rows, how many there are."""
    found = dict.fromkeys(PARTS, 0.0)
    for operator in cost.operators:
        for part, seconds in _parts_of(operator, shape, peaks):
            found[part] += seconds
    found[LAYERS], found[ROWS] = float(cost.layers), float(rows)
    return found


def _parts_of(operator: OperatorCost, shape: StepShape, peaks: Peaks) -> Iterable[tuple[str, float]]:
    whole = operator.of(shape)
    computing = Cost(whole.flops, 0, whole.int8_ops).seconds(peaks)
    moving = whole.bytes / peaks.bytes_per_s
    if operator.pair.flops:
        return (ATTENTION, computing), (KV_CACHE, moving)
    if operator.only_sampled:
        return ((SAMPLING, max(computing, moving)),)
    if operator.experts or operator.token.flops > PRODUCT_INTENSITY * operator.token.bytes:
        return (PRODUCTS, computing), (WEIGHTS, _weights(operator, shape) / peaks.bytes_per_s)
    return ((ELEMENTWISE, max(computing, moving)),)


def _weights(operator: OperatorCost, shape: StepShape) -> int:
    """Bytes of the weights that a step reads."""
    if not operator.experts:
        return operator.step.bytes
    return operator.step.bytes + operator.expert.bytes * expected_hit(
        shape.tokens, operator.experts, operator.chosen
    )


def fitted(steps: Iterable[TimedStep], peaks: Peaks) -> dict[str, float]:
    """By part, what makes the sums of parts come nearest to what these steps took, by relative error: how many times
    its least time a kind of work takes, and seconds of a layer and of a row."""
    seen = list(steps)
    parts = [step_parts(step.cost, step.shape, step.rows, peaks) for step in seen]
    columns = np.array([[found[part] for part in PARTS] for found in parts])
    took = np.array([step.seconds for step in seen])
    coefficients = _scaled_solution(columns / took[:, None])
    return dict(zip(PARTS, coefficients, strict=True))


def _scaled_solution(shares: NDArray[np.float64]) -> list[float]:
    """Columns have very different units: each is solved for as a part of its own largest."""
    largest = np.maximum(shares.max(axis=0), np.finfo(float).tiny)
    found = nonnegative(shares / largest, np.ones(len(shares))) / largest
    return [float(one) for one in found]


def predicted(coefficients: Mapping[str, float], parts: Mapping[str, float]) -> float:
    """Seconds of a step with these parts."""
    return sum(coefficients[part] * parts[part] for part in PARTS)
