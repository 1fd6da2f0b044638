"""Loads a draft model next to an engine's target model. Its KV cache uses the same block numbers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from batchinfer.core.errors import CannotSplit, OutOfMemory, Unavailable
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.drafts.draft_model import DraftModelRunner, spare_blocks
from batchinfer.engine.kv.cache_layout import CacheLayout, one_group
from batchinfer.engine.ranks.rank_groups import RankGroups
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.tensors.adapter_slots import AdapterSlots
from batchinfer.engine.tensors.device_memory import allocate_caches, block_bytes, out_of_memory_errors
from batchinfer.engine.tensors.step_state import StepState
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.ops.interface import Ops
from batchinfer.models.sources import Decoders, ModelSource, checkpoint_source
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.cost import ModelCost

_UNSUPPORTED_TARGET = (
    "a draft model needs a target model that batchinfer runs without transformers, and that has a layer with full "
    "attention"
)


@dataclass(frozen=True, slots=True, eq=False)
class DraftModelWeights:
    """The loaded weights of a draft model, on the device of the target model.

    Attributes:
        source: The checkpoint.
        ops: The operators.
        arithmetic: The device, dtypes and determinism of the operators.
        decoder: Creates the model for a maximum sequence length.
    """

    source: ModelSource
    ops: Ops
    arithmetic: Arithmetic
    decoder: Decoders

    @property
    def cost(self) -> ModelCost:
        """The calculator of the FLOPs and memory traffic of the draft model's steps."""
        return self.source.cost(self.arithmetic)

    @property
    def weight_bytes(self) -> int:
        """The number of bytes of the draft model's weights."""
        return self.source.weight_bytes(self.cost)

    def block_bytes(self, block_size: int) -> int:
        """Return the number of bytes of the draft model's keys and values per block of `block_size` tokens."""
        itemsize = self.arithmetic.dtype.itemsize
        return block_bytes(self.ops, self.source.spec.caches, self._layout(block_size), itemsize)

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Return the number of bytes of the KV cache blocks that only the draft model has.

        Proposed tokens are written to them if the blocks of their sequence are full.

        Args:
            block_size: The number of tokens per block.
            max_num_seqs: Maximum number of running sequences.
        """
        return spare_blocks(block_size, max_num_seqs) * self.block_bytes(block_size)

    def runner(
        self,
        own: ModelRunner,
        spec: ModelSpec | ForeignSpec,
        limits: SchedulerConfig,
        blocks: int,
        longest: int,
        masks: ConstraintMasks | None,
    ) -> DraftModelRunner:
        """Allocate the draft model's KV cache and return an object that runs the draft model.

        Args:
            own: The runner of the target model.
            spec: The specification of the target model.
            limits: The maximum sizes of the target model's steps.
            blocks: The number of KV cache blocks of the target model.
            longest: The number of tokens of the longest sequence.
            masks: The token masks of constraints, used if both vocabularies have the same size. None: there are none.

        Raises:
            OutOfMemory: The draft model's cache does not fit.
            Unavailable: The target model has no layer with full attention, or is run by transformers.
        """
        size, whole, mine = own.layout.block_size, own.layout.full_group, self.source.spec
        if whole is None or isinstance(spec, ForeignSpec):
            raise Unavailable(_UNSUPPORTED_TARGET)
        positions = min(longest, mine.max_positions)
        layout, device = self._layout(size), self.arithmetic.device
        every = blocks + spare_blocks(size, limits.max_num_seqs)
        try:
            with out_of_memory_errors():
                caches = allocate_caches(self.ops, mine.caches, layout, every, self.arithmetic.dtype, device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the draft model's KV cache of {every} blocks does not fit: {error}"
            ) from error
        same = masks if mine.vocab == spec.vocab else None
        eos = frozenset(spec.eos_token_ids)
        runner = (DeviceRunner if device.type == "cuda" else ModelRunner)(
            model=self.decoder(self.ops, positions),
            ops=self.ops,
            caches=caches,
            layout=layout,
            sampler=Sampler(eos, same, device.type == "cpu"),
            cost=self.cost,
            device=device,
            state=StepState(adapters=AdapterSlots(defaultdict(int))),  # a draft model has no adapters
        )
        return DraftModelRunner(
            runner=runner,
            roots=mine.content_roots(positions),
            vocab=mine.vocab,
            blocks=blocks,
            max_num_seqs=limits.max_num_seqs,
            most_tokens=limits.max_num_batched_tokens,
            table=whole,
            target_vocab=spec.vocab,
            eos_token_ids=eos,
            masks=same,
        )

    def _layout(self, block_size: int) -> CacheLayout:
        return one_group(self.source.spec.caches, block_size)


def load_draft_model(
    config: LoadConfig, device: torch.device, rank_groups: RankGroups
) -> DraftModelWeights | None:
    """Load the weights of an engine's draft model, or return None if no draft model is configured.

    Args:
        config: The settings for loading.
        device: The device of the target model.
        rank_groups: The ranks of the engine.

    Raises:
        CannotSplit: The target model is sharded.
        Unavailable: The draft model would be run by transformers. Errors of loading a checkpoint are raised as well.
    """
    draft = config.draft_model
    if draft is None:
        return None
    if rank_groups.is_sharded:
        raise CannotSplit("a draft model is not supported with a model that is sharded across ranks")
    source = checkpoint_source(draft.model, draft.kv_cache, draft.quantization)
    if not isinstance(source, ModelSource):
        raise Unavailable("a model that is run by transformers is not supported as a draft model")
    # Not deterministic: drafts are verified, so the bits of the draft model do not change the answers
    arithmetic = Arithmetic(getattr(torch, draft.dtype), device, False, config.tiles, draft.kv_cache)
    ops = source.choose_ops(arithmetic)
    return DraftModelWeights(source, ops, arithmetic, source.load(ops, arithmetic))
