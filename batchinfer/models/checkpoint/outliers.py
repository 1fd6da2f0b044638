"""Finds outlier channels: inputs of linear layers that are much larger than others.

With one scale per token, int8 rounds the other channels away (Dettmers et al., 2022, "LLM.int8()"; Xiao et al., 2023,
"SmoothQuant").
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchinfer.models.checkpoint.weights import LayerWeights, Tables, Weights
from batchinfer.models.spec.parameters import FINAL_NORM
from batchinfer.models.spec.spec import ModelSpec

# The user is warned from this ratio to the median channel on, after smoothing (smoothing.py). Measured with two of 192
# channels in every norm of the quickstart's model scaled up: at a ratio of 10, the mean divergence of int8 is 1.0e-4
# nats, 3 times the value without outliers; at 30 it is 2.3e-3, 60 times that value
OUTLIER_RATIO = 20.0
# Norms whose outputs are inputs of linear layers
WATCHED_NORMS = {"input_norm": "input norm", "post_norm": "post-attention norm"}


@dataclass(frozen=True, slots=True)
class Outlier:
    """The input channel of a model's linear layers that most exceeds the median channel, which makes int8 inaccurate.

    Args:
        where: The norm or projection whose outputs are the input, such as "input norm of layer 3".
        channel: The number of the channel.
        ratio: The magnitude of the channel, divided by the magnitude of the median channel.
    """

    where: str
    channel: int
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.where}: channel {self.channel} has {self.ratio:.0f} times the scale of the median channel"
        )


class WatchedWeights(Weights):
    """Passes on a model's weights unchanged, and keeps the outlier channel with the largest ratio in `worst`."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        self._weights, self._spec = weights, spec
        self.worst: Outlier | None = None

    def tables(self) -> Tables:
        """Return the weights outside of layers, such as the head, and look for outlier channels in the final norm."""
        tables = self._weights.tables()
        if FINAL_NORM in tables.norms:
            self._record("final norm", tables.norms[FINAL_NORM])
        return tables

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a layer, and look for outlier channels in its norms and up projections."""
        layer = self._weights.layer(index)
        for name, words in WATCHED_NORMS.items():
            if name in layer:
                self._record(f"{words} of layer {index}", layer[name])
        for linear in self._spec.layers[index].linears:
            if linear.gated and not linear.stored:
                weight = layer[linear.name]
                ups = weight.view(max(1, linear.experts), 2, -1, weight.shape[1])[:, 1].float().norm(dim=-1)
                for up in ups:
                    self._record(f"up projection of layer {index}", up)
        return layer

    def _record(self, where: str, scales: Tensor) -> None:
        sizes = scales.float().abs()
        channel = int(sizes.argmax())
        ratio = float(sizes[channel] / sizes.median()) if bool(sizes.median() > 0) else 0.0
        if self.worst is None or ratio > self.worst.ratio:
            self.worst = Outlier(where, channel, ratio)


def warning_of(worst: Outlier | None) -> str | None:
    """Return a warning for the user that int8 may change answers; None if it is not needed.

    Args:
        worst: The outlier channel with the largest ratio. No warning is needed for None or a ratio below OUTLIER_RATIO.
    """
    if worst is None or worst.ratio < OUTLIER_RATIO:
        return None
    return (
        f"model.quantization: int8 may change answers of this checkpoint: {worst}, and int8 rounds the other channels "
        "of a token coarsely; compare some rows with quantization: none before a large job"
    )
