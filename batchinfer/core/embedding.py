"""The settings of embedding jobs, which compute a vector from the hidden states of each prompt."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from batchinfer.core.sampling import Pooling

DenseActivation = Literal["Identity", "Tanh", "ReLU", "Sigmoid"]  # as torch names their modules
DenseDtype = Literal["F32", "F16", "BF16"]  # as safetensors spells them


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer with an activation, applied to pooled vectors.

    Args:
        file: The name of the safetensors file with the weights.
        digest: The sha256 of the file.
        inputs: The number of dimensions of its input.
        outputs: The number of dimensions of its output.
        dtype: The dtype of the weights in the file.
        weight: The offset of the weight, (outputs, inputs), in the file, in bytes.
        bias: The offset of the bias, (outputs,), in the file, in bytes. None: there is no bias.
        activation: The name of the activation function.
    """

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
    """The way in which an embedding job computes its vectors.

    Engines pool hidden states and store the vectors. Dense layers, truncation and normalisation are applied later, in
    this order.

    Args:
        pooling: How the hidden states of a text become one vector.
        normalize: True if vectors are scaled to length 1.
        dimensions: The number of dimensions of the vectors in the result; longer ones are truncated.
        prompt: The text that is prepended to every input.
        dense: The linear layers after the pooling.
    """

    pooling: Pooling
    normalize: bool
    dimensions: int
    prompt: str = ""
    dense: tuple[Dense, ...] = ()

    def width(self, hidden: int) -> int:
        """Return the number of dimensions of vectors before they are truncated.

        Args:
            hidden: The size of the model's hidden states.
        """
        return self.dense[-1].outputs if self.dense else hidden

    def to_json(self) -> dict[str, Any]:
        """Return the settings of an embedding job as JSON values, for `from_json`. `dense` is omitted if empty."""
        value = asdict(self)
        if not self.dense:
            del value["dense"]
        return value

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Return the settings of an embedding job from the JSON values that `to_json` returns."""
        dense = tuple(Dense(**each) for each in value.get("dense", ()))
        return cls(**{**value, "dense": dense})
