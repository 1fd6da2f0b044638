"""The settings of scoring jobs, which compute log-probabilities or relevance scores instead of texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from batchinfer.core.sampling import Pooling

MAX_LABELS = 1000  # per row
ScoreActivation = Literal["sigmoid", "identity"]  # applied to a logit


@dataclass(frozen=True, slots=True)
class Scoring:
    """The log-probabilities that a job computes for its rows, and their form in the result."""

    # Labels of all rows, all different; (): each row has a continuation or its own labels
    choices: tuple[str, ...] = ()
    own_labels: bool = False  # each row has its own labels
    length_normalized: bool = False  # compare labels by the mean of their tokens' log-probabilities
    per_token: bool = False  # include the log-probability of each token in the result
    # Replaces all values of a row in the content-free prompt that calibrates labels; None: no calibration
    content_free: str | None = None
    # The log-probability of each of `choices` after the content-free prompt, once it is computed
    prior: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `from_json` reads. Unused keys that older results do not have are omitted."""
        value = asdict(self)
        return {name: one for name, one in value.items() if one or name not in ("content_free", "prior")}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read the result of `to_json`."""
        lists = {name: tuple(value.get(name, ())) for name in ("choices", "prior")}
        return cls(**{**value, **lists})


@dataclass(frozen=True, slots=True)
class PairScoring:
    """How a cross-encoder scores a pair of query and document: one classification logit of the pooled states."""

    pooling: Pooling
    activation: ScoreActivation
    typed: bool  # True: tokens of the document have the token type 1; False: all have type 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read the result of `to_json`."""
        return cls(**value)
