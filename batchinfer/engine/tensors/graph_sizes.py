"""The sizes of CUDA graphs of decode steps: rows and context bounds.

Imports no torch: the simulator uses the same sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Batch sizes: powers of two up to STRIDE, then multiples of STRIDE, then PARTS sizes per power of two. At most a
# sixteenth of the rows is padding, which costs little: a decode step is bound by reading weights and cache. Each graph
# takes a few MiB and time to capture.
STRIDE, PARTS = 8, 16
# Steps with drafts vary more in size: fewer sizes, which recur more often
DRAFT_PARTS = 4
# Tokens per row (drafts included) for which graphs exist; shorter rows are padded in attention only
DRAFT_QUERIES = (2, 4, 8)
# Rows that a step may sample whatever max_num_seqs is: with a vocabulary of 150,000, their logits take 38 MB
MIN_SAMPLED_ROWS = 64
# Steps whose sampled states are kept for draft heads: the newest step was launched before its predecessor's tokens
# arrived
KEPT_STEPS = 2
# Context bounds: MIN_CONTEXT_BOUND × CONTEXT_BOUND_FACTOR^n. Kernel programs past a context's end return at once
MIN_CONTEXT_BOUND, CONTEXT_BOUND_FACTOR = 1024, 4
# After the warm-up, a size is captured when it occurs for the third time: a capture is slow, and some sizes are rare
CAPTURE_AT_USE = 3


def kept_rows(max_num_seqs: int) -> int:
    """Return the maximum number of rows whose sampled states are kept: of all sequences and of their drafts."""
    return KEPT_STEPS * (max_num_seqs + max(MIN_SAMPLED_ROWS, max_num_seqs))


def batch_sizes(most: int, parts: int = PARTS) -> list[int]:
    """Return the batch sizes up to `most`, ascending: 1, 2, 4, 8, 16, 24, … 256, 272, … 512, 544, … `most`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        below = 1 << size.bit_length() - 1  # the power of two
        size += below if size < STRIDE else max(STRIDE, below // parts)
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class GraphSteps:
    """The decode steps that are replayed as one CUDA graph."""

    rows: int  # rows of the largest step without drafts
    drafted: int = 0  # tokens of the largest step with drafts; 0: steps with drafts have no graphs

    @property
    def most_drafts(self) -> int | None:
        """Return the maximum number of drafts per row in such a step, or None if steps with drafts have no graphs."""
        return DRAFT_QUERIES[-1] - 1 if self.drafted else None

    def padded(self, tokens: int, drafts: bool) -> int:
        """Return the number of tokens that a step of `tokens` tokens computes, padding included."""
        most = self.drafted if drafts else self.rows
        if tokens > most:
            return tokens
        sizes = batch_sizes(most, DRAFT_PARTS if drafts else PARTS)
        return sizes[bisect_left(sizes, tokens)]


def context_bound(longest: int, most: int) -> int:
    """Return the smallest context bound that is at least `longest`, limited to `most`."""
    bound = MIN_CONTEXT_BOUND
    while bound < longest:
        bound *= CONTEXT_BOUND_FACTOR
    return min(bound, most)
