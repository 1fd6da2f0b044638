"""Loads draft heads with a transformer layer (EAGLE, MTP). Their KV cache uses the target model's block numbers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.errors import OutOfMemory, Unavailable
from batchinfer.engine.drafts.draft_model import DraftModelRunner, spare_blocks
from batchinfer.engine.kv.cache_layout import CacheLayout, one_group
from batchinfer.engine.load.loaded_model import HeadedModel, LoadedHeads
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.runner.tapped_model import HeadModel, TappedModel, choose_copy
from batchinfer.engine.tensors.adapter_slots import AdapterSlots
from batchinfer.engine.tensors.device_memory import allocate_caches, block_bytes, out_of_memory_errors
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
    """A loaded draft head with a transformer layer (EAGLE, MTP), on the device of the target model.

    Attributes:
        stored: The checkpoint of the head.
        ops: The operators.
        weights: The weights of the head.
        arithmetic: The device, dtypes and determinism of the operators.
    """

    stored: StoredLayer
    ops: Ops
    weights: HeadWeights
    arithmetic: Arithmetic

    @property
    def weight_bytes(self) -> int:
        """The number of bytes of the draft head's weights."""
        return self.stored.weight_bytes(self.arithmetic.dtype.itemsize)

    def block_bytes(self, block_size: int) -> int:
        """Return the number of bytes that the draft head needs per block of the target model's KV cache.

        Args:
            block_size: The number of tokens per block.
        """
        itemsize, spec = self.arithmetic.dtype.itemsize, self.stored.spec
        own = block_bytes(self.ops, spec.caches, self._layout(block_size), itemsize)
        return own + block_size * spec.hidden * itemsize

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return the number of bytes of the KV cache blocks that only the draft head has.

        Proposed tokens are written to them if the blocks of their sequence are full.

        Args:
            block_size: The number of tokens per block.
            max_num_seqs: Maximum number of running sequences.
        """
        return spare_blocks(block_size, max_num_seqs) * self.block_bytes(block_size)

    def tapped_runner(self, own: ModelRunner, longest: int, max_num_seqs: int) -> ModelRunner:
        """Return a copy of the target model's runner that also stores the hidden states that the draft head reads.

        Args:
            own: The runner of the target model.
            longest: The number of tokens of the longest sequence.
            max_num_seqs: Maximum number of running sequences.

        Raises:
            Unavailable: The target model has no layer with full attention, or is run by transformers.
        """
        decoder, group, size = own.model, own.layout.full_group, own.layout.block_size
        if group is None or not isinstance(decoder, Decoder):
            raise Unavailable(
                "draft heads need a model that batchinfer runs without transformers, and that has a layer with full "
                "attention"
            )
        spare, width = spare_blocks(size, max_num_seqs), self.stored.spec.hidden
        kept = SlotStates(size, width, spare, self.arithmetic.dtype, self.arithmetic.device)
        head = self.weights.of(decoder, longest)
        watched = TappedModel(decoder, head, self.stored.tapped, kept, group, choose_copy(self.ops))
        return replace(own, model=watched)

    def of(self, model: HeadedModel) -> tuple[ModelRunner, DraftModelRunner]:
        """Allocate the KV cache of the draft head, and return the runners that the engine uses.

        Args:
            model: The target model with its KV cache.

        Returns:
            (the runner of the target model, the runner of the draft head).

        Raises:
            OutOfMemory: The head's cache does not fit.
        """
        own, tapped = model.runner, model.runner.model
        assert isinstance(tapped, TappedModel), "`tapped_runner` returned the model's runner"
        kept, size, device = tapped.kept, own.layout.block_size, self.arithmetic.device
        layout, spec, dtype = self._layout(size), self.stored.spec, self.arithmetic.dtype
        blocks = kept.blocks + kept.spare
        try:
            with out_of_memory_errors():
                caches = allocate_caches(self.ops, spec.caches, layout, blocks, dtype, device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the draft heads' KV cache of {blocks} blocks does not fit: {error}"
            ) from error
        proposing, eos = HeadModel(tapped.head, kept), frozenset(model.spec.eos_token_ids)
        runner = (DeviceRunner if isinstance(own, DeviceRunner) else ModelRunner)(
            model=proposing,
            ops=self.ops,
            caches=caches,
            layout=layout,
            sampler=Sampler(eos, model.masks, device.type == "cpu"),
            cost=self.stored.cost(dtype.itemsize),
            device=device,
            state=StepState(adapters=AdapterSlots(defaultdict(int))),  # draft heads have no adapters
            kept=proposing,
        )
        proposer = DraftModelRunner(
            runner=runner,
            roots=ContentRoots(model.longest),
            vocab=model.spec.vocab,
            blocks=kept.blocks,  # including the block for padding rows, if there is one
            max_num_seqs=model.limits.max_num_seqs,
            most_tokens=model.limits.max_num_batched_tokens,
            table=tapped.group,
            target_vocab=model.spec.vocab,
            eos_token_ids=eos,
            masks=model.masks,
            head=True,
            branches=own.follows_trees,
        )
        return own, proposer

    def _layout(self, block_size: int) -> CacheLayout:
        return one_group(self.stored.spec.caches, block_size)


def load_layer(stored: StoredLayer, arithmetic: Arithmetic) -> LoadedLayer:
    """Load the weights of a draft head with a transformer layer.

    Args:
        stored: The checkpoint of the head.
        arithmetic: The dtype and device of the target model.
    """
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
    assert isinstance(stored, StoredEagle), "inspect_heads returns no other kind"
    return LoadedLayer(stored, ops, EagleWeights.load(stored, *place), arithmetic)
