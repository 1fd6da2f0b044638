"""The experts of each layer that each of several ranks has, ranged or balanced. No torch.

A balanced placement gives the ranks about equal loads: the most costly experts are repeated, and all copies are packed
onto ranks, the most costly first, as DeepSeek's load balancer for experts does (EPLB; Liu et al., 2024). Then the most
loaded rank exchanges experts with others as long as that helps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchinfer.models.spec.spec import HeldExpert

Shares = tuple[tuple[int, ...], ...]  # the experts of a layer on each rank, in the order of their numbers
# costs[expert][copies - 1]: what an expert takes each of the ranks that have it, where so many have it
Costs = Sequence[Sequence[float]]
NEAR = 0.02  # a share of the greatest load, which is not worth another copy
MOST_EXCHANGES = 64
EXCHANGING = 3  # ranks of which one takes part in each exchange: those with the least


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


def balanced(costs: Costs, ranks: int, beside: int) -> Shares:
    """Return the experts of each rank, such that the greatest load is small: with as few on each rank, and as few
    copies, as come near what is reached where each has up to `beside` more than its even share. Every rank has one or
    more, and every expert is somewhere. Raises ValueError for more ranks than experts.
    """
    if not 1 <= ranks <= len(costs):
        raise ValueError(f"{len(costs)} experts have no part for each of {ranks} ranks")
    share = -(-len(costs) // ranks)
    # No placement has less than the mean, of whatever copies it is
    mean = sum(min(each * held for held, each in enumerate(of, 1)) for of in costs) / ranks
    found = list[tuple[float, Shares]]()
    for more in _doubled(min(beside, len(costs) - share)):
        for copies in _numbers(costs, ranks, ranks * (share + more) - len(costs)):
            found.append(_packed(costs, ranks, share + more, copies))
            if found[-1][0] <= mean * (1 + NEAR):
                return found[-1][1]
    least = min(load for load, _ in found)
    return next(shares for load, shares in found if load <= least * (1 + NEAR))


def _doubled(most: int) -> list[int]:
    """Return 0, 1, 2, 4 … up to the most."""
    return sorted({0, most, *(1 << power for power in range(most.bit_length()))})


def _numbers(costs: Costs, ranks: int, most: int) -> list[list[int]]:
    """Return how many copies each expert has: one; then with 1, 2, 4 … more of those that are most costly, as far as
    they become less costly by that."""
    copies, found = [1] * len(costs), [[1] * len(costs)]
    for more in range(1, most + 1):
        helped = [
            number
            for number, held in enumerate(copies)
            if held < min(ranks, len(costs[number])) and costs[number][held] < costs[number][held - 1]
        ]
        if not helped:
            break
        copies[max(helped, key=lambda number: costs[number][copies[number] - 1])] += 1
        if more & (more - 1) == 0 or more == most:
            found.append([*copies])
    return found if copies == found[-1] else [*found, copies]


def _packed(costs: Costs, ranks: int, room: int, copies: Sequence[int]) -> tuple[float, Shares]:
    """Return the greatest load, and the experts of each rank."""
    each = [of[held - 1] for of, held in zip(costs, copies, strict=True)]
    shares: list[set[int]] = [set() for _ in range(ranks)]
    loads, left = [0.0] * ranks, sum(copies)
    # Those with more copies first: of equals they have the fewest ranks to go to
    for number in sorted(range(len(costs)), key=lambda one: (-each[one], -copies[one], one)):
        for _ in range(copies[number]):
            empty = sum(not share for share in shares)
            free = [
                rank
                for rank, share in enumerate(shares)
                if number not in share and len(share) < room and (not share or left > empty)
            ]
            if not free:
                continue  # fewer copies: the ranks that have none of it are full
            rank = min(free, key=lambda one: (loads[one], len(shares[one]), one))
            shares[rank].add(number)
            loads[rank] += each[number]
            left -= 1
    _exchange(each, shares, loads)
    return max(_loads(costs, shares)), tuple(tuple(sorted(share)) for share in shares)


def _loads(costs: Costs, shares: Sequence[set[int]]) -> list[float]:
    held = Counter(number for share in shares for number in share)
    return [sum(costs[number][held[number] - 1] for number in share) for share in shares]


def _exchange(each: Sequence[float], shares: list[set[int]], loads: list[float]) -> None:
    """Let the most loaded rank exchange an expert with another one, while it comes to have less to do than it had, and
    so does the other."""
    for _ in range(MOST_EXCHANGES):
        *others, most = sorted(range(len(loads)), key=loads.__getitem__)
        found = [_best_exchange(each, shares, loads, most, other) for other in others[:EXCHANGING]]
        after, own, its, other = min((one for one in found if one is not None), default=(0.0, 0, 0, -1))
        if other < 0 or after >= loads[most] * (1 - 1e-9):
            return
        moved = each[own] - each[its]
        shares[most] ^= {own, its}
        shares[other] ^= {own, its}
        loads[most], loads[other] = loads[most] - moved, loads[other] + moved


def _best_exchange(
    each: Sequence[float], shares: Sequence[set[int]], loads: Sequence[float], most: int, other: int
) -> tuple[float, int, int, int] | None:
    """Return the greater load of both ranks after an exchange, and which experts they exchange; None: none can be."""
    owns, theirs = sorted(shares[most] - shares[other]), sorted(shares[other] - shares[most])
    if not owns or not theirs:
        return None
    costs = np.asarray(each)
    moved = costs[owns][:, None] - costs[theirs][None]
    after = np.maximum(loads[most] - moved, loads[other] + moved)
    at, to = divmod(int(after.argmin()), len(theirs))
    return float(after[at, to]), owns[at], theirs[to], other
