"""The settings of scoring jobs, which compute log-probabilities or relevance scores instead of texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from batchinfer.core.sampling import Pooling

MAX_LABELS = 1000  # per row
ScoreActivation = Literal["sigmoid", "identity"]  # applied to a logit


@dataclass(frozen=True, slots=True)
class Scoring:
    """The log-probabilities that a scoring job computes for its rows, and their form in the result.

    Args:
        choices: The labels that all rows share, all different. (): each row has a continuation or labels of its own.
        own_labels: True if each row has labels of its own.
        length_normalized: True if labels are compared by the mean of their tokens' log-probabilities; False: by the
            sum.
        per_token: True if the result includes the log-probability of each token.
        content_free: The text that replaces all values of a row in a content-free prompt. The labels' log-probabilities
            after this prompt calibrate those after real prompts. None: no calibration.
        prior: The log-probability of each of `choices` after the content-free prompt, once it is computed.
    """

    choices: tuple[str, ...] = ()
    own_labels: bool = False
    length_normalized: bool = False
    per_token: bool = False
    content_free: str | None = None
    prior: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the settings of a scoring job as JSON values, for `from_json`. Some keys are omitted if unused."""
        value = asdict(self)
        return {name: one for name, one in value.items() if one or name not in ("content_free", "prior")}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the settings of scores from the JSON values that `to_json` returns."""
        lists = {name: tuple(value.get(name, ())) for name in ("choices", "prior")}
        return cls(**{**value, **lists})


@dataclass(frozen=True, slots=True)
class PairScoring:
    """The way in which a cross-encoder scores a pair of query and document.

    The score is one logit of the classification head, from pooled hidden states.

    Args:
        pooling: How the hidden states of a pair become one vector.
        activation: The function that converts the logit to the score.
        typed: True if tokens of the document have the token type 1. False: all tokens have type 0.
    """

    pooling: Pooling
    activation: ScoreActivation
    typed: bool

    def to_json(self) -> dict[str, Any]:
        """Return the settings of a cross-encoder's scores as JSON values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the settings of scores from the JSON values that `to_json` returns."""
        return cls(**value)
