"""Where an engine gets its model from: what it is, and how it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from batchinfer.core.errors import Unavailable
from batchinfer.engine.runner.model_runner import Model
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.outliers import WatchedWeights, warning_of
from batchinfer.models.checkpoint.weights import CheckpointWeights, Weights
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.expert_loads import ExpertLoads
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.models.opening import open_checkpoint
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.interface import Ops
from batchinfer.models.spec.model_cost import model_cost
from batchinfer.models.spec.spec import AttentionSpec, Caches, ModelSpec
from batchinfer_kernels.arithmetic import KvCacheDtype, Quantization
from batchinfer_kernels.cost import ModelCost

_log = logging.getLogger(__name__)


class LoadedDecoder(Model, Protocol):
    """A model that knows how many tokens its experts were given, and which sequences it rotates in another way."""

    @property
    def long_from(self) -> int | None:
        """Positions of sequences that may become longer than this are given as those behind `longest`; None: of
        none."""

    @property
    def expert_loads(self) -> ExpertLoads:
        """Those of its layers that count; none where it has no experts, or another's code computes them."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What a model is computed in, and where."""

    dtype: torch.dtype
    device: torch.device
    quantization: Quantization = "none"
    deterministic: bool = False
    tiles: bool = False  # as in EngineConfig
    kv_cache: KvCacheDtype = "auto"  # as the job asks for it; what layers keep says their spec

    @property
    def weight_itemsize(self) -> int:
        return self.dtype.itemsize if self.quantization in ("none", "stored") else 1


class Source(Protocol):
    """A model that an engine can be built of. ModelSource and ForeignSource are sources."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""

    @property
    def vocab(self) -> int:
        """How many tokens it knows: their ids are below this."""

    @property
    def caches(self) -> Caches:
        """Of each layer; None: it has no attention."""

    @property
    def can_be_captured(self) -> bool:
        """Whether its decode steps launch the same kernels each time, and never wait for the device."""

    @property
    def plain_attention(self) -> bool:
        """Whether a layer of heads of one size is known to have attention without a window, a soft cap and sinks, over
        a cache without codes."""

    def choose_ops(self, arithmetic: Arithmetic) -> Ops:
        """The operators that it runs with. Raises Unavailable if none here have the arithmetic."""

    def load(self, ops: Ops, arithmetic: Arithmetic, longest: int) -> LoadedDecoder:
        """The model with its weights, for sequences of up to `longest` tokens. Raises what its files make it raise."""

    def cost(self, arithmetic: Arithmetic) -> ModelCost:
        """What its steps cost."""

    def weight_bytes(self, cost: ModelCost) -> int:
        """Bytes of its weights once they are loaded."""

    def computed_by(self, ops: Ops) -> tuple[str, str]:
        """For the report: whose operators compute it, and how its linear layers are computed."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model of one of our families: its spec, and where its weights come from."""

    spec: ModelSpec
    parameters: int  # values in all its tensors
    weights: Callable[[torch.dtype, torch.device], Weights]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """See Source."""
        return self.spec.eos_token_ids

    @property
    def vocab(self) -> int:
        """See Source."""
        return self.spec.vocab

    @property
    def caches(self) -> Caches:
        """See Source."""
        return self.spec.caches

    @property
    def can_be_captured(self) -> bool:
        """See Source."""
        return True

    @property
    def plain_attention(self) -> bool:
        """See Source."""
        found = (layer.attention for layer in self.spec.layers)
        return any(isinstance(attention, AttentionSpec) and attention.plain for attention in found)

    def choose_ops(self, arithmetic: Arithmetic) -> Ops:
        """See Source."""
        attention, chosen = self.spec.attention, arithmetic
        place = (chosen.device, chosen.dtype, attention.group, attention.head_dim)
        how = (chosen.quantization, chosen.deterministic, attention.kv_heads, chosen.tiles)
        caches = [cache for cache in self.spec.caches if cache is not None]
        codes = any(cache.dtype == "int8" for cache in caches)
        ops = choose_ops(*place, *how, attention.cache.latent, codes)
        for cache in caches:
            if not ops.holds(cache):
                raise Unavailable(
                    f"the KV cache is to keep {cache.dtype}, which {ops.name} operators do not; use engine.device: "
                    "cuda with Triton (docs/gpu.md), on a CPU int8 with a C compiler, or leave out "
                    "model.kv_cache_dtype"
                )
        return ops

    def load(self, ops: Ops, arithmetic: Arithmetic, longest: int) -> LoadedDecoder:
        """See Source."""
        weights = WatchedWeights(self.weights(arithmetic.dtype, arithmetic.device), self.spec)
        model = Decoder(self.spec, weights, ops, longest, arithmetic.device)
        warning = warning_of(weights.worst) if arithmetic.quantization == "int8" else None
        if warning is not None:
            _log.warning("%s", warning)
        return model

    def cost(self, arithmetic: Arithmetic) -> ModelCost:
        """See Source."""
        return model_cost(self.spec, arithmetic.dtype.itemsize, arithmetic.weight_itemsize)

    def weight_bytes(self, cost: ModelCost) -> int:
        """A tied head counts once, unless it is quantised beside its embedding."""
        coded = sum(linear.values for linear in self.spec.linears() if linear.coded)
        if coded or not cost.quantized:
            return coded + (self.parameters - coded) * cost.itemsize
        head = self.spec.head.values
        linear = sum(linear.values for linear in self.spec.linears() if not linear.exact)
        others = self.parameters - linear - (0 if self.spec.tied else head)
        return (linear + head) * cost.weight_itemsize + others * cost.itemsize

    def computed_by(self, ops: Ops) -> tuple[str, str]:
        """See Source."""
        return ops.name, ops.linear


def _describe_here(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ForeignSpec:
    """In this process, which has torch."""
    from batchinfer.models.foreign.probe import describe  # transformers is slow to import

    return describe(raw, generation)


def checkpoint_source(path: Path, kv_cache: KvCacheDtype = "auto", as_stored: bool = False) -> Source:
    """The model of a checkpoint folder, with such a cache; `as_stored`: with codes of fp8 where it stores them. Raises
    what inspecting a checkpoint raises."""
    checkpoint = open_checkpoint(path, _describe_here)
    checkpoint = checkpoint.as_stored() if as_stored else checkpoint
    if isinstance(checkpoint, Checkpoint):
        spec = checkpoint.spec.caching(kv_cache)
        return ModelSource(spec, checkpoint.parameters, partial(CheckpointWeights, checkpoint))
    from batchinfer.models.foreign.source import ForeignSource  # slow to import, and not for our families

    return ForeignSource(checkpoint)
