"""The sources of an engine's model: a checkpoint's spec and how it is loaded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from batchinfer.core.errors import CannotSplit, Unavailable
from batchinfer.models.adapters.factors import AdaptedWeights, PartOfLayers
from batchinfer.models.adapters.merging import MergedWeights
from batchinfer.models.adapters.sizes import AdapterSizes, adapter_sizes
from batchinfer.models.adapters.stored_adapter import DORA_NOT_SHARDED, StoredAdapter, inspect_adapter
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.outliers import WatchedWeights, warning_of
from batchinfer.models.checkpoint.smoothing import SmoothedWeights
from batchinfer.models.checkpoint.stored_parts import check_parts
from batchinfer.models.checkpoint.weights import CheckpointWeights, ReadCount, Weights
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.packed import pack_weights
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.models.opening import open_checkpoint
from batchinfer.models.ops.choose import Arithmetic, choose_ops
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import AdapterRoom
from batchinfer.models.parallel.group import SINGLE_RANK, Ranks
from batchinfer.models.parallel.shard_spec import shard_spec
from batchinfer.models.spec.model_cost import loaded_bytes, model_cost
from batchinfer.models.spec.parameters import parameter_count
from batchinfer.models.spec.spec import AttentionRules, AttentionSpec, ModelSpec
from batchinfer_kernels.arithmetic import Device, KvCacheDtype, Quantization, WeightCodes
from batchinfer_kernels.cost import ModelCost

if TYPE_CHECKING:
    from batchinfer.models.foreign.model import TransformersModel
    from batchinfer.models.foreign.source import ForeignSource

# A model that an engine can be built of
Source: TypeAlias = "ModelSource | ForeignSource"
# Makes a model of loaded weights; see ModelSource.load
Decoders: TypeAlias = "Callable[[Ops, int], Decoder] | Callable[[Ops, int], TransformersModel]"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model of one of our families: its spec, and where its weights come from."""

    spec: ModelSpec
    parameters: int  # values in all its tensors
    weights: Callable[[torch.dtype, torch.device], Weights]
    adapters: Mapping[str, StoredAdapter] = field(default_factory=dict)  # by fingerprint
    merged: StoredAdapter | None = None  # an adapter that all rows have, in the weights
    folder: Path | None = None  # may say that its channels are others than those that adapters were made for
    adapter_places: int | None = None  # how many adapters are on the device at a time; None: all
    ranks: Ranks = (
        SINGLE_RANK  # with which it is computed; its spec and its weights are those of this rank's part
    )
    whole: ModelSpec | None = None  # the model that it is a part of; None: it is all of it
    read: ReadCount = field(default_factory=ReadCount)  # by its weights, of its checkpoint's files
    # Its decode steps launch the same kernels each time, and never wait for the device
    can_be_captured: ClassVar[bool] = True

    def part(self, ranks: Ranks) -> ModelSource:
        """Return the part of a rank, whose weights `weights` reads already. Raises CannotSplit."""
        place, merged = ranks.shard, self.merged
        if merged is not None and place.cuts_layers:
            raise CannotSplit(DORA_NOT_SHARDED)
        own = shard_spec(self.spec, place)
        return replace(
            self,
            spec=own,
            parameters=parameter_count(own),
            adapters={name: each.of_layers(place.layers) for name, each in self.adapters.items()},
            merged=None if merged is None else merged.of_layers(place.layers),
            ranks=ranks,
            whole=self.spec,
        )

    @property
    def prompt_layers(self) -> Mapping[AttentionRules, int]:
        """How many layers have attention with such rules."""
        found = (layer.attention for layer in self.spec.layers)
        return Counter(attention.rules for attention in found if isinstance(attention, AttentionSpec))

    def choose_ops(self, arithmetic: Arithmetic) -> Ops:
        """Choose the operators that it runs with. Raises Unavailable if none here have the arithmetic."""
        attention = self.spec.attention
        caches = [cache for cache in self.spec.caches if cache is not None]
        ops = choose_ops(
            arithmetic.device,
            arithmetic.dtype,
            attention.group,
            attention.head_dim,
            forms=self.spec.forms,
            deterministic=arithmetic.deterministic,
            kv_heads=attention.kv_heads,
            tiles=arithmetic.tiles,
            latent=attention.cache.latent,
            codes=any(cache.dtype == "int8" for cache in caches),
            causal=self.spec.causal,
        )
        for cache in caches:
            if not ops.holds(cache):
                raise Unavailable(
                    f"the KV cache is to keep {cache.dtype}, which {ops.name} operators do not; use engine.device: "
                    "cuda with Triton (docs/gpu.md), on a CPU int8 with a C compiler, or leave out "
                    "model.kv_cache_dtype"
                )
        return ops

    def load(self, ops: Ops, arithmetic: Arithmetic) -> Callable[[Ops, int], Decoder]:
        """Load the weights, and return what makes a decoder of them: it gets operators, which may differ from these in
        how they read prompts, and the tokens of the longest sequence. Raises what its files make it raise."""
        place, adapters = (arithmetic.dtype, arithmetic.device), [*self.adapters.values()]
        room = None if self.adapter_places is None else AdapterRoom(self.adapter_places, arithmetic.device)
        # They wait where there is room for all of them
        kept = (arithmetic.dtype, arithmetic.device if room is None else torch.device("cpu"))
        rounded = any(form.codes != "fp8" and not form.stored for form in self.spec.forms)
        with self.weights(*place) as own:
            stored = own if self.merged is None else MergedWeights(own, self.spec, self.merged)
            with AdaptedWeights(stored, self.spec, adapters, *kept, self._part, self.folder) as adapted:
                watched = WatchedWeights(SmoothedWeights(adapted, self.spec, self.ranks.experts), self.spec)
                # Looking for outliers takes passes over weights, which a run without codes need not wait for
                weights = watched if rounded else adapted
                packed = pack_weights(
                    self.spec, weights, ops, arithmetic.device, len(adapters), room, self.ranks
                )
        warning = warning_of(watched.worst) if rounded else None
        if warning is not None:
            _log.warning("%s", warning)
        return partial(Decoder, packed)

    @property
    def _part(self) -> PartOfLayers | None:
        place = self.ranks.shard
        if self.whole is None:
            return None
        layers = self.whole.layers if place.layers is None else self.whole.layers[slice(*place.layers)]
        return PartOfLayers(layers, place)

    def cost(self, arithmetic: Arithmetic) -> ModelCost:
        """Return what its steps cost."""
        device: Device = "cuda" if arithmetic.device.type == "cuda" else "cpu"
        found, sizes = (
            model_cost(self.spec, arithmetic.dtype.itemsize, device, arithmetic.deterministic),
            self._sizes,
        )
        return found if sizes is None else sizes.with_cost(found)

    @property
    def _sizes(self) -> AdapterSizes | None:
        """Return what the adapters beside the weights take; None: there are none."""
        return adapter_sizes(self.spec, [*self.adapters.values()])

    def weight_bytes(self, cost: ModelCost) -> int:
        """Return the bytes of its loaded weights; a tied head counts once, unless it is quantised beside its
        embedding."""
        sizes, places = self._sizes, self.adapter_places
        values = 0 if sizes is None else sizes.values if places is None else sizes.place_values * (places + 1)
        factors = values * cost.itemsize
        return loaded_bytes(self.spec, self.parameters, cost.itemsize) + factors

    def computed_by(self, ops: Ops) -> tuple[str, str]:
        """Return whose operators compute it, and how its linear layers are computed, for the report."""
        values = Counter[WeightCodes | None]()
        for linear in self.spec.linears():
            values[None if linear.form is None else linear.form.codes] += linear.values
        return ops.name, ops.linear(values.most_common(1)[0][0])


