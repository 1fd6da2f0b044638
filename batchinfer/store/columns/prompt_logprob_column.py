"""The result's column of prompts' log-probabilities, for each token and for the top tokens at its position."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.store.columns.logprob_column import (
    LOGPROBS_FIELD,
    Detokenizer,
    combine_lists,
    list_ends,
    list_lengths,
    list_starts,
    list_values,
    ranges,
    token_entries,
)

PROMPT_COLUMN = "prompt_logprobs"
PROMPT_LOGPROBS_FIELD = pa.field(PROMPT_COLUMN, LOGPROBS_FIELD.type)


def prompt_logprob_column(
    matched: pa.Table, answered: NDArray[np.bool_], detokenizer: Detokenizer
) -> pa.Array:
    """Return the result column `prompt_logprobs`, with the log-probabilities of each prompt's tokens.

    It is null for a row without an answer, and for a row that did not request them. The first token of a
    prompt is included, but has no log-probability.

    Args:
        matched: The completion of each row, with the store columns of prompts' log-probabilities.
        answered: A boolean per row: True if it has an answer.
        detokenizer: Converts tokens to text.
    """
    names = ("prompt_ids", "prompt_logprobs", "prompt_top_logprobs", "prompt_top_ids")
    ids, own, top, top_ids = (combine_lists(matched.column(name)) for name in names)
    asked = answered & ids.is_valid().to_numpy(zero_copy_only=False)
    count = np.where(asked, list_lengths(ids), 0)
    later = np.maximum(count - 1, 0)
    most = list_lengths(top) // np.maximum(later, 1)
    places = ranges(list_starts(top), later * most)
    likely = token_entries(list_values(top_ids)[places], list_values(top)[places], detokenizer)
    first = np.zeros(int(count.sum()), np.bool_)
    first[(np.cumsum(count) - count)[count > 0]] = True
    logprobs, each = np.zeros(len(first), np.float32), np.zeros(len(first), np.int64)
    logprobs[~first] = list_values(own)[ranges(list_starts(own), later)]
    each[~first] = np.repeat(most, later)
    tokens = list_values(ids)[ranges(list_starts(ids), count)]
    token_id, text, _ = token_entries(tokens, logprobs, detokenizer).flatten()
    known = pa.array(logprobs, pa.float32(), mask=first)
    fields = [token_id, text, known, pa.ListArray.from_arrays(pa.array(list_ends(each)), likely)]
    entries = pa.StructArray.from_arrays(fields, fields=list(PROMPT_LOGPROBS_FIELD.type.value_type))
    return pa.ListArray.from_arrays(pa.array(list_ends(count)), entries, mask=pa.array(~asked))
