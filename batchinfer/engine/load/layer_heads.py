"""Loads a head with a layer of its own, and gives it a cache in the blocks of its model's."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.errors import OutOfMemory, Unavailable
from batchinfer.engine.drafts.model_beside import BesideRunner, spare_blocks
from batchinfer.engine.kv.cache_layout import CacheLayout, one_group
from batchinfer.engine.load.loaded_model import HeadedModel, LoadedHeads
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.runner.watched_model import HeadModel, WatchedModel, copying
from batchinfer.engine.tensors.adapter_places import AdapterPlaces
from batchinfer.engine.tensors.device_memory import allocate_caches, block_bytes, lack_of_memory
from batchinfer.engine.tensors.slot_states import SlotStates
from batchinfer.engine.tensors.step_state import StepState
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.heads.eagle import EagleWeights
from batchinfer.models.heads.layer_head import HeadWeights
from batchinfer.models.heads.mtp import MtpWeights
from batchinfer.models.heads.stored_eagle import StoredEagle
from batchinfer.models.heads.stored_heads import StoredLayer
from batchinfer.models.heads.stored_mtp import StoredMtp
from batchinfer.models.ops.choose import Arithmetic, choose_ops
from batchinfer.models.ops.interface import Ops


@dataclass(frozen=True, slots=True, eq=False)
class LoadedLayer(LoadedHeads):
    """A head with a layer of its own on the device of its model."""

    stored: StoredLayer
    ops: Ops
    weights: HeadWeights
    arithmetic: Arithmetic

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of its weights."""
        return self.stored.weight_bytes(self.arithmetic.dtype.itemsize)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes that each block takes for it: of its own K and V, and of the states that it reads."""
        itemsize, spec = self.arithmetic.dtype.itemsize, self.stored.spec
        own = block_bytes(self.ops, spec.caches, self._layout(block_size), itemsize)
        return own + block_size * spec.hidden * itemsize

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return the bytes that it keeps in no block of a row."""
        return spare_blocks(block_size, max_num_seqs) * self.block_bytes(block_size)

    def watching(self, own: ModelRunner, longest: int, max_num_seqs: int) -> ModelRunner:
        """Have the states of tokens kept, in as many blocks as the model's cache gets, and in spare ones."""
        decoder, group, size = own.model, own.layout.whole, own.layout.block_size
        if group is None or not isinstance(decoder, Decoder):
            raise Unavailable(
                "a head's cache lies in the blocks of a layer that sees all tokens, in a model of ours"
            )
        spare, width = spare_blocks(size, max_num_seqs), self.stored.spec.hidden
        kept = SlotStates(size, width, spare, self.arithmetic.dtype, self.arithmetic.device)
        head = self.weights.of(decoder, longest)
        watched = WatchedModel(decoder, head, self.stored.tapped, kept, group, copying(self.ops))
        return replace(own, model=watched)

    def of(self, model: HeadedModel) -> tuple[ModelRunner, BesideRunner]:
        """Allocate its cache, of as many blocks as there are states. Raises OutOfMemory."""
        own, watched = model.runner, model.runner.model
        assert isinstance(watched, WatchedModel), "its runner keeps states"
        kept, size, device = watched.kept, own.layout.block_size, self.arithmetic.device
        layout, spec, dtype = self._layout(size), self.stored.spec, self.arithmetic.dtype
        blocks = kept.blocks + kept.spare
        try:
            with lack_of_memory():
                caches = allocate_caches(self.ops, spec.caches, layout, blocks, dtype, device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"the cache of {blocks} blocks of the heads does not fit: {error}") from error
        proposing, eos = HeadModel(watched.head, kept), frozenset(model.spec.eos_token_ids)
        runner = (DeviceRunner if isinstance(own, DeviceRunner) else ModelRunner)(
            model=proposing,
            ops=self.ops,
            caches=caches,
            layout=layout,
            sampler=Sampler(eos, model.masks, device.type == "cpu"),
            cost=self.stored.cost(dtype.itemsize),
            device=device,
            state=StepState(adapters=AdapterPlaces(defaultdict(int))),  # it has no adapters
            kept=proposing,
        )
        beside = BesideRunner(
            runner=runner,
            roots=ContentRoots(model.longest),
            vocab=model.spec.vocab,
            blocks=kept.blocks,  # with the one of padding rows, where there is any
            max_num_seqs=model.limits.max_num_seqs,
            most_tokens=model.limits.max_num_batched_tokens,
            table=watched.group,
            whole_vocab=model.spec.vocab,
            eos_token_ids=eos,
            masks=model.masks,
            head=True,
            branches=own.follows_trees,
        )
        return own, beside

    def _layout(self, block_size: int) -> CacheLayout:
        return one_group(self.stored.spec.caches, block_size)


def load_layer(stored: StoredLayer, arithmetic: Arithmetic) -> LoadedLayer:
    """Load a head, in the dtype of its model."""
    attention = stored.spec.attention
    ops = choose_ops(
        arithmetic.device,
        arithmetic.dtype,
        attention.group,
        attention.head_dim,
        forms=stored.spec.forms,
        kv_heads=attention.kv_heads,
        latent=attention.cache.latent,
    )
    place = ops, arithmetic.dtype, arithmetic.device
    if isinstance(stored, StoredMtp):
        return LoadedLayer(stored, ops, MtpWeights.load(stored, *place), arithmetic)
    assert isinstance(stored, StoredEagle), "a head of a kind that was inspected"
    return LoadedLayer(stored, ops, EagleWeights.load(stored, *place), arithmetic)
