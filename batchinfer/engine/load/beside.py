"""Loads a draft model beside an engine's own, and gives it a cache in the same blocks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from batchinfer.core.errors import CannotSplit, OutOfMemory, Unavailable
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.drafts.model_beside import BesideRunner, spare_blocks
from batchinfer.engine.kv.cache_layout import CacheLayout, one_group
from batchinfer.engine.ranks.joining import Company
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.tensors.adapter_places import AdapterPlaces
from batchinfer.engine.tensors.device_memory import allocate_caches, block_bytes, lack_of_memory
from batchinfer.engine.tensors.step_state import StepState
from batchinfer.models.foreign.spec import ForeignSpec
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.ops.interface import Ops
from batchinfer.models.sources import Decoders, ModelSource, checkpoint_source
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.cost import ModelCost


@dataclass(frozen=True, slots=True, eq=False)
class WeightsBeside:
    """A draft model's weights on the device of the engine's own model."""

    source: ModelSource
    ops: Ops
    arithmetic: Arithmetic
    decoder: Decoders

    @property
    def cost(self) -> ModelCost:
        return self.source.cost(self.arithmetic)

    @property
    def weight_bytes(self) -> int:
        return self.source.weight_bytes(self.cost)

    def block_bytes(self, block_size: int) -> int:
        """Count the bytes that each block takes for it."""
        itemsize = self.arithmetic.dtype.itemsize
        return block_bytes(self.ops, self.source.spec.caches, self._layout(block_size), itemsize)

    def spare_bytes(self, block_size: int, max_num_seqs: int) -> int:
        """Count the bytes of its cache that lie in no block of a row."""
        return spare_blocks(block_size, max_num_seqs) * self.block_bytes(block_size)

    def runner(
        self,
        own: ModelRunner,
        spec: ModelSpec | ForeignSpec,
        limits: SchedulerConfig,
        blocks: int,
        longest: int,
        masks: ConstraintMasks | None,
    ) -> BesideRunner:
        """Allocate its cache, of as many blocks as that of the engine's `own` model has, whose spec this is, and of
        spare ones. Raises OutOfMemory, and Unavailable for a model whose blocks cannot be shared."""
        size, mine = own.layout.block_size, self.source.spec
        whole = own.layout.whole
        if whole is None or isinstance(spec, ForeignSpec):
            raise Unavailable(
                "a draft model's cache lies in the blocks of a layer that sees all tokens, in a model of ours"
            )
        positions = min(longest, mine.max_positions)
        layout, device = self._layout(size), self.arithmetic.device
        every = blocks + spare_blocks(size, limits.max_num_seqs)
        try:
            with lack_of_memory():
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
            state=StepState(adapters=AdapterPlaces(defaultdict(int))),  # it has no adapters
        )
        return BesideRunner(
            runner=runner,
            roots=mine.content_roots(positions),
            vocab=mine.vocab,
            blocks=blocks,
            max_num_seqs=limits.max_num_seqs,
            most_tokens=limits.max_num_batched_tokens,
            table=whole,
            whole_vocab=spec.vocab,
            eos_token_ids=eos,
            masks=same,
        )

    def _layout(self, block_size: int) -> CacheLayout:
        return one_group(self.source.spec.caches, block_size)


def load_beside(config: LoadConfig, device: torch.device, company: Company) -> WeightsBeside | None:
    """Load the draft model that a configuration names; None: it names none. Raises what loading a checkpoint raises,
    and CannotSplit for an engine of several ranks."""
    beside = config.beside
    if beside is None:
        return None
    if company.divided:
        raise CannotSplit("a model that is divided among ranks has no draft model beside it")
    source = checkpoint_source(beside.model, beside.kv_cache, beside.quantization)
    if not isinstance(source, ModelSource):
        raise Unavailable("a draft model that transformers' code computes cannot run beside another one")
    # What it proposes is verified, so that its own bits do not count
    arithmetic = Arithmetic(getattr(torch, beside.dtype), device, False, config.tiles, beside.kv_cache)
    ops = source.choose_ops(arithmetic)
    return WeightsBeside(source, ops, arithmetic, source.load(ops, arithmetic))
