"""The registry of the kinds of answers."""

from __future__ import annotations

from collections.abc import Iterable

from batchinfer.data.outputs.kind import OutputKind
from batchinfer.data.outputs.tokens import TokensKind
from batchinfer.job import Job

KINDS: dict[str, OutputKind] = {kind.name: kind for kind in (TokensKind(),)}
USUAL = "tokens"  # the kind of parts, indexes and identities that name none


def kind_of(job: Job) -> OutputKind:
    """Return the kind of a job's answers: there is no job yet whose answers are not texts."""
    return KINDS[USUAL]


def answer_column(names: Iterable[str]) -> str | None:
    """Return the column of a result with these columns that people read as the answer."""
    there = set(names)
    return next((kind.answer for kind in KINDS.values() if kind.answer in there), None)
