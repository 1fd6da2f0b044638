"""Splits the device time into roofline, padding, recomputation, and the time of operators beyond their roofline.

Operators are not timed one by one, because that would slow the run down. Instead, a least-squares fit over all steps
estimates the time of each kind of operator as a multiple of its roofline. Steps mix the kinds in different proportions.
If they do not differ enough to separate two kinds, both get about the same multiple.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.statistics.least_squares import nonnegative
from batchinfer_kernels.cost import OPERATOR_KINDS, ModelCost, OperatorCost, Peaks, operator_kind

Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]  # of the table `steps`, and its `prompt_tokens`

ROOFLINE, PADDING, RECOMPUTATION, OTHER = "roofline", "padding", "recomputation", "other"
LOSSES = (*OPERATOR_KINDS, OTHER)  # `other`: the fixed time per step, and the residual of the fit
# Weight of the assumption that all kinds take the same multiple. It matters if all steps of a run are alike, and hardly
# matters with both prefill and decode steps.
PRIOR = 0.01


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The amounts of work in each step, from which its cost follows. Shape of each array: [steps].

    Attributes:
        tokens: Number of query tokens.
        sampled: Number of positions whose logits are computed.
        pairs: Number of (query, key) pairs of attention, summed over layers.
        kv_tokens: Number of distinct cached tokens that are read, summed over layers.
        copied: Number of tokens that are copied in the KV cache.
    """

    tokens: Floats
    sampled: Floats
    pairs: Floats
    kv_tokens: Floats
    copied: Floats

    @classmethod
    def useful(cls, steps: Columns) -> StepCounts:
        """Return the amounts of work in each step, without padding and recomputation.

        Args:
            steps: Columns of the report table `steps`.
        """
        tokens = steps["prompt_tokens"] + steps["decode_tokens"]
        return cls(
            tokens, steps["sampled_tokens"], steps["pairs"], steps["kv_tokens"], steps["copied_tokens"]
        )

    def plus(self, tokens: Floats) -> StepCounts:
        """Return the amounts of work with more query tokens in each step. Only `tokens` changes.

        Args:
            tokens: [steps], the number of tokens to add.
        """
        return replace(self, tokens=self.tokens + tokens)


def kind_seconds(cost: ModelCost, peaks: Peaks, counts: StepCounts) -> dict[str, Floats]:
    """Return the minimum seconds of each step, by kind of operator, at the peaks of the hardware (roofline).

    Args:
        cost: The cost of the model's operators.
        peaks: The peaks of one engine's hardware.
        counts: The amounts of work in each step.

    Returns:
        An array with shape [steps] for each kind of operator.
    """
    found: dict[str, Floats] = {kind: np.zeros(len(counts.tokens)) for kind in OPERATOR_KINDS}
    for operator in cost.operators:
        kind = operator_kind(operator)
        found[kind] = found[kind] + _operator_seconds(operator, peaks, counts)
    return found


def _operator_seconds(operator: OperatorCost, peaks: Peaks, counts: StepCounts) -> Floats:
    # The same as `Cost.seconds`, for many steps
    integer = _sum(operator, counts, "coded_ops")
    computing = (_sum(operator, counts, "flops") - integer) / peaks.flops_per_s
    computing += integer / (peaks.coded_ops_per_s or peaks.flops_per_s)
    runs = counts.tokens > 0
    if operator.only_sampled:
        runs &= counts.sampled > 0
    return np.where(runs, np.maximum(computing, _sum(operator, counts, "bytes") / peaks.bytes_per_s), 0.0)


def _sum(operator: OperatorCost, counts: StepCounts, unit: Literal["flops", "bytes", "coded_ops"]) -> Floats:
    each = {
        "token": counts.tokens,
        "sampled": counts.sampled,
        "pair": counts.pairs,
        "kv_token": counts.kv_tokens,
        "copied": counts.copied,
    }
    found = np.full(len(counts.tokens), float(getattr(operator.step, unit)))
    for part, many in each.items():
        found += many * float(getattr(getattr(operator, part), unit))
    if operator.experts:
        idle = (1 - operator.chosen / operator.experts) ** counts.tokens
        found += np.round(operator.experts * (1 - idle)) * float(getattr(operator.expert, unit))
    return found


