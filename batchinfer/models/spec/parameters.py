"""The parameters of a model, derived from its spec: names, shapes, and how they are fused. No torch.

A weight is named like its part ("q"), a bias like the part and ".bias", a norm like itself ("input_norm").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from batchinfer.models.spec.spec import ClassifierSpec, EncoderSpec, LayerSpec, ModelSpec, NormSpec

BIAS, SCALES, LINES, ZEROS = ".bias", ".scales", ".lines", ".zeros"
EMBEDDING, POSITIONS, HEAD, FINAL_NORM = "embedding", "positions", "head", "final_norm"
# Encoders only
EMBEDDING_NORM, TOKEN_TYPES, DISTANCES = "embedding_norm", "token_types", "distances"
CLASSIFIER = "classifier."  # prefix of the parameters of a classification head
CLASSIFIER_DENSE, CLASSIFIER_NORM, CLASSIFIER_OUT = (CLASSIFIER + part for part in ("dense", "norm", "out"))
# Factors of an adapter are named "{product}{FACTOR_A}{number of the adapter}"
FACTOR_A, FACTOR_B = ".factor_a.", ".factor_b."
Shape = tuple[int, ...]
Joined = TypeVar("Joined")


def layer_parameters(layer: LayerSpec) -> dict[str, Shape]:
    """Return the shape of each parameter of a layer by name, such as "q" or "q.bias". Weights are (outputs, inputs)."""
    shapes: dict[str, Shape] = {}
    for name, norm in layer.norms.items():
        shapes |= norm_parameters(name, norm)
    for linear in layer.linears:
        for part, outputs in linear.parts:
            shapes[part] = (outputs, linear.inputs)
            if linear.biased:
                shapes[part + BIAS] = (outputs,)
    return shapes | {name: (length,) for name, length in layer.vectors.items()}


def norm_parameters(name: str, norm: NormSpec) -> dict[str, Shape]:
    """Return the shapes of a norm's weight and, if it has one, its bias, by name of the parameter.

    Args:
        name: The name of the norm, which is also the name of its weight.
        norm: The norm.
    """
    return {name: norm.shape, name + BIAS: norm.shape} if norm.biased else {name: norm.shape}


def table_parameters(spec: ModelSpec) -> dict[str, Shape]:
    """Return the shape of each parameter outside of layers, such as the embedding, by name.

    An output layer (lm_head) that is tied to the embedding is left out.
    """
    table: Shape = (spec.rows, spec.hidden)
    tables = {EMBEDDING: table} if spec.begins else {}
    if spec.ends and not (spec.begins and spec.tied):
        tables[HEAD] = table
    if spec.learned_positions and spec.begins:
        first = 0 if spec.encoder is None else spec.encoder.first_position
        tables[POSITIONS] = (first + spec.max_positions, spec.hidden)
    if spec.final_norm is not None and spec.ends:
        tables |= norm_parameters(FINAL_NORM, spec.final_norm)
    return tables if spec.encoder is None else tables | _encoder_tables(spec, spec.encoder)


def _encoder_tables(spec: ModelSpec, encoder: EncoderSpec) -> dict[str, Shape]:
    norm, tables = encoder.embedding_norm, dict[str, Shape]()
    tables |= {} if norm is None else norm_parameters(EMBEDDING_NORM, norm)
    if encoder.token_types:
        tables[TOKEN_TYPES] = (encoder.token_types, spec.hidden)
    if encoder.distance_buckets:
        tables[DISTANCES] = (encoder.distance_buckets, spec.attention.q_heads)
    return tables | (
        {} if encoder.classifier is None else _classifier_tables(encoder.classifier, spec.hidden)
    )


def _classifier_tables(classifier: ClassifierSpec, hidden: int) -> dict[str, Shape]:
    tables: dict[str, Shape] = {CLASSIFIER_DENSE: (hidden, hidden)}
    tables |= {CLASSIFIER_DENSE + BIAS: (hidden,)} if classifier.biased else {}
    tables |= {} if classifier.norm is None else norm_parameters(CLASSIFIER_NORM, classifier.norm)
    return tables | {CLASSIFIER_OUT: (classifier.labels, hidden), CLASSIFIER_OUT + BIAS: (classifier.labels,)}


def parameter_count(spec: ModelSpec) -> int:
    """Return the number of values in all parameters of a model. A tied output layer (lm_head) is not counted."""
    shapes = [*table_parameters(spec).values()]
    for layer in spec.layers:
        shapes += layer_parameters(layer).values()
    return sum(map(math.prod, shapes))


def fused_parameters(
    layer: LayerSpec, joined: Callable[[Sequence[str]], Joined]
) -> Iterator[tuple[str, Joined]]:
    """Yield (name, tensor) for the tensors of a layer that operators read, such as "qkv", "qkv.bias" and "input_norm".

    Parameters of a matrix product, such as q, k and v, are concatenated. Weights that the checkpoint stores quantised
    are left out.

    Args:
        layer: The layer.
        joined: Returns the concatenation of parameters, given their names.
    """
    for name, norm in layer.norms.items():
        for parameter in norm_parameters(name, norm):
            yield parameter, joined([parameter])
    for vector in layer.vectors:
        yield vector, joined([vector])
    for linear in layer.linears:
        parts = [part for part, _ in linear.parts]
        if not linear.stored_codes:
            yield linear.name, joined(parts)
        if linear.biased:
            yield linear.name + BIAS, joined([part + BIAS for part in parts])
