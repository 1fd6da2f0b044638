"""Answers that are labels: what is stored are the scores of all labels, and which one wins is said where a result is
made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.request import Output, Scores
from batchinfer.core.scoring import Scoring
from batchinfer.data.columns.logprob_column import Detokenizer
from batchinfer.data.columns.schema_columns import SchemaColumns
from batchinfer.data.outputs.frame import Frame, framed
from batchinfer.data.outputs.kind import AskedOutputs, Receiver, TokenBytes
from batchinfer.data.outputs.scores import NOT_OPENAI, SCORED_ROWS, STORED, context_counts
from batchinfer.data.outputs.vectors import AsTheyAre


class LabelsKind:
    """The kind of answers that are labels with probabilities. See OutputKind for the methods."""

    name, version, output, answer = "labels", 0, Scores, "label"
    stored = STORED

    def receiver(self, columns: SchemaColumns | None, detokenizer: Detokenizer) -> Receiver:
        """Return what takes scores as they are."""
        return AsTheyAre()

    def arrays(self, outputs: Sequence[Output | None]) -> list[pa.Array] | None:
        """Return None: ScoresKind stores what is made of continuations, labels included."""
        return None

    def read(self, asked: AskedOutputs) -> pa.Schema:
        return STORED

    def batch_rows(self, asked: AskedOutputs) -> int | None:
        return SCORED_ROWS

    def schema(self, asked: AskedOutputs) -> pa.Schema:
        """Return the columns of a result: the likeliest label, its probability, and those of all labels."""
        return framed(
            pa.field("label", pa.string()),
            pa.field("probability", pa.float64()),
            pa.field("probabilities", pa.map_(pa.string(), pa.float64())),
            pa.field("prompt_tokens", pa.int32()),
        )

    def table(
        self, asked: AskedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        frame, scoring = Frame(rows, matched), _asked(asked)
        answered = frame.answered.to_numpy(zero_copy_only=False)
        scores = matched.select(STORED.names).take(pa.array(np.flatnonzero(answered)))
        logprobs, _, lengths = (
            one.combine_chunks().flatten().to_numpy(zero_copy_only=False) for one in scores.columns
        )
        found = np.full((len(answered), len(scoring.choices)), np.nan)
        found[answered] = label_probabilities(logprobs, lengths, scoring)
        best = np.where(answered, np.nan_to_num(found, nan=-1.0).argmax(axis=1), 0)
        missing = ~answered
        label = pa.array(scoring.choices, pa.string()).take(pa.array(best, mask=missing))
        probability = pa.array(found[np.arange(len(found)), best], mask=missing)
        return frame.around(
            label=label,
            probability=probability,
            probabilities=_maps(found, answered, scoring.choices),
            prompt_tokens=frame.when_answered(context_counts(rows, matched)),
        )

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return zeros: a row has a few numbers."""
        return np.zeros(table.num_rows, np.int64)

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        raise ValueError(NOT_OPENAI)

    def openai_body(self, row: dict[str, Any], chat: bool, tokens: TokenBytes) -> dict[str, Any]:
        raise ValueError(NOT_OPENAI)


def label_probabilities(
    logprobs: NDArray[np.float32], lengths: NDArray[np.int32], scoring: Scoring
) -> NDArray[np.float64]:
    """Return the probability of each label of each row, (rows, labels): the softmax over the log-probabilities of the
    labels, which are the sums, or length-normalised the means, of their tokens'.

    logprobs: of the tokens of all labels of all rows. lengths: (rows × labels,), tokens of each label.
    """
    sizes = lengths.reshape(-1, len(scoring.choices)).astype(np.int64)
    if not len(sizes):
        return np.empty(sizes.shape)
    begins = np.cumsum(sizes.reshape(-1)) - sizes.reshape(-1)
    sums = np.add.reduceat(logprobs.astype(np.float64), begins).reshape(sizes.shape)
    logits = sums / sizes if scoring.length_normalized else sums
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return found


def _asked(asked: AskedOutputs) -> Scoring:
    assert asked.scoring is not None, "the index of a job whose answers are labels says which"
    return asked.scoring


def _maps(found: NDArray[np.float64], answered: NDArray[np.bool_], choices: Sequence[str]) -> pa.MapArray:
    """Return what each answered row says of each label; null elsewhere."""
    rows, count = int(answered.sum()), len(choices)
    ends = np.concatenate([[0], np.cumsum(answered * count)]).astype(np.int32)
    offsets = pa.array(ends, mask=np.append(~answered, False))
    keys = pa.array(choices, pa.string()).take(pa.array(np.tile(np.arange(count), rows)))
    return pa.MapArray.from_arrays(offsets, keys, pa.array(found[answered].reshape(-1)))
