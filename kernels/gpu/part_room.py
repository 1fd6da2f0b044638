"""The most partial attention results of a step: the bound of plans, and the memory that is reserved for them.

By default keys are split to fill the GPU, so the number of parts is about rows plus programs, whatever the contexts. At
fixed positions (`deterministic`) there is one part per segment and row.
"""

from __future__ import annotations

import torch

from batchinfer_kernels.gpu.attention_launch import (
    PREFIX_PROGRAMS_PER_PROCESSOR,
    PROGRAMS_PER_PROCESSOR,
    SEGMENT,
)
from batchinfer_kernels.gpu.target import processors

# Average number of levels of shared prefixes per row that a step has room for; instructions, examples, a document and a
# question are four. Rows read the keys of further levels on their own
LEVELS = 4


def most_members(rows: int) -> int:
    """Return the maximum total number of rows in the groups of a step that share a prefix.

    A row is a query, and counts once for each group that contains it. Groups beyond this number are not used, so their
    rows read all keys for themselves.

    Args:
        rows: number of rows of the step.
    """
    return LEVELS * rows


def most_shared(rows: int, members: int, kv_heads: int, device: torch.device) -> int:
    """Return the maximum number of partial attention results over shared keys in a step.

    Deterministic mode, which splits keys at fixed positions, may need more; see `most_segments`.

    Args:
        rows: number of rows (queries) of the step.
        members: maximum number of rows of a work item.
        kv_heads: number of KV heads.
        device: the GPU.
    """
    return most_members(rows) + members * _programs(PREFIX_PROGRAMS_PER_PROCESSOR, kv_heads, device)


def most_own(rows: int, kv_heads: int, device: torch.device, queries: int = 1) -> int:
    """Return the maximum number of partial attention results over keys that rows read for themselves.

    Deterministic mode, which splits keys at fixed positions, may need more; see `most_segments`.

    Args:
        rows: number of rows (queries) of the step.
        kv_heads: number of KV heads.
        device: the GPU.
        queries: maximum number of queries of a sequence; each has its own result for every item of the sequence.
    """
    return rows + queries * _programs(PROGRAMS_PER_PROCESSOR, kv_heads, device)


def most_segments(rows: int, longest: int) -> int:
    """Return the maximum number of partial attention results in deterministic mode, which splits every SEGMENT keys.

    Args:
        rows: number of rows (queries) of the step.
        longest: maximum number of keys of a row.
    """
    return rows * -(-longest // SEGMENT)


def _programs(of_a_processor: int, kv_heads: int, device: torch.device) -> int:
    return -(-of_a_processor * processors(device) // kv_heads)
