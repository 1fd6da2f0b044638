"""The experts of each layer that each of several ranks has. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from batchinfer.models.spec.spec import HeldExpert

Shares = tuple[tuple[int, ...], ...]  # the experts of a layer on each rank, in the order of their numbers


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """The experts that each rank has of each layer of a whole model, where these are no ranges; an expert may be on
    several ranks. Layers without experts have ()."""

    layers: tuple[Shares, ...]

    def held(self, layer: int, rank: int) -> tuple[HeldExpert, ...]:
        """Return what a rank has of a layer. Copies take turns in the order of their ranks."""
        shares = self.layers[layer]
        return tuple(_held(shares, rank, number) for number in shares[rank])


def ranged(experts: int, ranks: int) -> Shares:
    """Return the experts of a layer in ranges, which differ by one expert at most."""
    return tuple(
        tuple(range(experts * rank // ranks, experts * (rank + 1) // ranks)) for rank in range(ranks)
    )


def rank_loads(shares: Shares, loads: Sequence[float]) -> list[float]:
    """Return what each rank has of a layer's loads, one for each expert; copies have even parts."""
    copies = Counter(number for share in shares for number in share)
    return [sum(loads[number] / copies[number] for number in share) for share in shares]


def imbalance(layers: Sequence[tuple[Shares, Sequence[float]]]) -> float:
    """Return the load of the most loaded rank of each layer, summed over layers, over that of the mean rank: how many
    times as long as even ranks all wait, as they meet behind each layer. 1 where nothing was loaded."""
    each = [rank_loads(*layer) for layer in layers]
    mean = sum(sum(ranks) / len(ranks) for ranks in each)
    return sum(map(max, each)) / mean if mean else 1.0


def _held(shares: Shares, rank: int, number: int) -> HeldExpert:
    having = [other for other, share in enumerate(shares) if number in share]
    return HeldExpert(number, having.index(rank), len(having))
