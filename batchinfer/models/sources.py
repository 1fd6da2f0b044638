"""The sources of an engine's model: a spec, and a way to load the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from batchinfer.models.checkpoint.smoothing import SmoothedWeights
from batchinfer.models.checkpoint.stored_parts import check_parts
from batchinfer.models.checkpoint.weights import CheckpointWeights, ReadCount, Weights
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.packed_weights import pack_weights
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

# A model from which an engine can be built
Source: TypeAlias = "ModelSource | ForeignSource"
# Returns a model with loaded weights; see ModelSource.load
Decoders: TypeAlias = "Callable[[Ops, int], Decoder] | Callable[[Ops, int], TransformersModel]"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model of a supported family that an engine can load: its spec, and the source of its weights.

    Args:
        spec: The model, or this rank's shard of it.
        parameters: The number of values in all tensors, of the shard only.
        weights: Opens the weights of the shard in a dtype and on a device.
        adapters: Adapters that rows may use, by fingerprint.
        merged: An adapter that all rows use, which is merged into the weights. None: there is no such adapter.
        folder: The checkpoint, which may contain channel factors for adapters. None: it has none.
        adapter_slots: The number of adapters that are on the device at a time. None: all.
        ranks: The ranks that compute the model together.
        whole: The whole model. None: `spec` is the whole model.
        read: Counts the bytes that are read from the checkpoint.
        can_be_captured: True: decode steps launch the same kernels each time, and never wait for the device.
    """

    spec: ModelSpec
    parameters: int
    weights: Callable[[torch.dtype, torch.device], Weights]
    adapters: Mapping[str, StoredAdapter] = field(default_factory=dict)
    merged: StoredAdapter | None = None
    folder: Path | None = None
    adapter_slots: int | None = None
    ranks: Ranks = SINGLE_RANK
    whole: ModelSpec | None = None
    read: ReadCount = field(default_factory=ReadCount)
    can_be_captured: ClassVar[bool] = True

    def part(self, ranks: Ranks) -> ModelSource:
        """Return the source of a rank's shard, from a source of the whole model whose `weights` read only the shard.

        Args:
            ranks: The ranks of the engine, and the shard.

        Raises:
            CannotSplit: The model cannot be sharded like this.
        """
        shard, merged = ranks.shard, self.merged
        if merged is not None and shard.splits_layers:
            raise CannotSplit(DORA_NOT_SHARDED)
        own = shard_spec(self.spec, shard)
        return replace(
            self,
            spec=own,
            parameters=parameter_count(own),
            adapters={name: each.of_layers(shard.layers) for name, each in self.adapters.items()},
            merged=None if merged is None else merged.of_layers(shard.layers),
            ranks=ranks,
            whole=self.spec,
        )

    @property
    def prompt_layers(self) -> Mapping[AttentionRules, int]:
        """Return the number of layers with each set of attention rules, without layers of latent attention."""
        found = (layer.attention for layer in self.spec.layers)
        return Counter(attention.rules for attention in found if isinstance(attention, AttentionSpec))

    def choose_ops(self, arithmetic: Arithmetic) -> Ops:
        """Return the operators for the model.

        Args:
            arithmetic: Device, dtype, and whether results must be deterministic.

        Raises:
            Unavailable: No operators support the arithmetic, or a cache of the model.
        """
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
            if not ops.supports_cache(cache):
                raise Unavailable(
                    f"{ops.name} operators do not support a KV cache in {cache.dtype}; use engine.device: cuda with "
                    "Triton (docs/gpu.md), int8 on a CPU with a C compiler, or remove model.kv_cache_dtype"
                )
        return ops

    def load(self, ops: Ops, arithmetic: Arithmetic) -> Callable[[Ops, int], Decoder]:
        """Load and pack the weights, and return a function that builds a decoder from them.

        Args:
            ops: Operators, for which the weights are packed.
            arithmetic: Device and dtype of the weights.

        Returns:
            A function of operators and the maximum length of a sequence in tokens. Its operators may differ from `ops`
            only in how they compute the attention of prompts.

        Raises:
            OSError: A file cannot be read.
        """
        place, adapters = (arithmetic.dtype, arithmetic.device), [*self.adapters.values()]
        room = None if self.adapter_slots is None else AdapterRoom(self.adapter_slots, arithmetic.device)
        # If not all adapters fit the device, they stay in host memory until they are needed
        kept = (arithmetic.dtype, arithmetic.device if room is None else torch.device("cpu"))
        with self.weights(*place) as own:
            stored = self._merge_adapter(own)
            with AdaptedWeights(stored, self.spec, adapters, *kept, self._part, self.folder) as adapted:
                weights = (
                    SmoothedWeights(adapted, self.spec, self.ranks.experts) if self._is_rounded else adapted
                )
                packed = pack_weights(
                    self.spec, weights, ops, arithmetic.device, len(adapters), room, self.ranks
                )
        return partial(Decoder, packed)

    @contextmanager
    def open_layers(self, arithmetic: Arithmetic) -> Iterator[Weights]:
        """Open the weights as the engine packs them, without adapters that only some rows use."""
        with self.weights(arithmetic.dtype, arithmetic.device) as own:
            stored = self._merge_adapter(own)
            yield SmoothedWeights(stored, self.spec, self.ranks.experts) if self._is_rounded else stored

    def _merge_adapter(self, own: Weights) -> Weights:
        return own if self.merged is None else MergedWeights(own, self.spec, self.merged)

    @property
    def _is_rounded(self) -> bool:
        """Return True if loading quantises any weight to int8 or int4."""
        return any(form.codes != "fp8" and not form.stored for form in self.spec.forms)

    @property
    def _part(self) -> PartOfLayers | None:
        shard = self.ranks.shard
        if self.whole is None:
            return None
        layers = self.whole.layers if shard.layers is None else self.whole.layers[slice(*shard.layers)]
        return PartOfLayers(layers, shard)

    def cost(self, arithmetic: Arithmetic) -> ModelCost:
        """Return the cost of a step on the device of `arithmetic`, adapters included."""
        device: Device = "cuda" if arithmetic.device.type == "cuda" else "cpu"
        found, sizes = (
            model_cost(self.spec, arithmetic.dtype.itemsize, device, arithmetic.deterministic),
            self._sizes,
        )
        return found if sizes is None else sizes.with_cost(found)

    @property
    def _sizes(self) -> AdapterSizes | None:
        """Return the sizes of the adapters that are not merged into the weights; None without any."""
        return adapter_sizes(self.spec, [*self.adapters.values()])

    def weight_bytes(self, cost: ModelCost) -> int:
        """Return the bytes of the loaded weights and adapters.

        A tied head counts once, unless it is a quantised copy.

        Args:
            cost: The cost of the model, for the bytes of a value.
        """
        sizes, slots = self._sizes, self.adapter_slots
        values = 0 if sizes is None else sizes.values if slots is None else sizes.slot_values * (slots + 1)
        factors = values * cost.itemsize
        return loaded_bytes(self.spec, self.parameters, cost.itemsize) + factors

    def computed_by(self, ops: Ops) -> tuple[str, str]:
        """Return the name of the operators, and of how they compute most linear layers, for the report."""
        values = Counter[WeightCodes | None]()
        for linear in self.spec.linears():
            values[None if linear.form is None else linear.form.codes] += linear.values
        return ops.name, ops.linear(values.most_common(1)[0][0])


