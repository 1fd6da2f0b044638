"""The weights of a decoder, packed for its operators. Packing is the slow part of loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchinfer.models.checkpoint.weights import Tables, Weights
from batchinfer.models.decoder.block import pack_layer
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import AdapterRoom, Head, LayerParts
from batchinfer.models.parallel.group import SINGLE_RANK, Ranks
from batchinfer.models.parallel.sharded_ops import SplitHead
from batchinfer.models.spec.parameters import BIAS, CLASSIFIER_DENSE, CLASSIFIER_NORM, CLASSIFIER_OUT
from batchinfer.models.spec.spec import ClassifierSpec, HeadActivation, ModelSpec


class Classifier:
    """A classification head, which computes a logit per label from the pooled hidden states of a text, in float32."""

    def __init__(self, ops: Ops, spec: ClassifierSpec, weights: Mapping[str, Tensor]) -> None:
        """Pack the weights of a classification head.

        Args:
            ops: The operators.
            spec: The spec of the classification head.
            weights: Its weights (out, in), biases and norms, by parameter name.
        """
        self._ops, self._spec = ops, spec
        found = {name: tensor.float() for name, tensor in weights.items()}
        self._norms = {name: found[name] for name in found if name.startswith(CLASSIFIER_NORM)}
        self._dense, self._out = (
            ops.pack_exact(found[name], found.get(name + BIAS)) for name in (CLASSIFIER_DENSE, CLASSIFIER_OUT)
        )

    def __call__(self, pooled: Tensor) -> Tensor:
        """Return the logits of labels, (n, labels) float32.

        Args:
            pooled: (n, hidden), the pooled hidden states of n texts.
        """
        x = _activate(self._ops, self._dense(pooled.float()), self._spec.activation)
        norm = self._spec.norm
        x = x if norm is None else self._ops.norm(norm, self._norms, CLASSIFIER_NORM, x)[0]
        return self._out(x)


def _activate(ops: Ops, x: Tensor, activation: HeadActivation) -> Tensor:
    if activation == "tanh":
        return x.tanh()
    return x.relu() if activation == "relu" else ops.activation(x, activation)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The weights of a model, packed on their device for the operators that compute it.

    Args:
        spec: The model, or a rank's shard.
        tables: The weights outside of layers, such as the embedding.
        head: The output layer (lm_head). None for an encoder, and for a stage that is not the last.
        layers: The packed layers, without their rotary tables.
        device: The device.
        classifier: The classification head. None: there is none.
        adapters: The number of LoRA adapters that the device holds at a time.
        adapter_slots: The same number, if the job has more adapters. None: the device holds all adapters of the job.
        ranks: The ranks that compute the model together.
    """

    spec: ModelSpec
    tables: Tables
    head: Head | None
    layers: tuple[LayerParts, ...]
    device: torch.device | str
    classifier: Classifier | None = None
    adapters: int = 0
    adapter_slots: int | None = None
    ranks: Ranks = SINGLE_RANK


def pack_weights(
    spec: ModelSpec,
    weights: Weights,
    ops: Ops,
    device: torch.device | str,
    adapters: int = 0,
    room: AdapterRoom | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> PackedWeights:
    """Read the weights of a model, and pack them for its operators, one layer at a time.

    Args:
        spec: The model, or a rank's shard.
        weights: Its weights, with A and B of LoRA adapters.
        ops: The operators.
        device: The device of the weights.
        adapters: The number of adapters of the job.
        room: How many adapters the device holds at a time. None: all of them.
        ranks: The ranks that compute the model together.
    """
    tables = weights.tables()
    head = ops.pack_head(ops.convert_weight(tables.head, spec.head_form)) if spec.has_head else None
    if head is not None and spec.tokens is not None:
        head = SplitHead(head, spec.vocab, ranks.tensor)
    head_spec = spec.classifier
    classifier = None if head_spec is None else Classifier(ops, head_spec, tables.classifier)
    # Frees the unpacked head before layers are packed
    tables = replace(tables, head=tables.embedding)
    layers = tuple(
        pack_layer(ops, layer, weights.layer(index), None, adapters, room, ranks)
        for index, layer in enumerate(spec.layers)
    )
    slots = None if room is None else room.places
    return PackedWeights(spec, tables, head, layers, device, classifier, slots or adapters, slots, ranks)
