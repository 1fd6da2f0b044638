"""Plans which whole experts the ranks of an engine have, by how many tokens earlier runs gave each. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.wording import counted
from batchinfer.models.parallel.expert_placement import ExpertPlacement, Shares, balanced, imbalance, ranged
from batchinfer.models.spec.spec import ExpertsSpec, LayerSpec, LinearSpec, ModelSpec
from batchinfer.report.tables.earlier_runs import EarlierExperts
from batchinfer_kernels.cost import Cost, Peaks

LEAST_GAIN = 0.01  # a share of the experts' time, for which experts leave their ranges
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The plan says which experts ranks have, and `why`: by a `placement`; None: in ranges.

    The imbalance is what the most loaded rank of a layer has over the mean, over all layers: as it is `expected`, and
    as it would be `in_ranges`; None where no run has measured it. `repeated`: how many experts of all layers are on
    more than one rank, each such copy counted.
    """

    ranks: int
    why: str
    placement: ExpertPlacement | None = None
    in_ranges: float | None = None
    expected: float | None = None
    repeated: int = 0

    @property
    def told(self) -> dict[str, Any]:
        """Return what a forecast tells of it."""
        placed = "ranges" if self.placement is None else "loads"
        asked = ("ranks", "why", "in_ranges", "expected", "repeated")
        return {"placement": placed} | {name: getattr(self, name) for name in asked}

    @property
    def times(self) -> float:
        """How many times as much as the mean rank the most loaded one computes; 1 where that is not known."""
        return self.expected or 1.0

    def imbalance(self, tokens: Mapping[int, Sequence[float]]) -> float:
        """Return the imbalance of tokens that experts were given, by layer."""
        placed = self.placement
        return imbalance(
            [
                (ranged(len(each), self.ranks) if placed is None else placed.layers[layer], each)
                for layer, each in tokens.items()
            ]
        )


def expert_layers(spec: ModelSpec) -> dict[int, ExpertsSpec]:
    """Return the layers that have experts, by their numbers."""
    fed = {index: layer.feed_forward for index, layer in enumerate(spec.layers)}
    return {index: one for index, one in fed.items() if isinstance(one, ExpertsSpec)}


def has_experts(spec: ModelSpec, loads: EarlierExperts) -> bool:
    """Whether the loads are those of a model with these experts."""
    experts = {index: fed.routing.experts for index, fed in expert_layers(spec).items()}
    return experts == {index: len(tokens) for index, tokens in loads.tokens.items()}


def planned_experts(
    spec: ModelSpec, ranks: int, loads: EarlierExperts, peaks: Peaks | None, itemsize: int, spare_bytes: int
) -> ExpertPlan:
    """Plan for `ranks` with these `peaks` each; `spare_bytes` of memory of each may hold copies of experts, as many in
    every layer. `itemsize`: bytes of a value that is not quantised. Experts leave their ranges where that makes their
    steps shorter: the times of copies are those of the roofline, in steps like those of earlier runs."""
    layers = expert_layers(spec)
    in_ranges = {index: ranged(fed.routing.experts, ranks) for index, fed in layers.items()}
    each = sum(_expert_bytes(spec.layers[index], itemsize) for index in layers)
    copies = int(max(0, spare_bytes) // each) if each else 0
    costs = {index: _costs(spec.layers[index], loads, index, ranks, peaks, itemsize) for index in layers}
    found = {index: balanced(costs[index].tolist(), ranks, copies) for index in layers}
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
    """Return the costs of the most loaded rank of each layer together."""
    return sum(max(_of_ranks(shares[index], costs[index])) for index in shares)


def _of_ranks(shares: Shares, costs: Floats) -> list[float]:
    held = np.bincount(np.concatenate([np.asarray(share, np.int64) for share in shares]))
    return [float(costs[list(share), held[list(share)] - 1].sum()) for share in shares]


def _products(layer: LayerSpec) -> list[LinearSpec]:
    return [linear for linear in layer.linears if linear.experts]


def _expert_bytes(layer: LayerSpec, itemsize: int) -> float:
    """Return the bytes of the weights of an expert."""
    return sum(
        one.values / one.experts * (itemsize if one.form is None else one.form.value_bytes(itemsize))
        for one in _products(layer)
    )


def _costs(
    layer: LayerSpec, loads: EarlierExperts, index: int, ranks: int, peaks: Peaks | None, itemsize: int
) -> Floats:
    """Return (experts, ranks) what each of 1, 2 … copies of an expert takes a rank over all steps: seconds, or tokens
    where peaks are not known."""
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
        hit = 1 - np.exp(-given)  # tokens are many, and each is unlikely
        found += steps * np.maximum(given * computing, hit * reading)
    return found


def _multiplies_codes(linear: LinearSpec) -> bool:
    return linear.form is not None and linear.form.codes in ("int8", "fp8")


def _sizes(steps: NDArray[Any]) -> list[tuple[float, int]]:
    """Return the mean tokens of steps that are alike, and how many these are."""
    ran = steps[steps > 0]
    powers = np.log2(ran).astype(int)
    return [(float(ran[powers == one].mean()), int((powers == one).sum())) for one in np.unique(powers)]
