"""Counts the tokens that prompts share with each other, with earlier rows, and with rows to come."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import PrefixForest

_FEWEST = 30  # minimum number of rows to run for an estimate of later rows
Counts = NDArray[np.int64]
Values = Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Sharing:
    """The numbers of prompt tokens that requests share.

    Attributes:
        saved: Prompt tokens that need not be computed, because another request to run has the same prefix.
        again: Tokens of prefixes that requests to run have in common with requests that engines received before.
        recurring: Estimated share (0 to 1) of the prompt tokens to run that rows not read yet will have as prefixes,
            too. A shared prefix is counted once. 0 if not estimated.
    """

    saved: int
    again: int
    recurring: float


NO_SHARING = Sharing(saved=0, again=0, recurring=0.0)


@dataclass(frozen=True, slots=True)
class SortedRows:
    """The requests of a prefix tree, in the order of their prompts in the tree.

    Attributes:
        runs: True for requests to run, False for requests that engines received before.
        offsets: Position of each prompt in the stored tokens of all prompts. It increases with the position in the
            input.
        tokens: Number of prompt tokens of each request.
    """

    runs: NDArray[np.bool_]
    offsets: Counts
    tokens: NDArray[np.integer]

    def later_than(self, part: float) -> NDArray[np.bool_]:
        """Return a mask of the requests that come late in the input, in the order of the tree.

        Args:
            part: Share, 0 to 1. The mask is False for the first `part` of the requests to run, in input order, and True
                after them.
        """
        return self.offsets > np.quantile(self.offsets[self.runs], part)


def measure_sharing(forest: PrefixForest, rows: SortedRows, more: bool) -> Sharing:
    """Count the prompt tokens that requests share.

    Args:
        forest: The prefix tree of all requests.
        rows: The requests, in the order of the tree.
        more: Whether further rows will be read, so that `Sharing.recurring` is estimated.
    """
    users, own = _users(forest, rows.runs), forest.own.astype(np.int64)
    return Sharing(
        saved=_saved(forest, users),
        again=int(own[(users > 0) & (users < forest.users)].sum()),
        recurring=_recurring(forest, rows) if more and rows.runs.sum() >= _FEWEST else 0.0,
    )


def _recurring(forest: PrefixForest, rows: SortedRows) -> float:
    # The middle third is ignored, so groups of neighbouring rows do not count. Chao's estimator of unseen species
    # (Nonparametric estimation of the number of classes in a population, 1984) gives the prefixes of the first
    # third that the last third lacks but later rows will have: n1 (n1 - 1) / (2 (n2 + 1)). n1 and n2 are the
    # numbers of prefixes that occur once and twice in the last third.
    early, late = rows.runs & ~rows.later_than(1 / 3), rows.runs & rows.later_than(2 / 3)
    known, meets = _users(forest, early), _users(forest, late)
    own, met = forest.own.astype(np.int64), (known > 0) & (meets > 0)
    once, twice = met & (meets == 1), np.count_nonzero(met & (meets == 2))
    found = int(own[met].sum())
    unmet = (np.count_nonzero(once) - 1) / (2 * (twice + 1)) * float(own[once].sum())
    first = int(rows.tokens[early].sum()) - _saved(forest, known)
    return (found + min(max(0.0, unmet), first - found)) / max(1, first)


def _users(forest: PrefixForest, counted: NDArray[np.bool_]) -> Counts:
    before = np.append(0, np.cumsum(counted))
    found: Counts = before[forest.first + forest.users] - before[forest.first]
    return found


def _saved(forest: PrefixForest, users: Counts) -> int:
    return int((forest.own * np.maximum(users - 1, 0)).sum())


def field_order(fields: Sequence[Values], lengths: Sequence[float]) -> list[int]:
    """Return the order of a prompt's fields in which rows share the largest number of tokens, as field numbers.

    A greedy algorithm like GGR (Liu et al., "Optimizing LLM Queries in Relational Data Analytics Workloads", 2024), but
    with one order for all rows, as in a template: it repeatedly appends the field that saves the largest number of
    tokens.

    Args:
        fields: For each field, its value in every row.
        lengths: Mean number of tokens of each field.
    """
    left, order = list(range(len(fields))), []
    groups: Values = [()] * (len(fields[0]) if fields else 0)
    while left:
        saved = [
            (len(groups) - len(set(zip(groups, fields[one], strict=True)))) * lengths[one] for one in left
        ]
        chosen = left[saved.index(max(saved))]
        left.remove(chosen)
        order.append(chosen)
        groups = _numbered(list(zip(groups, fields[chosen], strict=True)))
    return order


def _numbered(values: Values) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
