"""The result's column of log-probabilities: for each token of an answer its own, and those of the likeliest tokens."""

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
_INCOMPLETE = "\ufffd"  # how a part of a character is decoded
Places = NDArray[np.int64]


class Detokenizer(Protocol):
    """Token ids to text."""

    def decode_batch(self, rows: list[Sequence[int]]) -> list[str]:
        """The text of each row of generated ids, special tokens left out."""

    def decode_shown(self, rows: list[Sequence[int]], shown: frozenset[int]) -> list[str]:
        """The text of each row, special tokens left out but for those that are `shown`."""

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, special ones included."""


def logprob_column(matched: pa.Table, answered: NDArray[np.bool_], detokenizer: Detokenizer) -> pa.Array:
    """`matched` are completions with their columns of log-probabilities. Null where a row has no answer or did not ask.

    An answer that a stop string has cut keeps the tokens of the text that is left.
    """
    ids, own, top, top_ids = (
        whole_lists(matched.column(name))
        for name in ("token_ids", "logprobs", "top_logprobs", "top_token_ids")
    )
    asked = answered & own.is_valid().to_numpy(zero_copy_only=False)
    count = np.where(asked, list_lengths(ids), 0)
    kept = _within_text(matched, ids, count, detokenizer)
    most = list_lengths(top) // np.maximum(count, 1)  # likeliest tokens at each place
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
    """How many log-probabilities each row of a result has; none where the result has no column for them."""
    kind = table.schema.field(column).type if column in table.column_names else None
    if kind == pa.list_(LOGPROBS_FIELD.type):  # of each of several answers
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
    """How many tokens each row keeps: all, but for those behind the place where a stop string has cut the text."""
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
    """Return tokens with their texts and log-probabilities. Each distinct token is decoded once."""
    there = np.zeros(int(ids.max(initial=-1)) + 1, np.bool_)
    there[ids] = True
    texts = pa.array(detokenizer.token_texts(np.flatnonzero(there).tolist()), pa.string())
    places = (np.cumsum(there) - 1)[ids]
    arrays = [pa.array(ids, pa.int32()), texts.take(pa.array(places)), pa.array(logprobs, pa.float32())]
    return pa.StructArray.from_arrays(arrays, fields=list(_LIKELY))


def whole_lists(column: pa.ChunkedArray) -> pa.ListArray:
    """Return a column as one array."""
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


def list_lengths(lists: pa.ListArray) -> Places:
    """Return how many values each list has."""
    lengths: Places = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def list_starts(lists: pa.ListArray) -> Places:
    """Return where in `list_values` each list begins."""
    starts: Places = lists.offsets.to_numpy()[:-1].astype(np.int64)
    return starts


def list_values(lists: pa.ListArray) -> NDArray[Any]:
    """Return the values of all lists."""
    values: NDArray[Any] = lists.values.to_numpy(zero_copy_only=False)
    return values


def list_ends(lengths: Places) -> NDArray[np.int32]:
    """Return the offsets of lists of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def ranges(starts: Places, lengths: Places) -> Places:
    """Return starts[0], starts[0] + 1, … for each row as many as its count, all rows in one array."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
