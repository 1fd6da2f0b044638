"""How many parts of attention a step keeps at most: what plans keep to, and what memory is set aside for.

In the default mode keys are split to fill the GPU, so that there are about as many parts as rows and programs, however
long contexts are. At fixed positions (`deterministic`) there is one for each segment of each row.
"""

from __future__ import annotations

import torch

from batchinfer_kernels.gpu.attention_launch import (
    PREFIX_PROGRAMS_PER_PROCESSOR,
    PROGRAMS_PER_PROCESSOR,
    SEGMENT,
)
from batchinfer_kernels.gpu.target import processors

# Levels of shared prefixes that a step has room for, on average of its rows: instructions, examples, a document and a
# question are four. Rows read the keys of further levels themselves.
LEVELS = 4


def most_members(rows: int) -> int:
    """Rows of all levels together, in the default mode."""
    return LEVELS * rows


def most_shared(rows: int, members: int, kv_heads: int, device: torch.device) -> int:
    """Parts of what rows share, in the default mode. `members`: rows of an item.

    A level of r rows and k keys has ceil(r / members) tiles and ceil(k / segment) parts of each row. The sum of tiles ×
    k / segment is the number of programs at most (`prefix_segment`), and there are `most_members`.
    """
    return most_members(rows) + members * _programs(PREFIX_PROGRAMS_PER_PROCESSOR, kv_heads, device)


def most_own(rows: int, kv_heads: int, device: torch.device, queries: int = 1) -> int:
    """Parts of what rows pass over by themselves, in the default mode, where any row is split. `queries`: the most that
    a sequence has, each of which is a row and has parts of its own of what the sequence is cut into."""
    return rows + queries * _programs(PROGRAMS_PER_PROCESSOR, kv_heads, device)


def most_segments(rows: int, longest: int) -> int:
    """Parts of rows of up to `longest` keys that are cut at fixed positions, whether rows share them or not."""
    return rows * -(-longest // SEGMENT)


def _programs(of_a_processor: int, kv_heads: int, device: torch.device) -> int:
    """Items that fill the GPU: each is a program for each KV head."""
    return -(-of_a_processor * processors(device) // kv_heads)
