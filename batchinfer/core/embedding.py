"""The vectors that a job makes of the hidden states of its prompts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from batchinfer.core.sampling import Pooling

DenseActivation = Literal["Identity", "Tanh", "ReLU", "Sigmoid"]  # as torch names their modules
DenseDtype = Literal["F32", "F16", "BF16"]  # as safetensors spells them


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer that pooled vectors pass, and the activation behind it. `weight`, (outputs, inputs), and `bias`,
    (outputs,), are where their first bytes lie in the file, whose sha256 is `digest`."""

    file: str
    digest: str
    inputs: int
    outputs: int
    dtype: DenseDtype
    weight: int
    bias: int | None
    activation: DenseActivation


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vectors of a job. Engines pool; what is said of the finished vector is done once the store has it."""

    pooling: Pooling
    normalize: bool  # to length 1
    dimensions: int  # of the model's vectors, the first so many are kept
    prompt: str = ""  # put before every text
    dense: tuple[Dense, ...] = ()  # what pooled vectors pass before they are cut, in order

    def width(self, hidden: int) -> int:
        """Return how many numbers a vector may have, of hidden states of so many."""
        return self.dense[-1].outputs if self.dense else hidden

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, which `from_json` reads. Layers that are not there are left out: results of before there
        were any keep their identity."""
        value = asdict(self)
        if not self.dense:
            del value["dense"]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        dense = tuple(Dense(**each) for each in value.get("dense", ()))
        return cls(**{**value, "dense": dense})
