"""Answers that say how a query and a document go together: what is stored is the logit of a cross-encoder's head, and
the score is made of it where a result is made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.core.request import Output
from batchinfer.core.scoring import ScoreActivation
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.outputs.frame import Frame, framed
from batchinfer.store.outputs.kind import AskedOutputs
from batchinfer.store.outputs.scores import NOT_OPENAI, SCORE_FIGURES
from batchinfer.store.outputs.vectors import VectorsKind


class PairScoresKind(VectorsKind):
    """The kind of answers that are scores of pairs. See OutputKind for the methods."""

    name, version, answer = "pair_scores", 0, "score"
    figures = SCORE_FIGURES

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        """Return none: VectorsKind stores what is made of pooled states, logits included."""
        return {}

    def batch_rows(self, asked: AskedOutputs) -> int | None:
        return None

    def schema(self, asked: AskedOutputs) -> pa.Schema:
        """Return the columns of a result: the score, behind the activation."""
        return framed(pa.field("score", pa.float64()), pa.field("prompt_tokens", pa.int32()))

    def table(
        self, asked: AskedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        assert asked.pairs is not None, "the index of a job whose answers are scores of pairs says which"
        frame = Frame(rows, matched)
        answered = frame.answered.to_numpy(zero_copy_only=False)
        logits = matched.column("vector").take(pa.array(np.flatnonzero(answered))).combine_chunks().flatten()
        score = np.zeros(len(answered))
        score[answered] = activated(logits.to_numpy(), asked.pairs.activation)
        prompt_tokens = frame.when_answered(rows.column("token_count"))
        return frame.around(score=pa.array(score, mask=~answered), prompt_tokens=prompt_tokens)

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        """Return zeros: a row has one number."""
        return np.zeros(table.num_rows, np.int64)

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        raise ValueError(NOT_OPENAI)


def activated(logits: NDArray[np.float32], activation: ScoreActivation) -> NDArray[np.float64]:
    """Return the scores that an activation makes of logits (n,)."""
    wide = logits.astype(np.float64)
    # 1 / (1 + exp(-x)), which would overflow
    found: NDArray[np.float64] = wide if activation == "identity" else 0.5 * (np.tanh(0.5 * wide) + 1)
    return found
