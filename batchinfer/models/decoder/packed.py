"""The weights of a decoder as its operators want them: all of a decoder that takes long to make."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from batchinfer.models.adapters.factors import AdapterFiles
from batchinfer.models.checkpoint.weights import Tables, Weights
from batchinfer.models.decoder.block import pack_layer
from batchinfer.models.decoder.classifier import Classifier
from batchinfer.models.decoder.quantize import quantized_layer, quantized_weight
from batchinfer.models.ops.interface import Adapters, Head, LayerParts, Ops
from batchinfer.models.spec.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The weights of a model on their device. How long its sequences may be need not be known yet."""

    spec: ModelSpec
    tables: Tables
    head: Head | None  # None: an encoder's
    layers: tuple[LayerParts, ...]  # without their rotary tables
    device: torch.device | str
    classifier: Classifier | None = None  # None: there is no classification head
    adapters: int = 0  # how many there are


def pack_weights(
    spec: ModelSpec,
    weights: Weights,
    ops: Ops,
    device: torch.device | str,
    adapters: AdapterFiles | None = None,
) -> PackedWeights:
    """Pack the weights for `ops`, a layer at a time, with the factors of adapters."""
    tables = weights.tables()
    head = ops.pack_head(quantized_weight(tables.head, spec.head_form)) if spec.causal else None
    head_spec = spec.classifier
    classifier = None if head_spec is None else Classifier(ops, head_spec, tables.classifier)
    # or a head that was copied would be there twice while the layers are packed
    tables = replace(tables, head=tables.embedding)
    layers = list[LayerParts]()
    for index, layer in enumerate(spec.layers):
        own = _adapters(ops, layer, index, adapters)
        layers.append(pack_layer(ops, layer, quantized_layer(layer, weights.layer(index)), adapters=own))
    count = 0 if adapters is None else adapters.count
    return PackedWeights(spec, tables, head, tuple(layers), device, classifier, count)


def _adapters(ops: Ops, layer: LayerSpec, index: int, adapters: AdapterFiles | None) -> dict[str, Adapters]:
    """Pack the factors for those products of a layer that any adapter changes."""
    if adapters is None:
        return {}
    found = {linear.name: adapters.factors(index, linear) for linear in layer.linears}
    return {name: ops.pack_adapters(factors) for name, factors in found.items() if factors is not None}
