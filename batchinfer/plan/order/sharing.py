"""Counts the tokens that prompts share: with each other, with rows that ran before, with rows to come."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import PrefixForest

_FEWEST = 30  # rows to run from which anything is expected of others
Counts = NDArray[np.int64]
Values = Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Counts what the prompts to run share, in tokens."""

    saved: int  # need not run, as another row to run has them, too
    again: int  # of prefixes that rows begun before have, and rows to run
    # Of the tokens to run, each prefix once, the part that rows to come are expected to have, too: 0 … 1
    recurring: float


NO_SHARING = Sharing(saved=0, again=0, recurring=0.0)


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in the order of their prompts."""

    runs: NDArray[np.bool_]  # whether it is to run; the others ran before
    offsets: Counts  # where the input has it, compared to others
    tokens: NDArray[np.integer]  # of its prompt

    def later_than(self, part: float) -> NDArray[np.bool_]:
        """Return which rows are behind this part of those to run."""
        return self.offsets > np.quantile(self.offsets[self.runs], part)


def sharing(forest: PrefixForest, rows: SortedRows, more: bool) -> Sharing:
    """Return what rows share, whose prompts have these prefixes. `more`: rows are still to come, and what is expected
    of them is estimated, which takes 0.2 s for a million rows."""
    users, own = _users(forest, rows.runs), forest.own.astype(np.int64)
    return Sharing(
        saved=_saved(forest, users),
        again=int(own[(users > 0) & (users < forest.users)].sum()),
        recurring=_recurring(forest, rows) if more and rows.runs.sum() >= _FEWEST else 0.0,
    )


def _recurring(forest: PrefixForest, rows: SortedRows) -> float:
    """Return what is expected of rows to come, by what the first third of the rows to run and the last one share. The
    third between them is left out, so that groups of rows that stand together do not count.

    Of the prefixes of the first third that the last one has not, as many will be met as Chao's estimator says of
    species (Nonparametric estimation of the number of classes in a population, 1984): n1 (n1 - 1) / (2 (n2 + 1)), where
    n1 and n2 were met once and twice.
    """
    early, late = rows.runs & ~rows.later_than(1 / 3), rows.runs & rows.later_than(2 / 3)
    known, meets = _users(forest, early), _users(forest, late)
    own, met = forest.own.astype(np.int64), (known > 0) & (meets > 0)
    once, twice = met & (meets == 1), np.count_nonzero(met & (meets == 2))
    found = int(own[met].sum())
    unmet = (np.count_nonzero(once) - 1) / (2 * (twice + 1)) * float(own[once].sum())
    first = int(rows.tokens[early].sum()) - _saved(forest, known)
    return (found + min(max(0.0, unmet), first - found)) / max(1, first)


def _users(forest: PrefixForest, counted: NDArray[np.bool_]) -> Counts:
    """Count the prompts of each node that are to be counted."""
    before = np.append(0, np.cumsum(counted))
    found: Counts = before[forest.first + forest.users] - before[forest.first]
    return found


def _saved(forest: PrefixForest, users: Counts) -> int:
    """Return how many tokens need not run where these prompts of each node run."""
    return int((forest.own * np.maximum(users - 1, 0)).sum())


def field_order(fields: Sequence[Values], lengths: Sequence[float]) -> list[int]:
    """Return the fields' numbers, the one that saves most first. `fields`: of each its value in every row; `lengths`:
    tokens.

    Greedy as GGR (Liu et al., "Optimizing LLM Queries in Relational Data Analytics Workloads", 2024), but with one
    order for all rows, as a template has: next comes the field that saves most tokens behind the fields chosen so far,
    that is its length for each row but the first of the rows that have equal values so far. Of equals the earlier one.
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
    """Equal numbers for equal values: short ones, however many fields they stand for."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
