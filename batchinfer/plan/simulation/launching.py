"""How a GPU's host launches the steps of a simulated engine: see LaunchMode."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from batchinfer.core.samples import LaunchMode
from batchinfer.engine.tensors.graph_sizes import LATER_FIRST, SHORTEST, batch_sizes, context_bound


@dataclass(frozen=True, slots=True)
class Captures:
    """The largest steps that are captured; nothing is where all are 0."""

    rows: int  # of a decode step
    longest: int  # tokens of a sequence in it
    tokens: int  # of a step that is captured in pieces


class Launching:
    """Says how each step of one run is launched, as `DecodeGraphs` and `PiecewiseGraphs` would do it.

    Kinds of decode steps are told apart by their number of rows, the bound of their contexts, and whether rows share
    blocks. On a GPU it also counts how long rows are split among programs, and how many groups of sharing rows there
    are, so that a few more steps are launched otherwise before each kind has its graph.
    """

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        self._sizes = batch_sizes(captures.rows) if captures.rows else []
        self._seen: Counter[tuple[int, int, bool]] = Counter()

    def mode(self, starts: list[int], lengths: list[int], decodes: bool, shares: bool) -> LaunchMode:
        """Return how a step of chunks that begin at `starts` is launched. `decodes`: every row runs one token and
        samples the next, and nothing is copied; `shares`: rows have blocks in common."""
        if decodes:
            rows, longest = len(starts), max(starts) + 1
            if self._is_covered(rows, longest) and self._is_replayed(rows, longest, shares):
                return "full_graph"
        return "piecewise_graph" if sum(lengths) <= self._captures.tokens else "eager"

    def _is_covered(self, rows: int, longest: int) -> bool:
        return rows <= self._captures.rows and longest <= self._captures.longest

    def _is_replayed(self, rows: int, longest: int, shares: bool) -> bool:
        """Whether it has a graph, or gets one now. The warm-up captures the shortest contexts of rows that share
        nothing."""
        bound = context_bound(longest, self._captures.longest)
        if bound <= SHORTEST and not shares:
            return True
        kind = self._sizes[bisect_left(self._sizes, rows)], bound, shares
        self._seen[kind] += 1
        return self._seen[kind] >= LATER_FIRST
