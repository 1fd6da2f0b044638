"""Assigns the experts of a mixture-of-experts model to ranks, by loads that earlier runs measured. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.wording import counted
from batchinfer.models.parallel.expert_placement import (
    ExpertPlacement,
    Shares,
    balance_experts,
    imbalance,
    split_into_ranges,
)
from batchinfer.models.spec.spec import ExpertsSpec, LayerSpec, LinearSpec, ModelSpec
from batchinfer.report.tables.earlier_runs import EarlierExperts
from batchinfer_kernels.cost import Cost, Peaks

LEAST_GAIN = 0.01  # relative time saving below which experts stay in ranges
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The assignment of a model's experts to ranks, and the expected imbalance of the ranks' loads.

    The load of a rank is the number of tokens that its experts compute. An imbalance is the load of the most loaded
    rank divided by the mean load of all ranks.

    Attributes:
        ranks: Number of ranks among which the experts are divided.
        why: The reason for the placement, for people.
        placement: The experts of each rank. None: each rank has a contiguous range of experts.
        in_ranges: Imbalance if each rank has a contiguous range of experts. None if no run has measured loads.
        expected: Imbalance with `placement`. None if no run has measured loads.
        repeated: Number of extra copies of experts, over all layers.
    """

    ranks: int
    why: str
    placement: ExpertPlacement | None = None
    in_ranges: float | None = None
    expected: float | None = None
    repeated: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Return the attributes of this plan as a dictionary for forecasts and reports.

        The key `placement` has the value "ranges" if each rank has a contiguous range of experts, or "loads" if experts
        were assigned by measured loads.
        """
        placed = "ranges" if self.placement is None else "loads"
        asked = ("ranks", "why", "in_ranges", "expected", "repeated")
        return {"placement": placed} | {name: getattr(self, name) for name in asked}

    @property
    def load_factor(self) -> float:
        """Return the expected load of the most loaded rank divided by the mean load, or 1 if no loads were measured."""
        return self.expected or 1.0

    def imbalance(self, tokens: Mapping[int, Sequence[float]]) -> float:
        """Return the load of the most loaded rank divided by the mean load of all ranks, for this assignment.

        Args:
            tokens: The measured number of tokens of each expert, by layer index.
        """
        placed = self.placement
        return imbalance(
            [
                (split_into_ranges(len(each), self.ranks) if placed is None else placed.layers[layer], each)
                for layer, each in tokens.items()
            ]
        )


def expert_layers(spec: ModelSpec) -> dict[int, ExpertsSpec]:
    """Return the feed-forward layers of a model that have experts, by layer index."""
    fed = {index: layer.feed_forward for index, layer in enumerate(spec.layers)}
    return {index: one for index, one in fed.items() if isinstance(one, ExpertsSpec)}


def has_experts(spec: ModelSpec, loads: EarlierExperts) -> bool:
    """Return True if the loads were measured on a model with the same number of experts in each layer as `spec`."""
    experts = {index: fed.routing.experts for index, fed in expert_layers(spec).items()}
    return experts == {index: len(tokens) for index, tokens in loads.tokens.items()}


def plan_experts(
    spec: ModelSpec, ranks: int, loads: EarlierExperts, peaks: Peaks | None, itemsize: int, spare_bytes: int
) -> ExpertPlan:
    """Assign experts to ranks so that the most loaded rank takes the least time.

    Times are predicted from the step sizes and expert loads of earlier runs. If no assignment saves at least LEAST_GAIN
    (1 %) of the time, each rank gets a contiguous range of experts.

    Args:
        spec: The whole model.
        ranks: Number of ranks.
        loads: Tokens of each expert and of each step in earlier runs.
        peaks: Peak FLOP/s and bandwidth of one rank. None: numbers of tokens are compared instead of times.
        itemsize: Bytes of a weight that is not quantised.
        spare_bytes: Bytes of memory that each rank can use for extra copies of experts.
    """
    layers = expert_layers(spec)
    in_ranges = {index: split_into_ranges(fed.routing.experts, ranks) for index, fed in layers.items()}
    each = sum(_expert_bytes(spec.layers[index], itemsize) for index in layers)
    copies = int(max(0, spare_bytes) // each) if each else 0
    costs = {index: _costs(spec.layers[index], loads, index, ranks, peaks, itemsize) for index in layers}
    found = {index: balance_experts(costs[index].tolist(), ranks, copies) for index in layers}
    before = imbalance([(in_ranges[index], loads.tokens[index].tolist()) for index in layers])
    after = imbalance([(found[index], loads.tokens[index].tolist()) for index in layers])
    whole, saved = _longest(in_ranges, costs), _longest(found, costs)
    runs = counted(loads.runs, "earlier run")
    if saved >= whole * (1 - LEAST_GAIN):
        why = f"by the loads of {runs} no placement is faster"
        return ExpertPlan(ranks, why, None, before, before)
    repeated = sum(sum(map(len, shares)) - layers[index].routing.experts for index, shares in found.items())
    placement = ExpertPlacement(tuple(found.get(index, ()) for index in range(len(spec.layers))))
    return ExpertPlan(ranks, f"placed by the loads of {runs}", placement, before, after, repeated)


def _longest(shares: Mapping[int, Shares], costs: Mapping[int, Floats]) -> float:
    return sum(max(_of_ranks(shares[index], costs[index])) for index in shares)


def _of_ranks(shares: Shares, costs: Floats) -> list[float]:
    held = np.bincount(np.concatenate([np.asarray(share, np.int64) for share in shares]))
    return [float(costs[list(share), held[list(share)] - 1].sum()) for share in shares]


def _products(layer: LayerSpec) -> list[LinearSpec]:
    return [linear for linear in layer.linears if linear.experts]


def _expert_bytes(layer: LayerSpec, itemsize: int) -> float:
    return sum(
        one.values / one.experts * (itemsize if one.form is None else one.form.value_bytes(itemsize))
        for one in _products(layer)
    )


def _costs(
    layer: LayerSpec, loads: EarlierExperts, index: int, ranks: int, peaks: Peaks | None, itemsize: int
) -> Floats:
    # Column n of the result is the cost on each of the n + 1 ranks that hold a copy of the expert: seconds over
    # all steps, or tokens if the peaks are unknown.
    copies, fed, tokens = np.arange(1, ranks + 1), layer.feed_forward, loads.tokens[index]
    if peaks is None or not loads.steps.any():
        return tokens[:, None] / copies
    assert isinstance(fed, ExpertsSpec), "only these are placed"
    shares = tokens / max(1, tokens.sum()) * fed.routing.chosen
    coded = sum(2 * one.values // one.experts for one in _products(layer) if _multiplies_codes(one))
    flops = sum(2 * one.values // one.experts for one in _products(layer))
    computing = Cost(flops, 0, coded).seconds(peaks)
    reading = _expert_bytes(layer, itemsize) / peaks.bytes_per_s
    found: Floats = np.zeros((len(tokens), ranks))
    for size, steps in _sizes(loads.steps):
        given = size * shares[:, None] / copies
        hit = 1 - np.exp(-given)  # chance that any token of the step chooses the expert
        found += steps * np.maximum(given * computing, hit * reading)
    return found


def _multiplies_codes(linear: LinearSpec) -> bool:
    return linear.form is not None and linear.form.codes in ("int8", "fp8")


def _sizes(steps: NDArray[Any]) -> list[tuple[float, int]]:
    ran = steps[steps > 0]
    powers = np.log2(ran).astype(int)
    return [(float(ran[powers == one].mean()), int((powers == one).sum())) for one in np.unique(powers)]