def attention_share(cost: ModelCost, peaks: Peaks | None, steps: Columns) -> Floats:
    """Return the share of attention in each step's roofline, from 0 to 1, with shape [steps].

    If the peaks are unknown, it is the share of the step's FLOPs.

    Args:
        cost: The cost of the model's operators.
        peaks: The peaks of one engine's hardware, or None if unknown.
        steps: Columns of the report table `steps`.
    """
    found = kind_seconds(cost, peaks or Peaks(1.0, np.inf), StepCounts.useful(steps))
    whole = sum(found.values(), np.zeros(len(steps["pairs"])))
    return np.divide(found["attention"], whole, out=np.zeros_like(whole), where=whole > 0)


def device_split(cost: ModelCost, peaks: Peaks, steps: Columns) -> dict[str, float]:
    """Split the device time of all steps into the seconds of ROOFLINE, PADDING, RECOMPUTATION and LOSSES.

    The parts add up to the sum of `model_s`. The losses are the times of operators, by kind, beyond their
    roofline. A loss is negative if operators were faster, because their data came from a CPU cache.

    Args:
        cost: The cost of the model's operators.
        peaks: The peaks of one engine's hardware.
        steps: Columns of the report table `steps`.
    """
    useful = StepCounts.useful(steps)
    again = useful.plus(steps["recomputed_tokens"])
    padded = again.plus(steps["padded_tokens"])
    least, with_again, with_all = (kind_seconds(cost, peaks, counts) for counts in (useful, again, padded))
    took = multiples(with_all, steps["model_s"])
    found = {
        ROOFLINE: sum(float(seconds.sum()) for seconds in least.values()),
        PADDING: sum(took[kind] * float((with_all[kind] - with_again[kind]).sum()) for kind in took),
        RECOMPUTATION: sum(took[kind] * float((with_again[kind] - least[kind]).sum()) for kind in took),
    }
    found |= {kind: (took[kind] - 1) * float(least[kind].sum()) for kind in OPERATOR_KINDS}
    return found | {OTHER: float(steps["model_s"].sum()) - sum(found.values())}


def multiples(least: Mapping[str, Floats], took: Floats) -> dict[str, float]:
    """Estimate how many times its roofline each kind of operator takes, by a fit to measured steps.

    Args:
        least: The roofline of each step in seconds, by kind of operator. Shape of each array: [steps].
        took: The measured seconds of each step, with shape [steps].

    Returns:
        The ratio of time to roofline by kind of operator.
    """
    timed = took > 0
    columns = np.stack([*(each[timed] for each in least.values()), np.ones(int(timed.sum()))], axis=1)
    whole = float(columns[:, :-1].sum())
    if whole <= 0:
        return dict.fromkeys(least, 1.0)
    shares = columns / took[timed, None]
    sizes = np.maximum(np.sqrt((shares**2).sum(axis=0)), np.finfo(float).tiny)
    guess = np.array([float(took[timed].sum()) / whole] * len(least) + [0.0]) * sizes
    weight = np.sqrt(PRIOR)
    every = np.concatenate([shares / sizes, weight * np.eye(len(sizes))])
    found = _solved(every, np.concatenate([np.ones(len(shares)), weight * guess])) / sizes
    return dict(zip(least, found[:-1].tolist(), strict=True))


def _solved(columns: Floats, wanted: Floats) -> Floats:
    # A QR decomposition reduces the non-negative least-squares problem to a square matrix
    orthogonal, triangle = np.linalg.qr(columns)
    return nonnegative(triangle, orthogonal.T @ wanted)
