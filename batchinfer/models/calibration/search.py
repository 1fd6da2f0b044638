"""Calibrates a model for int4, one layer at a time.

Each layer is calibrated with the inputs that it gets from the rounded layers before it. The loss of the whole model is
measured on held-out rows. A GPU holds one layer at a time, the embedding and the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from batchinfer.core.statistics.quality import Quality
from batchinfer.models.adapters.channel_factors import MarkedWeights
from batchinfer.models.calibration.experts import WatchedExperts
from batchinfer.models.calibration.layer import (
    LayerInputs,
    RoundedLayer,
    WatchedLinear,
    round_layer,
)
from batchinfer.models.calibration.layered import LOGIT_ROWS, compare_logits, model_ends
from batchinfer.models.calibration.sample import LayerRun, SampleRows
from batchinfer.models.calibration.work import CalibrationOutcome, rounded_linears
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.smoothing import SmoothedWeights
from batchinfer.models.checkpoint.tensor_names import layer_names
from batchinfer.models.checkpoint.weights import CheckpointWeights, LayerWeights, Tables
from batchinfer.models.decoder.block import Block, build_layer, pack_layer
from batchinfer.models.decoder.positions import rope_table
from batchinfer.models.ops.attention import RopeTable
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import DecoderLayer
from batchinfer.models.spec.spec import INT4_GROUP, LayerSpec, LinearSpec

CPU = torch.device("cpu")


@dataclass(slots=True)
class _Streams:
    """The hidden states before the next layer to round, (tokens, hidden) per step.

    Args:
        searched: States of the calibration rows, in the rounded model.
        exact: States of the held-out rows, in the original model.
        rounded: States of the held-out rows, in the rounded model.
    """

    searched: list[Tensor]
    exact: list[Tensor]
    rounded: list[Tensor]


class Search:
    """Calibrates the layers of a model in ascending order, and measures the loss of the rounded model.

    It needs memory for one layer and for the hidden states of all rows.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        dtype: torch.dtype,
        rows: tuple[SampleRows, SampleRows],
        device: torch.device = CPU,
        group: int = INT4_GROUP,
        marks: bool = False,
    ) -> None:
        """Embed the rows, and prepare to round the first layer.

        Args:
            checkpoint: The model.
            ops: The operators.
            dtype: The dtype in which layers are computed.
            rows: The rows to calibrate with, at least one, and the held-out rows for the loss, possibly none.
            device: The device on which layers are computed.
            group: Inputs per scale.
            marks: If True, the layers' weights include the factors by which channels were scaled (see MarkedWeights).
        """
        self.spec, self._checkpoint = checkpoint.spec.quantized("int4"), checkpoint
        spec, self._stored, self._device = self.spec, getattr(torch, checkpoint.stored_dtype), device
        own = CheckpointWeights(checkpoint, torch.float32, CPU)
        self._weights = SmoothedWeights(MarkedWeights(own, spec) if marks else own, spec)
        self._ops, self._dtype, self._group = ops, dtype, group
        self._exact = replace(spec, layers=tuple(replace(layer, forms=()) for layer in spec.layers))
        steps, held_out = (list(sample.steps(device)) for sample in rows)
        self._searched = LayerRun(ops, spec, dtype, steps)
        self._held_out = LayerRun(ops, spec, dtype, held_out) if held_out else None
        self._positions = max(sample.longest for sample in rows)
        tables = _cast_tables(self._weights.tables(), dtype, device)
        with torch.inference_mode():
            forms = (None, spec.head_form)
            self._ends = tuple(model_ends(spec, tables, ops, form, device, self._positions) for form in forms)
            first = [self._ends[0].forward(step.ids, [step.inputs], (), ()) for step in steps]
            held = [self._ends[0].forward(step.ids, [step.inputs], (), ()) for step in held_out]
        self._streams = _Streams(first, held, list(held))
        self._experts, self._few = 0, 0

    def layers(self) -> Iterator[RoundedLayer]:
        """Calibrate each layer in turn, and yield it on the CPU."""
        for index in range(len(self.spec.layers)):
            with torch.inference_mode():
                yield self._layer(index)

    def _layer(self, index: int) -> RoundedLayer:
        layer, exact = self.spec.layers[index], self._exact.layers[index]
        weights = {name: one.to(self._device) for name, one in self._weights.layer(index).items()}
        cast = _cast(exact, weights, self._dtype)
        names = layer_names(self._checkpoint.spec, index, self._checkpoint.prefixes)
        read = self._read_inputs(rounded_linears(layer, names, self._group), exact, cast)
        if read.seen is not None:
            self._experts, self._few = self._experts + read.seen.count, self._few + read.seen.few
        if self._held_out is not None:
            self._streams.exact = self._held_out(exact, self._build(exact, cast), self._streams.exact)
        found = round_layer(layer, weights, read, self._group, self._stored)
        after = self._build(found.spec, _cast(found.spec, found.weights, self._dtype))
        self._streams.searched = self._searched(found.spec, after, self._streams.searched)
        if self._held_out is not None:
            self._streams.rounded = self._held_out(found.spec, after, self._streams.rounded)
        return replace(found, weights={name: one.to(CPU) for name, one in found.weights.items()})

    def _build(self, layer: LayerSpec, weights: LayerWeights) -> DecoderLayer:
        parts = pack_layer(self._ops, layer, weights)
        return build_layer(self._ops, layer, replace(parts, rope=self._rope(layer)))

    def _rope(self, layer: LayerSpec) -> RopeTable | None:
        return None if layer.rotation is None else rope_table(layer.rotation, self._positions, self._device)

    def _read_inputs(
        self, rounded: Sequence[LinearSpec], exact: LayerSpec, weights: LayerWeights
    ) -> LayerInputs:
        """Run a layer over the calibration rows, and record the inputs of the products to round.

        Args:
            rounded: The products to round.
            exact: The layer without quantised weights.
            weights: The weights of the layer in the dtype of the run.
        """
        run = self._searched
        parts = replace(pack_layer(self._ops, exact, weights), rope=self._rope(exact))
        watched = {
            linear.name: WatchedLinear(parts.linears[linear.name], self._counted_tokens(), self._device)
            for linear in rounded
            if not linear.experts
        }
        parts = replace(parts, linears={**parts.linears, **watched})
        experts = None
        if parts.experts is not None and any(linear.experts for linear in rounded):
            experts = WatchedExperts(parts.experts, self._counted_tokens())
            parts = replace(parts, experts=experts)
        run(exact, Block(self._ops, exact, parts), self._streams.searched)
        products = {name: linear.products for name, linear in watched.items()}
        return LayerInputs(products, None if experts is None else experts.seen)

    def _counted_tokens(self) -> Iterator[Tensor]:
        """Yield (tokens,) bool for each step: True for tokens that calibration counts."""
        return (step.counted for step in self._searched.steps)

    def outcome(self) -> CalibrationOutcome:
        """Return the loss and the numbers of experts. Call it after `layers` has yielded all layers."""
        return CalibrationOutcome(self.loss(), self._experts, self._few)

    def loss(self) -> Quality | None:
        """Return the loss on the held-out rows, None without any. Call it after `layers` has yielded all layers."""
        if self._held_out is None:
            return None
        with torch.inference_mode():
            return compare_logits(self._ends, self._held_out_states())

    def _held_out_states(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield final hidden states at scored positions, (rows, hidden), of the original and the rounded model."""
        assert self._held_out is not None
        streams = zip(self._held_out.steps, self._streams.exact, self._streams.rounded, strict=True)
        for step, exact, rounded in streams:
            pair = (torch.split(states[step.scored], LOGIT_ROWS) for states in (exact, rounded))
            yield from zip(*pair, strict=True)


def _cast(layer: LayerSpec, weights: LayerWeights, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of a layer cast to `dtype`.

    Quantised values and scales keep their dtype, and so do vectors, which are always float32.
    """
    kept = {linear.name + end for linear in layer.linears for end in ("", ".scales") if linear.stored}
    kept |= set(layer.vectors)
    return {name: one if name in kept else one.to(dtype) for name, one in weights.items()}


def _cast_tables(tables: Tables, dtype: torch.dtype, device: torch.device) -> Tables:
    embedding = tables.embedding.to(device, dtype)
    head = embedding if tables.head is tables.embedding else tables.head.to(device, dtype)
    norms = {name: norm.to(device, dtype) for name, norm in tables.norms.items()}
    positions = None if tables.positions is None else tables.positions.to(device, dtype)
    return replace(tables, embedding=embedding, head=head, norms=norms, positions=positions)
