"""The settings of embedding jobs, which compute a vector from the hidden states of each prompt."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from batchinfer.core.sampling import Pooling

DenseActivation = Literal["Identity", "Tanh", "ReLU", "Sigmoid"]  # as torch names their modules
DenseDtype = Literal["F32", "F16", "BF16"]  # as safetensors spells them


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer with an activation, applied to pooled vectors."""

    file: str
    digest: str  # sha256 of the file
    inputs: int
    outputs: int
    dtype: DenseDtype
    weight: int  # byte offset in the file, (outputs, inputs)
    bias: int | None  # byte offset in the file, (outputs,)
    activation: DenseActivation


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a job computes its vectors. Engines pool; the other operations run on stored vectors.

    The order is: dense layers, truncation, normalisation.
    """

    pooling: Pooling
    normalize: bool  # to length 1
    dimensions: int  # truncate vectors to this many dimensions
    prompt: str = ""  # prepended to every text
    dense: tuple[Dense, ...] = ()

    def width(self, hidden: int) -> int:
        """Return the dimensions of vectors before truncation, for hidden states of `hidden` dimensions."""
        return self.dense[-1].outputs if self.dense else hidden

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that `from_json` reads. Without dense layers the key is omitted, as in older results."""
        value = asdict(self)
        if not self.dense:
            del value["dense"]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read the result of `to_json`."""
        dense = tuple(Dense(**each) for each in value.get("dense", ()))
        return cls(**{**value, "dense": dense})
