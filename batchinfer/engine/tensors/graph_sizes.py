"""The sizes of decode steps' CUDA graphs: numbers of rows, and bounds of contexts.

No torch: the simulator counts by the same sizes."""

from __future__ import annotations

# Batch sizes: up to STRIDE powers of two, then its multiples, and from STRIDE × PARTS rows on PARTS sizes before each
# power of two. A decode step reads the weights and the cache whatever it is padded to, so that a sixteenth of rows more
# costs little; each graph keeps a few MiB, and takes its time to be captured.
STRIDE, PARTS = 8, 16
# Bounds of the longest context, each a multiple of the one before. Programs behind a context's end return at once.
SHORTEST, GROWTH = 1024, 4
# After the warm-up a kind of step is captured when it comes for the third time: a capture takes as long as many steps,
# and some kinds never come again.
LATER_FIRST = 3


def batch_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, … 256, 272, … 512, 544, … and `most`, ascending."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        below = 1 << size.bit_length() - 1  # the power of two
        size += below if size < STRIDE else max(STRIDE, below // PARTS)
    return [*sizes, most]


def context_bound(longest: int, most: int) -> int:
    """The least of SHORTEST, SHORTEST × GROWTH, … that is no less than `longest`, `most` at most."""
    bound = SHORTEST
    while bound < longest:
        bound *= GROWTH
    return min(bound, most)
