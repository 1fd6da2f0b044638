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
    """The JSON Schema that every answer of a job must match.

    Args:
        text: The schema.
        column: The name of the single column that holds the answer. None: each property of the schema is a column.
    """

    text: str
    column: str | None = None


@dataclass(frozen=True, kw_only=True)
class RequestedOutputs:
    """The values of a job or an index that determine what its answers contain."""

    # None: the result has no columns for parts of the answers
    answers: AnswerSchema | None = None
    # Maximum number of log-probabilities per token that a row requests. None: the result has no column for them
    logprobs: int | None = None
    prompt_logprobs: bool = False  # the result has a column for log-probabilities of prompts
    # The possible answers, if the result has a column of confidence. (): the fields of `answers` list them
    confidence: tuple[str, ...] | None = None
    reasoning: Reasoning | None = None  # None: the result has no columns for reasoning
    tool_calls: CallStyle | None = None  # None: the result has no column for tool calls
    embedding: Embedding | None = None  # None: no row requests a vector
    own_dimensions: bool = False  # rows may set the length of their vectors
    scoring: Scoring | None = None  # None: answers are not scores of continuations
    pairs: PairScoring | None = None  # None: answers are not scores of prompt and document
