"""Defines what a job requests of its answers besides or instead of text. Result columns follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchinfer.core.embedding import Embedding
from batchinfer.core.reasoning import Reasoning
from batchinfer.core.scoring import PairScoring, Scoring
from batchinfer.core.tool_calls import CallStyle

# The requested parts that are objects of their own, by their names in an index
PARTS: dict[str, Any] = {
    "reasoning": Reasoning,
    "tool_calls": CallStyle,
    "embedding": Embedding,
    "scoring": Scoring,
    "pairs": PairScoring,
}


@dataclass(frozen=True, slots=True)
class AnswerSchema:
    """The JSON schema that every answer of a job must match.

    Attributes:
        text: The schema as JSON text.
        column: The name of the single column that holds the answer. None: each property of the schema is a
            column.
    """

    text: str
    column: str | None = None


@dataclass(frozen=True, kw_only=True)
class RequestedOutputs:
    """The outputs that a job or an index requests. The columns of its result follow from them.

    Attributes:
        answers: The schema of JSON answers. None: the result has no columns for fields of the answers.
        logprobs: Maximum number of log-probabilities per token that a row requests. None: no column for them.
        prompt_logprobs: True if the result has a column for log-probabilities of prompts.
        confidence: The possible answers, for the column `confidence`. Empty: the schema in `answers` lists
            the possible values of fields. None: the result has no such column.
        reasoning: How the model marks reasoning. None: the result has no columns for reasoning.
        tool_calls: How the model writes tool calls. None: the result has no column for tool calls.
        embedding: How vectors are computed. None: no row requests a vector.
        own_dimensions: True if rows may set the length of their vectors.
        scoring: How continuations are scored. None: answers are not scores of continuations.
        pairs: How pairs are scored. None: answers are not scores of prompt and document.
    """

    answers: AnswerSchema | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    confidence: tuple[str, ...] | None = None
    reasoning: Reasoning | None = None
    tool_calls: CallStyle | None = None
    embedding: Embedding | None = None
    own_dimensions: bool = False
    scoring: Scoring | None = None
    pairs: PairScoring | None = None
