"""The scores that a job asks for, in place of texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from batchinfer.core.sampling import Pooling

MAX_LABELS = 1000  # of a row
ScoreActivation = Literal["sigmoid", "identity"]  # what makes a score of a logit


@dataclass(frozen=True, slots=True)
class Scoring:
    """The log-probabilities that a job makes of its rows, and what becomes of them in its result."""

    # The labels between which each row chooses, with unequal texts; (): rows have a continuation or labels of their own
    choices: tuple[str, ...] = ()
    own_labels: bool = False
    length_normalized: bool = False  # labels are compared by the mean of their tokens' log-probabilities
    per_token: bool = False  # the result has the log-probability of each token
    # The text that stands for all values of a row in the prompt without content by which labels are calibrated; None:
    # they are not
    content_free: str | None = None
    # The log-probability of each of `choices` behind that prompt, once it is known
    prior: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, which `from_json` reads. What came later is left out where it says nothing."""
        value = asdict(self)
        return {name: one for name, one in value.items() if one or name not in ("content_free", "prior")}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        lists = {name: tuple(value.get(name, ())) for name in ("choices", "prior")}
        return cls(**{**value, **lists})


@dataclass(frozen=True, slots=True)
class PairScoring:
    """The score that a job makes of a query and a document: the activation of the one logit that the checkpoint's
    classification head makes of the pooled states of both."""

    pooling: Pooling
    activation: ScoreActivation
    typed: bool  # whether tokens have the types that the tokenizer gives those of two texts; else all have 0

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, which `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**value)
