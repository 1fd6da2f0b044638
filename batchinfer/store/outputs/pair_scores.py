"""Answers that are scores of a query and a document.

The logit of a cross-encoder's head is stored, and converted to a score when a result is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.request import Output
from batchinfer.core.scoring import ScoreActivation
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.requested import RequestedOutputs
from batchinfer.store.outputs.frame import Frame, frame_schema
from batchinfer.store.outputs.kind import NOT_OPENAI
from batchinfer.store.outputs.scores import SCORE_AGGREGATES
from batchinfer.store.outputs.vectors import VectorsKind


class PairScoresKind(VectorsKind):
    """Answers that are scores of a query and a document by a cross-encoder.

    `OutputKind` documents the methods.
    """

    name, version, answer = "pair_scores", 0, "score"
    aggregates = SCORE_AGGREGATES

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return an empty dict: logits are stored as vectors, by `VectorsKind`."""
        return {}

    def batch_rows(self, requested: RequestedOutputs) -> int | None:
        """Return None, as the default number of result rows is written at a time."""
        return None

    def schema(self, requested: RequestedOutputs) -> pa.Schema:
        """Return the columns of a result: the score and the number of prompt tokens."""
        return frame_schema(pa.field("score", pa.float64()), pa.field("prompt_tokens", pa.int32()))

    def table(
        self, requested: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        """Return rows of a result with the score of each pair. `OutputKind.table` documents the arguments."""
        assert requested.pairs is not None, "the index of a job whose answers are scores of pairs says which"
        frame = Frame(rows, matched)
        answered = frame.answered.to_numpy(zero_copy_only=False)
        logits = matched.column("vector").take(pa.array(np.flatnonzero(answered))).combine_chunks().flatten()
        score = np.zeros(len(answered))
        score[answered] = apply_activation(logits.to_numpy(), requested.pairs.activation)
        prompt_tokens = frame.when_answered(rows.column("token_count"))
        return frame.result_table(score=pa.array(score, mask=~answered), prompt_tokens=prompt_tokens)

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return zeros, one per row of the result table: a row has no lists."""
        return np.zeros(table.num_rows, np.int64)

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        """Raise ValueError: OpenAI batch files do not support scores of pairs."""
        raise ValueError(NOT_OPENAI)


def apply_activation(logits: NDArray[np.float32], activation: ScoreActivation) -> NDArray[np.float64]:
    """Return the scores for logits of a cross-encoder, with shape [n].

    Args:
        logits: [n].
        activation: "identity" returns the logits; otherwise the sigmoid is applied.
    """
    wide = logits.astype(np.float64)
    # 0.5 * (tanh(x / 2) + 1) equals 1 / (1 + exp(-x)), but does not overflow
    found: NDArray[np.float64] = wide if activation == "identity" else 0.5 * (np.tanh(0.5 * wide) + 1)
    return found
