"""Answers that are log-probabilities of continuations.

They are stored per token, and summed when a result is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.core.request import Output, Scores
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.requested import RequestedOutputs
from batchinfer.store.outputs.frame import Frame, frame_schema
from batchinfer.store.outputs.kind import OutputKind
from batchinfer.store.outputs.vectors import lists_of

STORED = pa.schema(
    [
        ("score_logprobs", pa.list_(pa.float32())),
        ("score_greedy", pa.list_(pa.bool_())),
        ("score_lengths", pa.list_(pa.int32())),
    ]
)
# Result rows per batch: a continuation may fill the model's context
_SCORED_ROWS = 2048
# Aggregates of document scores for the report
SCORE_AGGREGATES: Mapping[str, str] = MappingProxyType(
    {f"score_p{at}": f"quantile_cont(score, {at / 100})" for at in (10, 50, 90)}
)
_PER_TOKEN = pa.field("token_logprobs", pa.list_(pa.float32()))


class ScoresKind(OutputKind):
    """Answers that are log-probabilities of given continuations. `OutputKind` documents the methods."""

    name, version, output, answer = "scores", 0, Scores, "logprob"
    aggregates: Mapping[str, str] = MappingProxyType(
        {
            "scored_tokens": "sum(scored_tokens)",
            "mean_logprob": "sum(logprob) / nullif(sum(scored_tokens), 0)",
            "greedy_rows": "count(*) FILTER (is_greedy)",
        }
    )
    stored = STORED

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return the columns of the store for scores of continuations, by name. Empty without scores.

        The columns have lists: the log-probability of each token, True if it was the most likely token, and
        the number of tokens of each continuation.
        """
        found = [one if isinstance(one, Scores) else None for one in outputs]
        if all(one is None for one in found):
            return {}
        arrays = [
            lists_of([None if one is None else one.logprobs for one in found], np.float32),
            lists_of([None if one is None else one.greedy for one in found], np.bool_),
            lists_of([None if one is None else np.array(one.lengths) for one in found], np.int32),
        ]
        return dict(zip(STORED.names, arrays, strict=True))

    def batch_rows(self, requested: RequestedOutputs) -> int | None:
        """Return the number of result rows to write at a time."""
        return _SCORED_ROWS

    def schema(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of a result, such as the log-probability of the continuation.

        If the job requests it, a further column has the log-probability of each token.
        """
        per_token = requested.scoring is not None and requested.scoring.per_token
        return frame_schema(
            pa.field("logprob", pa.float64()),
            pa.field("is_greedy", pa.bool_()),
            pa.field("scored_tokens", pa.int32()),
            *([_PER_TOKEN] if per_token else []),
            pa.field("prompt_tokens", pa.int32()),
        )

    def table(
        self, requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return rows of a result with the sum of each row's log-probabilities.

        `OutputKind.table` documents the arguments.
        """
        frame = Frame(rows, matched)
        logprobs, greedy = (matched.column(name) for name in STORED.names[:2])
        per_token = requested.scoring is not None and requested.scoring.per_token
        columns = {
            "logprob": _of_each(logprobs, np.add, 0.0),
            "is_greedy": _of_each(greedy, np.logical_and, True),
            "scored_tokens": pc.list_value_length(logprobs),
            **({_PER_TOKEN.name: logprobs} if per_token else {}),
            "prompt_tokens": context_counts(rows, matched),
        }
        return frame.result_table(**{name: frame.when_answered(one) for name, one in columns.items()})

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return the number of token log-probabilities in each row of a result table, with shape [rows]."""
        if _PER_TOKEN.name not in table.schema.names:
            return np.zeros(table.num_rows, np.int64)
        found: NDArray[np.int64] = (
            pc.list_value_length(table.column(_PER_TOKEN.name)).fill_null(0).to_numpy().astype(np.int64)
        )
        return found


def context_counts(rows: pa.Table, matched: pa.Table) -> pa.ChunkedArray:
    """Return the number of tokens of each row's prompt without its continuations. It is null without scores.

    Args:
        rows: Rows of the index.
        matched: The completion of each row.
    """
    scored = pc.list_value_length(matched.column("score_logprobs"))
    return pc.subtract(rows.column("token_count"), scored)


def _of_each(column: pa.ChunkedArray, operation: np.ufunc, empty: float | bool) -> pa.ChunkedArray:
    # An empty list gives `empty`, and null stays null
    lists = column.combine_chunks()
    flat = lists.flatten().to_numpy(zero_copy_only=False)
    flat = flat.astype(np.float64) if isinstance(empty, float) else flat.astype(bool)
    sizes = pc.list_value_length(lists).fill_null(0).to_numpy()
    begins = np.cumsum(sizes) - sizes
    found = np.full(len(sizes), empty)
    filled = sizes > 0
    if filled.any():
        found[filled] = operation.reduceat(flat, begins[filled])
    missing = pc.is_null(lists).to_numpy(zero_copy_only=False)
    return pa.chunked_array([pa.array(found, mask=missing)])
