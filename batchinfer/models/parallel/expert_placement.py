"""The experts of each layer that each rank holds: contiguous ranges, or a balanced placement. No torch.

A balanced placement gives the ranks similar loads, as DeepSeek's load balancer for experts does (EPLB; Liu et al.,
2024): costly experts get several copies, and the copies are assigned to ranks, the most costly first. Then the most
loaded rank exchanges experts with others while that reduces its load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from batchinfer.models.spec.spec import HeldExpert

Shares = tuple[tuple[int, ...], ...]  # the experts of a layer on each rank, in ascending order
# costs[expert][copies - 1]: the cost of an expert for each of the ranks that hold a copy of it
Costs = Sequence[Sequence[float]]
LOAD_TOLERANCE = 0.02  # relative increase of the greatest load that is accepted to save copies
MAX_EXCHANGES = 64
EXCHANGE_PARTNERS = 3  # the least loaded ranks, which are tried as partners of an exchange


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """A distribution of the experts of each layer over ranks. An expert may be on several ranks.

    Args:
        layers: layers[layer][rank] are the numbers of the experts that the rank holds; layers[layer] is () for a layer
            without experts.
    """

    layers: tuple[Shares, ...]

    def held(self, layer: int, rank: int) -> tuple[HeldExpert, ...]:
        """Return the experts of a layer that a rank holds, in ascending order.

        Args:
            layer: The number of the layer.
            rank: The number of the rank.
        """
        shares = self.layers[layer]
        return tuple(_held_expert(shares, rank, number) for number in shares[rank])


def split_into_ranges(experts: int, ranks: int) -> Shares:
    """Divide the experts of a layer into one contiguous range per rank. Sizes of ranges differ by at most one.

    Args:
        experts: The number of experts.
        ranks: The number of ranks.
    """
    return tuple(
        tuple(range(experts * rank // ranks, experts * (rank + 1) // ranks)) for rank in range(ranks)
    )


def rank_loads(shares: Shares, loads: Sequence[float]) -> list[float]:
    """Return the load of each rank from one layer's experts. Copies of an expert share its load evenly.

    Args:
        shares: Per rank, the numbers of the experts that it holds.
        loads: The load of each expert, such as its number of tokens.
    """
    copies = Counter(number for share in shares for number in share)
    return [sum(loads[number] / copies[number] for number in share) for share in shares]


def imbalance(layers: Sequence[tuple[Shares, Sequence[float]]]) -> float:
    """Return the greatest load of a rank divided by the mean load of the ranks; 1 if there is no load.

    The greatest and the mean load are computed per layer, and summed over the layers before the division.

    Args:
        layers: For each layer, the experts of each rank, and the load of each expert.
    """
    # Ranks wait for each other after each layer
    each = [rank_loads(*layer) for layer in layers]
    mean = sum(sum(ranks) / len(ranks) for ranks in each)
    return sum(map(max, each)) / mean if mean else 1.0


def _held_expert(shares: Shares, rank: int, number: int) -> HeldExpert:
    having = [other for other, share in enumerate(shares) if number in share]
    return HeldExpert(number, having.index(rank), len(having))


def balance_experts(costs: Costs, ranks: int, extra: int) -> Shares:
    """Distribute the experts of a layer over ranks, such that the greatest load of a rank is small.

    An expert with a great load may have copies on several ranks. Each rank holds at least one expert.

    Args:
        costs: costs[expert][copies - 1] is the load that an expert with `copies` copies adds to each of its ranks.
        ranks: The number of ranks.
        extra: How many experts a rank may hold in addition to its even share.

    Returns:
        The numbers of the experts on each rank, in ascending order.

    Raises:
        ValueError: There are more ranks than experts.
    """
    if not 1 <= ranks <= len(costs):
        raise ValueError(f"{len(costs)} experts have no part for each of {ranks} ranks")
    share = -(-len(costs) // ranks)
    # A lower bound of the greatest load, for any number of copies
    mean = sum(min(each * held for held, each in enumerate(of, 1)) for of in costs) / ranks
    found = list[tuple[float, Shares]]()
    for more in _powers_of_two(min(extra, len(costs) - share)):
        for copies in _copy_counts(costs, ranks, ranks * (share + more) - len(costs)):
            found.append(_pack_copies(costs, ranks, share + more, copies))
            if found[-1][0] <= mean * (1 + LOAD_TOLERANCE):
                return found[-1][1]
    # Later candidates have more copies, which take memory
    least = min(load for load, _ in found)
    return next(shares for load, shares in found if load <= least * (1 + LOAD_TOLERANCE))


def _powers_of_two(most: int) -> list[int]:
    return sorted({0, most, *(1 << power for power in range(most.bit_length()))})


def _copy_counts(costs: Costs, ranks: int, most: int) -> list[list[int]]:
    # Candidates for the number of copies of each expert. The first one has one copy of each expert, the others have
    # 1, 2, 4 … further copies in all. A further copy goes to the expert that puts the greatest load on a rank, if a
    # copy reduces this load
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


def _pack_copies(costs: Costs, ranks: int, room: int, copies: Sequence[int]) -> tuple[float, Shares]:
    # Returns the greatest load of a rank, and the experts of each rank
    each = [of[held - 1] for of, held in zip(costs, copies, strict=True)]
    shares: list[set[int]] = [set() for _ in range(ranks)]
    loads, left = [0.0] * ranks, sum(copies)
    # Experts with more copies go first if costs are equal: fewer ranks are left to choose from
    for number in sorted(range(len(costs)), key=lambda one: (-each[one], -copies[one], one)):
        for _ in range(copies[number]):
            empty = sum(not share for share in shares)
            free = [
                rank
                for rank, share in enumerate(shares)
                if number not in share and len(share) < room and (not share or left > empty)
            ]
            if not free:
                continue  # the expert gets fewer copies: every rank without it is full
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
    # The most loaded rank exchanges experts with others, while this reduces the greater load of the two ranks. Changes
    # shares and loads in place
    for _ in range(MAX_EXCHANGES):
        *others, most = sorted(range(len(loads)), key=loads.__getitem__)
        found = [_best_exchange(each, shares, loads, most, other) for other in others[:EXCHANGE_PARTNERS]]
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
    # Returns the greater load after the exchange, the expert of `most`, the expert of `other`, and `other`
    owns, theirs = sorted(shares[most] - shares[other]), sorted(shares[other] - shares[most])
    if not owns or not theirs:
        return None
    costs = np.asarray(each)
    moved = costs[owns][:, None] - costs[theirs][None]
    after = np.maximum(loads[most] - moved, loads[other] + moved)
    at, to = divmod(int(after.argmin()), len(theirs))
    return float(after[at, to]), owns[at], theirs[to], other
