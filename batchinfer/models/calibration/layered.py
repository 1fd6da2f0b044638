"""Runs a model over sample rows one layer at a time, so that memory for a single layer is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchinfer.core.statistics.quality import Quality
from batchinfer.models.calibration.sample import LayerRun, SampledStep
from batchinfer.models.checkpoint.weights import Tables, Weights
from batchinfer.models.decoder.block import build_layer, pack_layer
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.packed_weights import PackedWeights
from batchinfer.models.decoder.positions import distance_table, rope_table
from batchinfer.models.ops.interface import Ops
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.arithmetic import WeightForm

LOGIT_ROWS = 256  # tokens per batch of logits, which limits the memory for them


def compare_logits(ends: Sequence[Decoder], states: Iterable[tuple[Tensor, Tensor]]) -> Quality | None:
    """Compare the next token's distributions of two models. Return None without any states.

    Args:
        ends: The unquantised and the quantised model, whose heads compute the logits.
        states: Their hidden states before the final norm, (n, hidden) each, in batches.
    """
    kl, same, tokens = 0.0, 0, 0
    for pair in states:
        exact, rounded = (
            end.logits(state).double().log_softmax(-1) for end, state in zip(ends, pair, strict=True)
        )
        kl += float((exact.exp() * (exact - rounded)).sum())
        same += int(exact.argmax(-1).eq(rounded.argmax(-1)).sum())
        tokens += len(exact)
    return Quality(kl / tokens, same / tokens, tokens) if tokens else None


def model_ends(
    spec: ModelSpec, tables: Tables, ops: Ops, form: WeightForm | None, device: torch.device, positions: int
) -> Decoder:
    """Return a decoder with the embedding, the final norm and the head of a model, but without its layers.

    Args:
        spec: The model.
        tables: Its weights before and after the layers.
        ops: The operators.
        form: The form of the head. None: the head is not quantised.
        device: The device of the tables.
        positions: The maximum length of a row, in tokens.
    """
    head = ops.pack_head(ops.convert_weight(tables.head, form)) if spec.has_head else None
    packed = PackedWeights(replace(spec, layers=()), tables, head, (), device)
    return Decoder(packed, ops, positions)


class LayeredModel:
    """A model that is run one layer at a time: a layer is loaded, run over all rows, and freed."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, ops: Ops, dtype: torch.dtype, steps: Sequence[SampledStep]
    ) -> None:
        """Load the embedding and the head.

        Args:
            spec: The model.
            weights: Its weights, on the device of the rows.
            ops: The operators.
            dtype: The dtype in which the layers are computed.
            steps: The rows, in batches.
        """
        self._spec, self._weights, self._ops = spec, weights, ops
        self._device = steps[0].ids.device
        self._positions = max(step.longest for step in steps)
        self._tables = weights.tables()
        self.ends = model_ends(spec, self._tables, ops, spec.head_form, self._device, self._positions)
        self._run = LayerRun(ops, spec, dtype, steps)

    def final_states(self, on_layer: Callable[[], None]) -> list[Tensor]:
        """Run all layers, and return the hidden states before the final norm, (tokens, hidden) per step.

        Args:
            on_layer: Called after each layer.
        """
        states = [self.ends.forward(step.ids, [step.inputs], (), ()) for step in self._run.steps]
        distances = self._tables.distances
        for index, layer in enumerate(self._spec.layers):
            parts = pack_layer(self._ops, layer, self._weights.layer(index))
            parts = replace(
                parts,
                rope=None
                if layer.rotation is None
                else rope_table(layer.rotation, self._positions, self._device),
                distances=None if distances is None else distance_table(distances, self._positions),
            )
            states = self._run(layer, build_layer(self._ops, layer, parts), states)
            on_layer()
        return states
