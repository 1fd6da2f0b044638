"""Linear layers that are applied to pooled vectors when a result is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.embedding import Dense, DenseActivation
from batchinfer.core.errors import InputCorrupt, InputMissing

Floats = NDArray[np.float32]


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(0.5 * (np.tanh(0.5 * x) + 1), np.float32)  # this form does not overflow


_ACTIVATIONS: Mapping[DenseActivation, Callable[[Floats], Floats]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, np.float32(0)),
    "Sigmoid": _sigmoid,
}


def apply_layers(vectors: Floats, layers: tuple[Dense, ...]) -> Floats:
    """Apply linear layers, each followed by its activation, to vectors. Their weights are read from files.

    Args:
        vectors: [n, inputs of the first layer].
        layers: The layers in order. Without any, the vectors are returned unchanged.

    Returns:
        Vectors of shape [n, outputs of the last layer].

    Raises:
        InputMissing: A file of weights cannot be read.
        InputCorrupt: A file of weights has changed since the job was set up.
    """
    for layer in layers:
        weight, bias = _weights(layer)
        made = vectors @ weight.T
        vectors = _ACTIVATIONS[layer.activation](made if bias is None else made + bias)
    return vectors


def _weights(layer: Dense) -> tuple[Floats, Floats | None]:
    # Read for each batch of rows, since the weights are small compared to a model
    try:
        content = Path(layer.file).read_bytes()
    except OSError as error:
        raise InputMissing(
            f"{layer.file} cannot be read: {error.strerror}; the job's vectors need it"
        ) from error
    if hashlib.sha256(content).hexdigest() != layer.digest:
        raise InputCorrupt(f"{layer.file} has changed since the job was set up; run it again")
    weight = _floats(content, layer, layer.weight, layer.outputs * layer.inputs)
    bias = None if layer.bias is None else _floats(content, layer, layer.bias, layer.outputs)
    return weight.reshape(layer.outputs, layer.inputs), bias


def _floats(content: bytes, layer: Dense, start: int, count: int) -> Floats:
    if layer.dtype == "BF16":  # the upper 16 bits of float32
        halves = np.frombuffer(content, "<u2", count, start)
        return (halves.astype(np.uint32) << 16).view(np.float32)
    kind = "<f4" if layer.dtype == "F32" else "<f2"
    return np.frombuffer(content, kind, count, start).astype(np.float32)
