"""Answers that are labels: what is stored are the scores of all labels, and which one wins is said where a result is
made."""

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
from batchinfer.store.outputs.frame import Frame, framed
from batchinfer.store.outputs.kind import AskedOutputs
from batchinfer.store.outputs.scores import STORED, ScoresKind, context_counts


class LabelsKind(ScoresKind):
    """The kind of answers that are labels with probabilities. See OutputKind for the methods."""

    name, version, answer = "labels", 0, "label"
    probability: str | None = "probability"
    figures: Mapping[str, str] = MappingProxyType(
        {"labels": "histogram(label)", "mean_label_probability": "avg(probability)"}
    )

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return none: ScoresKind stores what is made of continuations, labels included."""
        return {}

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
        frame = Frame(rows, matched)
        answered = frame.answered.to_numpy(zero_copy_only=False)
        each, found = answered_probabilities(asked, rows, matched, answered)
        where = pa.array(np.cumsum(answered) - 1, mask=~answered)
        best = [int(one.argmax()) for one in found]
        label = pa.array([labels[at] for labels, at in zip(each, best, strict=True)], pa.string())
        probability = pa.array([one[at] for one, at in zip(found, best, strict=True)], pa.float64())
        return frame.around(
            label=label.take(where),
            probability=probability.take(where),
            probabilities=_maps(found, each, answered),
            prompt_tokens=frame.when_answered(context_counts(rows, matched)),
        )

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return zeros: a row has a few numbers."""
        return np.zeros(table.num_rows, np.int64)


def answered_probabilities(
    asked: AskedOutputs, rows: pa.Table, matched: pa.Table, answered: NDArray[np.bool_]
) -> tuple[list[Sequence[str]], list[NDArray[np.float64]]]:
    """Return the labels of each answered row, and their probabilities.

    rows, matched: as `OutputKind.table` has them. answered: whether each of these rows has an answer.
    """
    scoring, places = _asked(asked), pa.array(np.flatnonzero(answered))
    logprobs, _, lengths = matched.select(STORED.names).take(places).columns
    each = _labels(rows.take(places), scoring)
    return each, label_probabilities(_values(logprobs), _values(lengths), list(map(len, each)), scoring)


def label_probabilities(
    logprobs: NDArray[np.float32], lengths: NDArray[np.int32], counts: Sequence[int], scoring: Scoring
) -> list[NDArray[np.float64]]:
    """Return the probability of each label of each row: the softmax over the log-probabilities of the row's labels,
    which are the sums, or length-normalised the means, of their tokens'. Where there is a prior, each is divided by
    its own first (contextual calibration, Zhao et al. 2021: https://arxiv.org/abs/2102.09690).

    logprobs: of the tokens of all labels of all rows. lengths: tokens of each of these labels. counts: labels of each
    row.
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
    """Return the log-probability of each label: the sum of its tokens', or their mean. See `label_probabilities`."""
    sizes = lengths.astype(np.int64)
    sums: NDArray[np.float64] = np.add.reduceat(logprobs.astype(np.float64), np.cumsum(sizes) - sizes)
    return sums / sizes if length_normalized else sums


def _values(column: pa.ChunkedArray) -> NDArray[Any]:
    found: NDArray[Any] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return found


def _labels(rows: pa.Table, scoring: Scoring) -> list[Sequence[str]]:
    """Return the labels of each row."""
    if not scoring.own_labels:
        return [scoring.choices] * rows.num_rows
    return [json.loads(text) for text in rows.column(LABELS.name).to_pylist()]


def _asked(asked: AskedOutputs) -> Scoring:
    assert asked.scoring is not None, "the index of a job whose answers are labels says which"
    return asked.scoring


def _maps(
    found: Sequence[NDArray[np.float64]], each: Sequence[Sequence[str]], answered: NDArray[np.bool_]
) -> pa.MapArray:
    """Return what each answered row says of each label; null elsewhere."""
    counts = np.zeros(len(answered), np.int64)
    counts[answered] = [*map(len, each)]
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    offsets = pa.array(ends, mask=np.append(~answered, False))
    keys = pa.array([label for labels in each for label in labels], pa.string())
    return pa.MapArray.from_arrays(offsets, keys, pa.array(np.concatenate([np.empty(0), *found])))
