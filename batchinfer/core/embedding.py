"""The vectors that a job makes of the hidden states of its prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from batchinfer.core.sampling import Pooling


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vectors of a job. Engines pool; what is said of the finished vector is done once the store has it."""

    pooling: Pooling
    normalize: bool  # to length 1
    dimensions: int  # of the model's vectors, the first so many are kept
    prompt: str = ""  # put before every text

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, which `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**value)
