"""The store's columns of log-probabilities of answers and prompts. Parts have them only if needed.

A token takes 4 bytes before compression, and 8 more for each top token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.request import PromptLogprobs, TokenLogprobs

LOGPROB_SCHEMA = pa.schema(
    [
        ("logprobs", pa.list_(pa.float32())),  # per token of token_ids
        ("top_logprobs", pa.list_(pa.float32())),  # of the top tokens, flattened: the same number per token
        ("top_token_ids", pa.list_(pa.int32())),  # ids of the top tokens
    ]
)

# With the tokens of prompts, since the index may not have them for rows that an earlier run answered
PROMPT_SCHEMA = pa.schema(
    [
        ("prompt_ids", pa.list_(pa.int32())),
        ("prompt_logprobs", pa.list_(pa.float32())),  # per token of prompt_ids except the first
        ("prompt_top_logprobs", pa.list_(pa.float32())),  # in the format of top_logprobs
        ("prompt_top_ids", pa.list_(pa.int32())),
    ]
)


def prompt_columns(found: Sequence[PromptLogprobs | None]) -> list[pa.Array]:
    """Return the columns of the store for log-probabilities of prompts, in the order of PROMPT_SCHEMA.

    Args:
        found: A value per completion. None becomes null.
    """
    ids = _lists([None if one is None else one.token_ids for one in found], np.int32)
    return [ids, *logprob_columns([None if one is None else one.logprobs for one in found])]


def logprob_columns(found: Sequence[TokenLogprobs | None]) -> list[pa.Array]:
    """Return the columns of the store for log-probabilities of answers, in the order of LOGPROB_SCHEMA.

    Args:
        found: A value per completion. None becomes null.
    """
    return [
        _lists([None if one is None else one.chosen for one in found], np.float32),
        _lists([None if one is None else one.top.reshape(-1) for one in found], np.float32),
        _lists([None if one is None else one.top_ids.reshape(-1) for one in found], np.int32),
    ]


def _lists(values: Sequence[NDArray[Any] | None], kind: type[np.generic]) -> pa.ListArray:
    parts = [np.empty(0, kind), *(part.astype(kind, copy=False) for part in values if part is not None)]
    lengths = [0 if part is None else len(part) for part in values]
    ends = pa.array(np.cumsum([0, *lengths]).astype(np.int32))
    missing = pa.array([part is None for part in values], pa.bool_())
    return pa.ListArray.from_arrays(ends, pa.array(np.concatenate(parts)), mask=missing)
