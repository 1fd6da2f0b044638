"""The result's column of log-probabilities, for each token of an answer and for the top tokens at its position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

COLUMN = "logprobs"
_TOKEN = (("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32()))
_LIKELY = pa.struct(_TOKEN)
LOGPROBS_FIELD = pa.field(COLUMN, pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(_LIKELY))])))
_INCOMPLETE = "\ufffd"  # decoded text of an incomplete character
Places = NDArray[np.int64]


class Detokenizer(Protocol):
    """Converts token ids to text."""

    def decode_batch(self, rows: list[Sequence[int]]) -> list[str]:
        """Return the text of each sequence of token ids, without special tokens."""

    def decode_shown(self, rows: list[Sequence[int]], shown: frozenset[int]) -> list[str]:
        """Return the text of each sequence of token ids. Special tokens are left out unless in `shown`."""

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token on its own, including special ones."""


def logprob_column(matched: pa.Table, answered: NDArray[np.bool_], detokenizer: Detokenizer) -> pa.Array:
    """Return the result column `logprobs`, with the log-probabilities of each answer's tokens.

    It is null for a row without an answer, and for a row that did not request log-probabilities. If a stop
    string ended an answer, only the tokens of the text before it are included.

    Args:
        matched: The completion of each row, with the store columns of log-probabilities.
        answered: A boolean per row: True if it has an answer.
        detokenizer: Converts tokens to text.
    """
    ids, own, top, top_ids = (
        combine_lists(matched.column(name))
        for name in ("token_ids", "logprobs", "top_logprobs", "top_token_ids")
    )
    asked = answered & own.is_valid().to_numpy(zero_copy_only=False)
    count = np.where(asked, list_lengths(ids), 0)
    kept = _within_text(matched, ids, count, detokenizer)
    most = list_lengths(top) // np.maximum(count, 1)  # top tokens per token
    places = ranges(list_starts(top), kept * most)
    likely = token_entries(list_values(top_ids)[places], list_values(top)[places], detokenizer)
    ends = pa.array(list_ends(np.repeat(most, kept)))
    places = ranges(list_starts(ids), kept)
    chosen = token_entries(
        list_values(ids)[places], list_values(own)[ranges(list_starts(own), kept)], detokenizer
    )
    fields = [*chosen.flatten(), pa.ListArray.from_arrays(ends, likely)]
    tokens = pa.StructArray.from_arrays(fields, fields=list(LOGPROBS_FIELD.type.value_type))
    return pa.ListArray.from_arrays(pa.array(list_ends(kept)), tokens, mask=pa.array(~asked))


def logprob_entries(table: pa.Table, column: str = COLUMN) -> Places:
    """Return the number of log-probabilities in each row of a result table, with shape [rows].

    Each token of an answer counts, and each of the most likely tokens at its position. If the table has no
    such column, all numbers are 0.

    Args:
        table: Rows of a result, with one answer or a list of answers each.
        column: The column with log-probabilities.
    """
    kind = table.schema.field(column).type if column in table.column_names else None
    if kind == pa.list_(LOGPROBS_FIELD.type):  # lists of several answers
        lists = table.column(column).combine_chunks()
        inner = logprob_entries(pa.table({column: lists.flatten()}), column)
        before: Places = np.concatenate([[0], np.cumsum(inner)])
        ends = list_ends(list_lengths(lists))
        of_rows: Places = before[ends[1:]] - before[ends[:-1]]
        return of_rows
    if kind != LOGPROBS_FIELD.type:
        return np.zeros(table.num_rows, np.int64)
    return np.concatenate([np.empty(0, np.int64), *map(_entries, table.column(column).chunks)])


def _entries(rows: pa.ListArray) -> Places:
    tokens = rows.values
    each = pc.list_value_length(tokens.field("top")).fill_null(0).to_numpy(zero_copy_only=False)
    before: Places = np.concatenate([[0], np.cumsum(each + 1, dtype=np.int64)])
    ends = rows.offsets.to_numpy()
    found: Places = before[ends[1:]] - before[ends[:-1]]
    return found


def _within_text(matched: pa.Table, ids: pa.ListArray, count: Places, detokenizer: Detokenizer) -> Places:
    # Keeps the tokens before a stop string, or all
    limits = matched.column("text_length").to_pylist()
    kept, starts, values = count.copy(), list_starts(ids), list_values(ids)
    left = [row for row in np.flatnonzero(count).tolist() if limits[row] is not None]
    while left:
        fewer = [values[starts[row] : starts[row] + kept[row] - 1].tolist() for row in left]
        texts = (text.rstrip(_INCOMPLETE) for text in detokenizer.decode_batch(fewer))
        left = [row for row, text in zip(left, texts, strict=True) if len(text) >= limits[row]]
        kept[left] -= 1
        left = [row for row in left if kept[row]]
    return kept


def token_entries(ids: NDArray[Any], logprobs: NDArray[Any], detokenizer: Detokenizer) -> pa.StructArray:
    """Return an Arrow array of structs with a token id, the token's text and its log-probability.

    Args:
        ids: Token ids. Each distinct one is decoded once.
        logprobs: The log-probability of each token.
        detokenizer: Converts tokens to text.
    """
    there = np.zeros(int(ids.max(initial=-1)) + 1, np.bool_)
    there[ids] = True
    texts = pa.array(detokenizer.token_texts(np.flatnonzero(there).tolist()), pa.string())
    places = (np.cumsum(there) - 1)[ids]
    arrays = [pa.array(ids, pa.int32()), texts.take(pa.array(places)), pa.array(logprobs, pa.float32())]
    return pa.StructArray.from_arrays(arrays, fields=list(_LIKELY))


def combine_lists(column: pa.ChunkedArray) -> pa.ListArray:
    """Return a chunked Arrow column of lists as one contiguous array."""
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


def list_lengths(lists: pa.ListArray) -> Places:
    """Return the length of each list of an Arrow list array, or 0 for null."""
    lengths: Places = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def list_starts(lists: pa.ListArray) -> Places:
    """Return the index in `list_values` of the first value of each list of an Arrow list array."""
    starts: Places = lists.offsets.to_numpy()[:-1].astype(np.int64)
    return starts


def list_values(lists: pa.ListArray) -> NDArray[Any]:
    """Return the values of all lists of an Arrow list array, concatenated."""
    values: NDArray[Any] = lists.values.to_numpy(zero_copy_only=False)
    return values


def list_ends(lengths: Places) -> NDArray[np.int32]:
    """Return the offsets of an Arrow list array whose lists have these lengths. Shape: [lists + 1]."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def ranges(starts: Places, lengths: Places) -> Places:
    """Return concatenated ranges of integers: lengths[i] integers from starts[i] on, for each i."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
