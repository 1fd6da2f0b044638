"""The scores that a job asks for, in place of texts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

MAX_LABELS = 1000  # of a row


@dataclass(frozen=True, slots=True)
class Scoring:
    """The log-probabilities that a job makes of its rows, and what becomes of them in its result."""

    # The labels between which each row chooses, with unequal texts; (): rows have a continuation or labels of their own
    choices: tuple[str, ...] = ()
    own_labels: bool = False
    length_normalized: bool = False  # labels are compared by the mean of their tokens' log-probabilities
    per_token: bool = False  # the result has the log-probability of each token

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, which `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**{**value, "choices": tuple(value["choices"])})