def _describe_here(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ForeignSpec:
    from batchinfer.models.foreign.probe import describe  # imports transformers, which is slow

    return describe(raw, generation)


def checkpoint_source(
    path: Path,
    kv_cache: KvCacheDtype = "auto",
    quantization: Quantization = "none",
    adapters: Sequence[tuple[str, Path]] = (),
    adapter_slots: int | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> Source:
    """Check a checkpoint and its adapters, and return the source from which an engine loads the model.

    Args:
        path: The folder of the checkpoint, or a GGUF file.
        kv_cache: The dtype of the KV cache.
        quantization: The quantisation of the weights.
        adapters: Fingerprint and folder of each adapter.
        adapter_slots: The number of adapters that are on the device at a time. None: all.
        ranks: The ranks of the engine, and this rank's shard.

    Raises:
        JobFileError: The checkpoint or an adapter is invalid or not supported.
        SecurityRefusal: The checkpoint or an adapter is unsafe to load.
        Unavailable: The model does not support one of the arguments.
        CannotSplit: The model cannot be sharded like this.
    """
    checkpoint = open_checkpoint(path, _describe_here)
    checkpoint = checkpoint.for_quantization(quantization)
    if isinstance(checkpoint, Checkpoint):
        spec = checkpoint.spec.quantized(quantization).with_cache_dtype(kv_cache)
        found = {name: inspect_adapter(folder.name, folder, checkpoint) for name, folder in adapters}
        merged = next((adapter for adapter in found.values() if adapter.config.dora), None)
        separate = {name: adapter for name, adapter in found.items() if not adapter.config.dora}
        shard = ranks.shard
        read = ReadCount()
        weights = partial(CheckpointWeights, checkpoint, shard=shard, read=read)
        whole = ModelSource(
            spec, checkpoint.parameters, weights, separate, merged, path, adapter_slots, read=read
        )
        if shard.is_whole:
            return whole
        check_parts(checkpoint, shard)
        return whole.part(ranks)
    if not ranks.shard.is_whole:
        raise CannotSplit("a model that transformers' code computes is not sharded among ranks")
    if adapters:
        raise Unavailable("a model that transformers' code computes is given no adapters; merge them into it")
    from batchinfer.models.foreign.source import (
        ForeignSource,
    )  # slow to import; supported families do not need it

    return ForeignSource(checkpoint, quantization)
