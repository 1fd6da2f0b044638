"""The registry of the kinds of answers."""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.job import Job
from batchinfer.store.outputs.kind import OutputKind
from batchinfer.store.outputs.labels import LabelsKind
from batchinfer.store.outputs.pair_scores import PairScoresKind
from batchinfer.store.outputs.relevance import RelevanceKind
from batchinfer.store.outputs.scores import ScoresKind
from batchinfer.store.outputs.texts_and_vectors import TextsAndVectorsKind
from batchinfer.store.outputs.vectors import VectorsKind

_PAIRS = PairScoresKind()
_ALL: tuple[OutputKind, ...] = (
    TextsAndVectorsKind(),
    VectorsKind(),
    ScoresKind(),
    LabelsKind(),
    RelevanceKind(),
    _PAIRS,
)
KINDS = {kind.name: kind for kind in _ALL}
_OF_TASKS = {"embed": "vectors", "score": "scores", "classify": "labels", "rerank": "relevance"}
DEFAULT_KIND = "tokens"  # kind of parts, indexes and identities that name none


def kind_of(job: Job) -> OutputKind:
    """Return the kind of answers that a job produces."""
    if job.task == "rerank" and job.rerank.document is not None:
        return _PAIRS
    return KINDS[_OF_TASKS.get(job.task, DEFAULT_KIND)]


def answer_column(names: Iterable[str]) -> str | None:
    """Return the answer column of a result, or None if it has none.

    Columns that are copied from the input may have the same name as the answer column of another kind. They
    come last, so the first match counts.

    Args:
        names: The result's column names in order.
    """
    answers = {kind.answer for kind in KINDS.values()}
    return next((name for name in names if name in answers), None)


def probability_column(answer: str) -> str | None:
    """Return the result column with the probabilities of answers, or None if the result has no such column.

    Args:
        answer: The answer column, which determines the kind of answers.
    """
    return next((kind.probability for kind in KINDS.values() if kind.answer == answer), None)
