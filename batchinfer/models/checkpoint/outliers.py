"""Outlier channels: inputs of linear layers that are far larger than the others, which int8 with a scale a token rounds
away (Dettmers et al., 2022, "LLM.int8()"; Xiao et al., 2023, "SmoothQuant")."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchinfer.models.checkpoint.weights import LayerWeights, Tables, Weights
from batchinfer.models.spec.parameters import FINAL_NORM
from batchinfer.models.spec.spec import ModelSpec

# What is left of outliers once they were made smaller (smoothing.py). Two of 192 channels in every norm of the
# quickstart's model so many times the others: at 10 the mean divergence is 1.0e-4 nats, 3 times that of int8 without
# them, at 30 it is 2.3e-3, 60 times
OUTLIER_RATIO = 20.0
# Norms whose results are inputs of linear layers
WATCHED_NORMS = {"input_norm": "input norm", "post_norm": "post-attention norm"}


@dataclass(frozen=True, slots=True)
class Outlier:
    """The largest input of some linear layers, `ratio` times the median one."""

    where: str  # e.g. "input norm of layer 3"
    channel: int
    ratio: float

    def __str__(self) -> str:
        return (
            f"{self.where}: channel {self.channel} is scaled {self.ratio:.0f} times as much as the median one"
        )


class WatchedWeights(Weights):
    """Hands on a model's weights and keeps the worst outlier of those that were read."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        self._weights, self._spec = weights, spec
        self.worst: Outlier | None = None

    def tables(self) -> Tables:
        tables = self._weights.tables()
        if FINAL_NORM in tables.norms:
            self._look("final norm", tables.norms[FINAL_NORM])
        return tables

    def layer(self, index: int) -> LayerWeights:
        layer = self._weights.layer(index)
        for name, words in WATCHED_NORMS.items():
            if name in layer:
                self._look(f"{words} of layer {index}", layer[name])
        for linear in self._spec.layers[index].linears:
            if linear.gated and not linear.stored:
                weight = layer[linear.name]
                ups = weight.view(max(1, linear.experts), 2, -1, weight.shape[1])[:, 1].float().norm(dim=-1)
                for up in ups:
                    self._look(f"up projection of layer {index}", up)
        return layer

    def _look(self, where: str, scales: Tensor) -> None:
        """`scales`: what each channel of a linear layer's input is multiplied with."""
        sizes = scales.float().abs()
        channel = int(sizes.argmax())
        ratio = float(sizes[channel] / sizes.median()) if bool(sizes.median() > 0) else 0.0
        if self.worst is None or ratio > self.worst.ratio:
            self.worst = Outlier(where, channel, ratio)


def warning_of(worst: Outlier | None) -> str | None:
    """Return the warning for a user who asked for int8; None if no channel stands out."""
    if worst is None or worst.ratio < OUTLIER_RATIO:
        return None
    return (
        f"model.quantization: int8 may change answers of this checkpoint: {worst}, and int8 rounds the other channels "
        "of a token coarsely; compare some rows with quantization: none before a large job"
    )
