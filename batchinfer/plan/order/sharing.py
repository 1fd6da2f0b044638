"""Counts the tokens that prompts share: with each other, with rows that ran before, with rows to come."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.prefix_forest import PrefixForest

_FEWEST = 30  # rows to run from which anything is expected of others
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Says what rows that are still to come will share with the rows to run, by what the first third of these and the
    last one share. The third between them is left out, so that groups of rows that stand together do not count."""

    # Of the tokens to run, each prefix once, the part that later rows are expected to have, too: 0 … 1
    part: float = 0.0
    exponent: float = 1.0  # n times as many rows have n ** exponent times as many tokens, each prefix once

    def share_again(self, now: float, begun: float, later: float) -> float:
        """Return the part of all tokens that run again if these rows run `now`, and those to come `later`, whose
        prefixes are not known by then. All are given in rows; so many were `begun` before.

        Two estimates are taken, and the larger one counts. One sees how documents recur before they do, as most of
        them were met once so far. The other is right where rows share prefixes of all lengths.
        """
        new = begun + now + later * (1 - self.part)
        met = self.part * now / new
        grown = [float(rows**self.exponent) for rows in (now, later, now + later, begun + now + later)]
        return max(met, (grown[0] + grown[1] - grown[2]) / grown[3])


@dataclass(frozen=True, slots=True)
class Sharing:
    """Counts what the prompts to run share, in tokens."""

    saved: int  # need not run, as another row to run has them, too
    again: int  # of prefixes that rows begun before have, and rows to run
    recurrence: Recurrence


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
        recurrence=_recurrence(forest, rows) if more and rows.runs.sum() >= _FEWEST else Recurrence(),
    )


def _recurrence(forest: PrefixForest, rows: SortedRows) -> Recurrence:
    """Return what is expected of rows to come.

    Of the prefixes of the first third that the last one has not, as many will be met as Chao's estimator says of
    species (Nonparametric estimation of the number of classes in a population, 1984): n1 (n1 - 1) / (2 (n2 + 1)), where
    n1 and n2 were met once and twice. The exponent is that of Heaps' law (Information retrieval, 1978).
    """
    early, late = rows.runs & ~rows.later_than(1 / 3), rows.runs & rows.later_than(2 / 3)
    known, meets = _users(forest, early), _users(forest, late)
    own, met = forest.own.astype(np.int64), (known > 0) & (meets > 0)
    once, twice = met & (meets == 1), np.count_nonzero(met & (meets == 2))
    found = int(own[met].sum())
    unmet = (np.count_nonzero(once) - 1) / (2 * (twice + 1)) * float(own[once].sum())
    first, last, both = (
        int(rows.tokens[some].sum()) - _saved(forest, users)
        for some, users in ((early, known), (late, meets), (early | late, known + meets))
    )
    part = (found + min(max(0.0, unmet), first - found)) / max(1, first)
    return Recurrence(part, float(np.log2(max(1.0, 2 * both / max(1, first + last)))))


def _users(forest: PrefixForest, counted: NDArray[np.bool_]) -> Counts:
    """Count the prompts of each node that are to be counted."""
    before = np.append(0, np.cumsum(counted))
    found: Counts = before[forest.first + forest.users] - before[forest.first]
    return found


def _saved(forest: PrefixForest, users: Counts) -> int:
    """Return how many tokens need not run where these prompts of each node run."""
    return int((forest.own * np.maximum(users - 1, 0)).sum())
