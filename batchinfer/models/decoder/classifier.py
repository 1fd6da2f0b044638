"""The classification head of an encoder, as its spec describes it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from batchinfer.models.decoder.norm import apply_norm
from batchinfer.models.ops.interface import Ops
from batchinfer.models.spec.parameters import BIAS, CLASSIFIER_DENSE, CLASSIFIER_NORM, CLASSIFIER_OUT
from batchinfer.models.spec.spec import ClassifierSpec, HeadActivation


class Classifier:
    """Makes logits of pooled states, in float32 whatever the run's dtype is: it costs nothing beside the layers."""

    def __init__(self, ops: Ops, spec: ClassifierSpec, weights: Mapping[str, Tensor]) -> None:
        """weights: (out, in), biases and norms by the names of their parameters."""
        self._ops, self._spec = ops, spec
        found = {name: tensor.float() for name, tensor in weights.items()}
        self._norms = {name: found[name] for name in found if name.startswith(CLASSIFIER_NORM)}
        self._dense, self._out = (
            ops.pack_exact(found[name], found.get(name + BIAS)) for name in (CLASSIFIER_DENSE, CLASSIFIER_OUT)
        )

    def __call__(self, pooled: Tensor) -> Tensor:
        """(n, hidden), of any float dtype → (n, labels) float32. A row's logits do not depend on the others'."""
        x = _activated(self._ops, self._dense(pooled.float()), self._spec.activation)
        norm = self._spec.norm
        x = x if norm is None else apply_norm(self._ops, norm, self._norms, CLASSIFIER_NORM, x)[0]
        return self._out(x)


def _activated(ops: Ops, x: Tensor, activation: HeadActivation) -> Tensor:
    if activation == "tanh":
        return x.tanh()
    return x.relu() if activation == "relu" else ops.activation(x, activation)
