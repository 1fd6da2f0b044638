"""Decoders of parts of a checkpoint, and runs of all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.ops.interface import Ops
from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer.models.parallel.group import SINGLE_RANK, Ranks
from batchinfer.models.parallel.shard import ModelShard, Portion, Span
from batchinfer.models.parallel.shard_spec import shard_spec
from batchinfer.models.sources import ModelSource, checkpoint_source
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.arithmetic import Quantization
from tests.batchinfer.models.paged import run_paged
from tests.thread_ranks import ThreadGroup, groups_of, of_ranks

Prompts = list[list[int]]
LOADING = ("quantization", "dtype", "adapters")  # options of loading, not of the run


def load_part(
    checkpoint: Checkpoint,
    ops: Ops,
    place: ModelShard,
    ranks: Ranks = SINGLE_RANK,
    quantization: Quantization = "none",
    dtype: torch.dtype = torch.float32,
    adapters: Sequence[tuple[str, Path]] = (),
) -> Decoder:
    """Load the part of a rank like an engine."""
    ranks = replace(ranks, shard=place)
    source = checkpoint_source(checkpoint.path, "auto", quantization, adapters, ranks=ranks)
    assert isinstance(source, ModelSource)
    return source.load(ops, Arithmetic(dtype, torch.device("cpu")))(ops, 512)


@dataclass
class Stages:
    """The stages of a model in order, as one decoder."""

    spec: ModelSpec
    max_positions: int
    stages: Sequence[Decoder]

    def forward(
        self,
        token_ids: Tensor,
        inputs: Sequence[AttentionInputs],
        caches: Sequence[LayerCache],
        plans: Sequence[AttentionPlan],
    ) -> Tensor:
        before, rest = None, list(caches)
        for stage in self.stages:
            held = sum(layer.attention is not None for layer in stage.spec.layers)
            own, rest = rest[:held], rest[held:]
            before = stage.forward(token_ids, inputs, own, plans, before)
        assert before is not None
        assert not rest
        return before

    def logits(self, hidden: Tensor) -> Tensor:
        return self.stages[-1].logits(hidden)


def run_sharded(
    checkpoint: Checkpoint,
    ops: Callable[[ModelSpec], Ops],
    size: int,
    prompts: Prompts,
    *,
    experts: bool = False,
    tensor: bool = True,
    exact: bool = False,
    placement: ExpertPlacement | None = None,
    **how: Any,
) -> list[list[Tensor]]:
    """Return the logits of all prompts on each of `size` ranks.

    Args:
        experts: if True, experts are sharded.
        tensor: if True, heads and columns are sharded.
        placement: the experts of each rank, or None for equal ranges.
    """
    load = {key: how.pop(key) for key in LOADING if key in how}
    dtype = load.get("dtype", torch.float32)

    def work(group: ThreadGroup) -> list[Tensor]:
        share = Portion(group.rank, size)
        place = ModelShard(share if tensor else Portion(), share if experts else None, placement=placement)
        ranks = Ranks(group, group, exact) if tensor else Ranks(experts=group, exact=exact)
        own = ops(shard_spec(checkpoint.spec, place))
        decoder = load_part(checkpoint, own, place, ranks, **load)
        return run_paged(decoder, own, prompts, dtype=dtype, **how)

    return of_ranks(groups_of(size), work)


def run_stages(
    checkpoint: Checkpoint, ops: Ops, spans: Sequence[Span], prompts: Prompts, **how: Any
) -> list[Tensor]:
    """Return the logits of all prompts through stages with these layers."""
    load = {key: how.pop(key) for key in LOADING if key in how}
    stages = [load_part(checkpoint, ops, ModelShard(layers=span), **load) for span in spans]
    whole: Any = Stages(checkpoint.spec, 512, stages)
    return run_paged(whole, ops, prompts, dtype=load.get("dtype", torch.float32), **how)
