"""Answers that are log-probabilities: those of each continuation are stored, and added up where a result is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.core.request import Output, Scores
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.columns.schema_columns import SchemaColumns
from batchinfer.store.outputs.frame import Frame, framed
from batchinfer.store.outputs.kind import AskedOutputs, Receiver, TokenBytes
from batchinfer.store.outputs.vectors import AsTheyAre, lists_of

STORED = pa.schema(
    [
        ("score_logprobs", pa.list_(pa.float32())),
        ("score_greedy", pa.list_(pa.bool_())),
        ("score_lengths", pa.list_(pa.int32())),
    ]
)
# Rows of a result that are made at a time: a continuation may have as many tokens as the model reads
_SCORED_ROWS = 2048
NOT_OPENAI = "a job that scores has no OpenAI batch file as its input, so none is made of its result"
# What sums up the scores of documents
SCORE_FIGURES: Mapping[str, str] = MappingProxyType(
    {f"score_p{at}": f"quantile_cont(score, {at / 100})" for at in (10, 50, 90)}
)
_PER_TOKEN = pa.field("token_logprobs", pa.list_(pa.float32()))


class ScoresKind:
    """The kind of answers that say how likely a text is. See OutputKind for the methods."""

    name, version, output, answer = "scores", 0, Scores, "logprob"
    probability: str | None = None
    figures: Mapping[str, str] = MappingProxyType(
        {
            "scored_tokens": "sum(scored_tokens)",
            "mean_logprob": "sum(logprob) / nullif(sum(scored_tokens), 0)",
            "greedy_rows": "count(*) FILTER (is_greedy)",
        }
    )
    stored = STORED

    def receiver(self, columns: SchemaColumns | None, detokenizer: Detokenizer) -> Receiver:
        """Return what takes scores as they are."""
        return AsTheyAre()

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return the columns of log-probabilities, of which tokens were argmaxes, and of continuations' lengths."""
        found = [one if isinstance(one, Scores) else None for one in outputs]
        if all(one is None for one in found):
            return {}
        arrays = [
            lists_of([None if one is None else one.logprobs for one in found], np.float32),
            lists_of([None if one is None else one.greedy for one in found], np.bool_),
            lists_of([None if one is None else np.array(one.lengths) for one in found], np.int32),
        ]
        return dict(zip(STORED.names, arrays, strict=True))

    def read(self, asked: AskedOutputs) -> pa.Schema:
        return STORED

    def batch_rows(self, asked: AskedOutputs) -> int | None:
        return _SCORED_ROWS

    def schema(self, asked: AskedOutputs) -> pa.Schema:
        """Return the columns of a result, with those of single tokens where the job asks for them."""
        per_token = asked.scoring is not None and asked.scoring.per_token
        return framed(
            pa.field("logprob", pa.float64()),
            pa.field("is_greedy", pa.bool_()),
            pa.field("scored_tokens", pa.int32()),
            *([_PER_TOKEN] if per_token else []),
            pa.field("prompt_tokens", pa.int32()),
        )

    def table(
        self, asked: AskedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        frame = Frame(rows, matched)
        logprobs, greedy = (matched.column(name) for name in STORED.names[:2])
        per_token = asked.scoring is not None and asked.scoring.per_token
        columns = {
            "logprob": _of_each(logprobs, np.add, 0.0),
            "is_greedy": _of_each(greedy, np.logical_and, True),
            "scored_tokens": pc.list_value_length(logprobs),
            **({_PER_TOKEN.name: logprobs} if per_token else {}),
            "prompt_tokens": context_counts(rows, matched),
        }
        return frame.around(**{name: frame.when_answered(one) for name, one in columns.items()})

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return how many tokens each row has the log-probability of."""
        if _PER_TOKEN.name not in table.schema.names:
            return np.zeros(table.num_rows, np.int64)
        found: NDArray[np.int64] = (
            pc.list_value_length(table.column(_PER_TOKEN.name)).fill_null(0).to_numpy().astype(np.int64)
        )
        return found

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        raise ValueError(NOT_OPENAI)

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        raise ValueError(NOT_OPENAI)


def context_counts(rows: pa.Table, matched: pa.Table) -> pa.ChunkedArray:
    """Return how many tokens the prompt of each row has without its continuations; null for rows without scores."""
    scored = pc.list_value_length(matched.column("score_logprobs"))
    return pc.subtract(rows.column("token_count"), scored)


def _of_each(column: pa.ChunkedArray, operation: np.ufunc, empty: float | bool) -> pa.ChunkedArray:
    """Return what the operation makes of the values of each list, in float64 where they are numbers; null for null."""
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
