"""The sizes of decode steps' CUDA graphs: numbers of rows, and bounds of contexts.

No torch: the simulator counts by the same sizes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Batch sizes: up to STRIDE powers of two, then its multiples, and from STRIDE × PARTS rows on PARTS sizes before each
# power of two. A decode step reads the weights and the cache whatever it is padded to, so that a sixteenth of rows more
# costs little; each graph keeps a few MiB, and takes its time to be captured.
STRIDE, PARTS = 8, 16
# Steps that verify drafts have other numbers of tokens each time: fewer sizes, so that they come again
DRAFT_PARTS = 4
# The tokens of a row for which there are graphs, drafts included; a row with fewer has them padded in attention alone
DRAFT_QUERIES = (2, 4, 8)
# So many rows may be sampled in a step whatever max_num_seqs is: 150,000 logits of each take 38 MB in all
FEW_ROWS = 64
# Steps whose sampled states are kept for heads: behind the one whose tokens have just arrived another one was launched
KEPT_STEPS = 2
# Bounds of the longest context, each a multiple of the one before. Programs behind a context's end return at once.
SHORTEST, GROWTH = 1024, 4
# After the warm-up a kind of step is captured when it comes for the third time: a capture takes as long as many steps,
# and some kinds never come again.
LATER_FIRST = 3


def kept_rows(max_num_seqs: int) -> int:
    """Return the most rows whose sampled states are kept: one of each sequence, and as many as drafts may have."""
    return KEPT_STEPS * (max_num_seqs + max(FEW_ROWS, max_num_seqs))


def batch_sizes(most: int, parts: int = PARTS) -> list[int]:
    """1, 2, 4, 8, 16, 24, … 256, 272, … 512, 544, … and `most`, ascending."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        below = 1 << size.bit_length() - 1  # the power of two
        size += below if size < STRIDE else max(STRIDE, below // parts)
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class GraphSteps:
    """The steps of rows that decode which are replayed as a whole."""

    rows: int  # of the largest without drafts
    drafted: int = 0  # tokens of the largest with drafts; 0: these are launched otherwise

    @property
    def most_drafts(self) -> int | None:
        """The most drafts of a row in such a step; None: those with drafts are launched otherwise."""
        return DRAFT_QUERIES[-1] - 1 if self.drafted else None

    def padded(self, tokens: int, drafts: bool) -> int:
        """Return how many tokens are computed in a step of so many."""
        most = self.drafted if drafts else self.rows
        if tokens > most:
            return tokens
        sizes = batch_sizes(most, DRAFT_PARTS if drafts else PARTS)
        return sizes[bisect_left(sizes, tokens)]


def context_bound(longest: int, most: int) -> int:
    """The least of SHORTEST, SHORTEST × GROWTH, … that is no less than `longest`, `most` at most."""
    bound = SHORTEST
    while bound < longest:
        bound *= GROWTH
    return min(bound, most)
