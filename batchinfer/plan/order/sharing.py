"""Counts the tokens that prompts share with each other, with earlier rows, and with rows to come."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import PrefixForest

_FEWEST = 30  # least rows to run for an estimate of later rows
Counts = NDArray[np.int64]
Values = Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class Sharing:
    """The tokens that the prompts to run share."""

    saved: int  # tokens that another row to run computes
    again: int  # tokens of prefixes shared by earlier rows and rows to run
    # Estimated share (0 to 1) of the distinct prompt tokens to run that later rows will share
    recurring: float


NO_SHARING = Sharing(saved=0, again=0, recurring=0.0)


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows in the order of their prompts."""

    runs: NDArray[np.bool_]  # True for rows to run, False for earlier rows
    offsets: Counts  # increases with the position in the input
    tokens: NDArray[np.integer]  # prompt tokens

    def later_than(self, part: float) -> NDArray[np.bool_]:
        """Return a mask of the rows that come after this share (0 to 1) of the rows to run."""
        return self.offsets > np.quantile(self.offsets[self.runs], part)


def sharing(forest: PrefixForest, rows: SortedRows, more: bool) -> Sharing:
    """Return the tokens that rows share.

    If `more` is True, further rows will follow, and their sharing is estimated: 0.2 s for a million rows.
    """
    users, own = _users(forest, rows.runs), forest.own.astype(np.int64)
    return Sharing(
        saved=_saved(forest, users),
        again=int(own[(users > 0) & (users < forest.users)].sum()),
        recurring=_recurring(forest, rows) if more and rows.runs.sum() >= _FEWEST else 0.0,
    )


def _recurring(forest: PrefixForest, rows: SortedRows) -> float:
    """Estimate the share of prefix tokens that later rows will have too, from the first and last third of the rows.

    The middle third is ignored, so groups of neighbouring rows do not count. Chao's estimator of unseen species
    (Nonparametric estimation of the number of classes in a population, 1984) gives the prefixes of the first third
    that the last third lacks but later rows will have: n1 (n1 - 1) / (2 (n2 + 1)), with n1 and n2 met once and
    twice.
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
    """Return the number of counted prompts of each node."""
    before = np.append(0, np.cumsum(counted))
    found: Counts = before[forest.first + forest.users] - before[forest.first]
    return found


def _saved(forest: PrefixForest, users: Counts) -> int:
    """Return the tokens that need not run if each node's prefix is computed once."""
    return int((forest.own * np.maximum(users - 1, 0)).sum())


def field_order(fields: Sequence[Values], lengths: Sequence[float]) -> list[int]:
    """Return the order of fields that shares most tokens, as field numbers.

    A greedy algorithm like GGR (Liu et al., "Optimizing LLM Queries in Relational Data Analytics Workloads", 2024),
    but with one order for all rows, as in a template: each step appends the field that saves most tokens.

    Args:
        fields: The values of each field, one per row.
        lengths: Mean tokens of each field.
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
    """Replace values by small integers. Equal values get equal numbers."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
