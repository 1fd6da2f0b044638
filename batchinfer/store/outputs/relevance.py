"""Answers that are the relevance of a document. The scores of two labels are stored, as for other labels."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.requested import RequestedOutputs
from batchinfer.store.outputs.frame import Frame, frame_schema
from batchinfer.store.outputs.labels import LabelsKind, answered_probabilities
from batchinfer.store.outputs.scores import SCORE_AGGREGATES, context_counts


class RelevanceKind(LabelsKind):
    """Answers that are the relevance of a document to a query. `OutputKind` documents the methods.

    The relevance is the probability of the first of two labels, such as yes and no.
    """

    name, version, answer = "relevance", 0, "score"
    probability = None
    aggregates = SCORE_AGGREGATES

    def schema(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of a result: the score and the number of prompt tokens."""
        return frame_schema(pa.field("score", pa.float64()), pa.field("prompt_tokens", pa.int32()))

    def table(
        self, requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return rows of a result with a score from 0 to 1: the probability of the first of two labels.

        `OutputKind.table` documents the arguments.
        """
        frame = Frame(rows, matched)
        answered = frame.answered.to_numpy(zero_copy_only=False)
        _, found = answered_probabilities(requested, rows, matched, answered)
        score = np.zeros(len(answered))
        score[answered] = [one[0] for one in found]
        return frame.result_table(
            score=pa.array(score, mask=~answered),
            prompt_tokens=frame.when_answered(context_counts(rows, matched)),
        )
