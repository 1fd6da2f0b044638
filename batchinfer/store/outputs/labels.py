"""Answers that are labels. The scores of all labels are stored; the label is chosen when a result is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.request import Output
from batchinfer.core.scoring import Scoring
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.index import LABELS
from batchinfer.store.index.requested import RequestedOutputs
from batchinfer.store.outputs.frame import Frame, frame_schema
from batchinfer.store.outputs.scores import STORED, ScoresKind, context_counts


class LabelsKind(ScoresKind):
    """Answers of a classification: labels with probabilities. `OutputKind` documents the methods."""

    name, version, answer = "labels", 0, "label"
    probability: str | None = "probability"
    aggregates: Mapping[str, str] = MappingProxyType(
        {"labels": "histogram(label)", "mean_label_probability": "avg(probability)"}
    )

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return an empty dict: `ScoresKind` stores the scores of all continuations, including labels."""
        return {}

    def schema(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of a result: the most likely label, its probability, and all probabilities."""
        return frame_schema(
            pa.field("label", pa.string()),
            pa.field("probability", pa.float64()),
            pa.field("probabilities", pa.map_(pa.string(), pa.float64())),
            pa.field("prompt_tokens", pa.int32()),
        )

    def table(
        self, requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return rows of a result with labels and their probabilities.

        `OutputKind.table` documents the arguments.
        """
        frame = Frame(rows, matched)
        answered = frame.answered.to_numpy(zero_copy_only=False)
        each, found = answered_probabilities(requested, rows, matched, answered)
        where = pa.array(np.cumsum(answered) - 1, mask=~answered)
        best = [int(one.argmax()) for one in found]
        label = pa.array([labels[at] for labels, at in zip(each, best, strict=True)], pa.string())
        probability = pa.array([one[at] for one, at in zip(found, best, strict=True)], pa.float64())
        return frame.result_table(
            label=label.take(where),
            probability=probability.take(where),
            probabilities=_maps(found, each, answered),
            prompt_tokens=frame.when_answered(context_counts(rows, matched)),
        )

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return zeros, one per row of the result table: labels are not long lists."""
        return np.zeros(table.num_rows, np.int64)


def answered_probabilities(
    requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, answered: NDArray[np.bool_]
) -> tuple[list[Sequence[str]], list[NDArray[np.float64]]]:
    """Return the labels of each row that has an answer, and an array with the probability of each label.

    Args:
        requested: The outputs that the job requests.
        rows: Rows of the index.
        matched: The completion of each row.
        answered: A boolean per row: True if it has an answer.

    Returns:
        Two lists with an element per row with an answer, each with a value per label of the row.
    """
    scoring, places = _scoring(requested), pa.array(np.flatnonzero(answered))
    logprobs, _, lengths = matched.select(STORED.names).take(places).columns
    each = _labels(rows.take(places), scoring)
    return each, label_probabilities(_values(logprobs), _values(lengths), list(map(len, each)), scoring)


def label_probabilities(
    logprobs: NDArray[np.float32], lengths: NDArray[np.int32], counts: Sequence[int], scoring: Scoring
) -> list[NDArray[np.float64]]:
    """Return the probabilities of the labels of each row: a softmax over the log-probabilities of its labels.

    The log-probability of a label is the sum over its tokens, or their mean with length normalisation. With a
    prior, each probability is divided by the label's prior before they are normalised (contextual
    calibration, Zhao et al. 2021: https://arxiv.org/abs/2102.09690).

    Args:
        logprobs: Log-probabilities of the tokens of all labels of all rows.
        lengths: Number of tokens of each label of each row.
        counts: Number of labels of each row.
        scoring: Length normalisation and prior.

    Returns:
        For each row the probabilities with shape [labels of the row].
    """
    if not len(counts):
        return []
    logits = label_logprobs(logprobs, lengths, scoring.length_normalized)
    if scoring.prior:
        logits = logits - np.tile(np.array(scoring.prior), len(counts))
    begins = np.cumsum([0, *counts[:-1]])
    weights = np.exp(logits - np.repeat(np.maximum.reduceat(logits, begins), counts))
    found = weights / np.repeat(np.add.reduceat(weights, begins), counts)
    return np.split(found, begins[1:])


def label_logprobs(
    logprobs: NDArray[np.float32], lengths: NDArray[np.int32], length_normalized: bool
) -> NDArray[np.float64]:
    """Return the log-probability of each label, with shape [labels].

    Args:
        logprobs: Log-probabilities of the tokens of all labels, concatenated.
        lengths: Number of tokens of each label.
        length_normalized: True for the mean over the tokens of a label, False for their sum.
    """
    sizes = lengths.astype(np.int64)
    sums: NDArray[np.float64] = np.add.reduceat(logprobs.astype(np.float64), np.cumsum(sizes) - sizes)
    return sums / sizes if length_normalized else sums


def _values(column: pa.ChunkedArray) -> NDArray[Any]:
    found: NDArray[Any] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return found


def _labels(rows: pa.Table, scoring: Scoring) -> list[Sequence[str]]:
    if not scoring.own_labels:
        return [scoring.choices] * rows.num_rows
    return [json.loads(text) for text in rows.column(LABELS.name).to_pylist()]


def _scoring(requested: RequestedOutputs) -> Scoring:
    assert requested.scoring is not None, "the index of a job whose answers are labels says which"
    return requested.scoring


def _maps(
    found: Sequence[NDArray[np.float64]], each: Sequence[Sequence[str]], answered: NDArray[np.bool_]
) -> pa.MapArray:
    counts = np.zeros(len(answered), np.int64)
    counts[answered] = [*map(len, each)]
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    offsets = pa.array(ends, mask=np.append(~answered, False))
    keys = pa.array([label for labels in each for label in labels], pa.string())
    return pa.MapArray.from_arrays(offsets, keys, pa.array(np.concatenate([np.empty(0), *found])))
