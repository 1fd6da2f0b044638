"""The scores that a cross-encoder gives pairs of texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from batchinfer.core.sampling import Pooling

ScoreActivation = Literal["sigmoid", "identity"]  # what makes a score of a logit


@dataclass(frozen=True, slots=True)
class PairScoring:
    """The score that a job makes of a query and a document: the activation of the one logit that the checkpoint's
    classification head makes of the pooled states of both."""

    pooling: Pooling
    activation: ScoreActivation
    typed: (
        bool  # whether tokens of the second text have the type that the tokenizer gives them; else all have 0
    )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, which `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**value)
