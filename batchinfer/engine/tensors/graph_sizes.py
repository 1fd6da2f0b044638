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
    """Return the maximum number of hidden states that are stored for draft heads: the states of two steps with drafts.

    Args:
        max_num_seqs: Maximum number of running sequences of the engine.
    """
    return KEPT_STEPS * (max_num_seqs + max(MIN_SAMPLED_ROWS, max_num_seqs))


def batch_sizes(most: int, parts: int = PARTS) -> list[int]:
    """Return the batch sizes for which CUDA graphs are captured, ascending.

    With the default for `parts`, they are 1, 2, 4, 8, 16, 24, … 256, 272, … 512, 544, … `most`.

    Args:
        most: The largest batch size.
        parts: The number of sizes between a power of two and the next one, for large sizes.
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        below = 1 << size.bit_length() - 1  # the power of two
        size += below if size < STRIDE else max(STRIDE, below // parts)
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class GraphSteps:
    """The maximum sizes of decode steps that are replayed as one CUDA graph.

    Attributes:
        rows: The number of tokens, one per sequence, of the largest step without drafts.
        drafted: The number of tokens of the largest step with drafts, or 0 if steps with drafts have no graphs.
    """

    rows: int
    drafted: int = 0

    @property
    def most_drafts(self) -> int | None:
        """The maximum number of drafts per sequence in a captured step, or None if steps with drafts have no graphs."""
        return DRAFT_QUERIES[-1] - 1 if self.drafted else None

    def padded(self, tokens: int, drafts: bool) -> int:
        """Return the number of tokens that a step computes, padding included.

        Args:
            tokens: The number of tokens of the step without padding. A step that is too large for a graph is not
                padded.
            drafts: True if the step verifies drafts.
        """
        most = self.drafted if drafts else self.rows
        if tokens > most:
            return tokens
        sizes = batch_sizes(most, DRAFT_PARTS if drafts else PARTS)
        return sizes[bisect_left(sizes, tokens)]


def context_bound(longest: int, most: int) -> int:
    """Return the context length for which the attention of a step is captured: 1,024, 4,096, 16,384, … tokens.

    Args:
        longest: The longest context of the step in tokens. The result is at least this length.
        most: The maximum result.
    """
    bound = MIN_CONTEXT_BOUND
    while bound < longest:
        bound *= CONTEXT_BOUND_FACTOR
    return min(bound, most)