def _describe_here(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ForeignSpec:
    """Describe a model in this process, which has torch."""
    from batchinfer.models.foreign.probe import describe  # transformers is slow to import

    return describe(raw, generation)


def checkpoint_source(
    path: Path,
    kv_cache: KvCacheDtype = "auto",
    quantization: Quantization = "none",
    adapters: Sequence[tuple[str, Path]] = (),
    adapter_places: int | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> Source:
    """Open a checkpoint folder as a model with such a cache and such weights, and with adapters: their fingerprints and
    folders, and how many are on the device at a time; or the part of it that a rank has. Raises what inspecting a
    checkpoint and an adapter raises, Unavailable for what the model cannot have, and CannotSplit for a part that it
    does not have.
    """
    checkpoint = open_checkpoint(path, _describe_here)
    checkpoint = checkpoint.for_quantization(quantization)
    if isinstance(checkpoint, Checkpoint):
        spec = checkpoint.spec.quantized(quantization).with_cache_dtype(kv_cache)
        found = {name: inspect_adapter(folder.name, folder, checkpoint) for name, folder in adapters}
        merged = next((adapter for adapter in found.values() if adapter.config.dora), None)
        beside = {name: adapter for name, adapter in found.items() if not adapter.config.dora}
        place = ranks.shard
        read = ReadCount()
        weights = partial(CheckpointWeights, checkpoint, shard=place, read=read)
        whole = ModelSource(
            spec, checkpoint.parameters, weights, beside, merged, path, adapter_places, read=read
        )
        if place.is_whole:
            return whole
        check_parts(checkpoint, place)
        return whole.part(ranks)
    if not ranks.shard.is_whole:
        raise CannotSplit("a model that transformers' code computes is not divided among ranks")
    if adapters:
        raise Unavailable("a model that transformers' code computes is given no adapters; merge them into it")
    from batchinfer.models.foreign.source import ForeignSource  # slow to import, and not for our families

    return ForeignSource(checkpoint, quantization)
