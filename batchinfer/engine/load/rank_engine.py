"""Builds the engine of a model that is sharded across ranks, or one rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from batchinfer.core.errors import CannotSplit
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.kv.cache_layout import CacheLayout, cache_layout, stage_layout
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.loop.alternating_engines import AlternatingEngines
from batchinfer.engine.loop.engine import Engine
from batchinfer.engine.ranks.following import Follower, RankAccount
from batchinfer.engine.ranks.leading import LeadingRunner
from batchinfer.engine.ranks.rank_groups import RankGroups
from batchinfer.engine.ranks.shards import rank_shard
from batchinfer.engine.ranks.staged_model import PipelineStageIO, StagedModel
from batchinfer.engine.ranks.token_transfer import TokenTransfer
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.schedule.sequence import StopStreams
from batchinfer.engine.schedule.step_plan import RankStep
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.parallel.group import SINGLE_RANK, Ranks
from batchinfer.models.sources import ModelSource, Source, checkpoint_source
from batchinfer_kernels.cost import ModelCost, Peaks

SendStep = Callable[[RankStep], None]
AnyEngine = Engine | AlternatingEngines


def open_source(config: LoadConfig, ranks: Ranks = SINGLE_RANK) -> Source:
    """Open a checkpoint, or the shard of it that a rank loads. Weights are not read yet.

    Args:
        config: The settings for loading.
        ranks: The ranks that shard the model, and the shard of this rank.
    """
    return checkpoint_source(
        config.model, config.kv_cache, config.quantization, config.adapters, config.adapter_slots, ranks
    )


def rank_source(whole: Source, config: LoadConfig, rank_groups: RankGroups) -> Source:
    """Return the shard of a checkpoint that this rank loads, or the whole checkpoint if the model is not sharded.

    Args:
        whole: The whole checkpoint.
        config: The settings for loading.
        rank_groups: The ranks of the engine.

    Raises:
        CannotSplit: The model cannot be sharded in this way.
    """
    if not rank_groups.is_sharded:
        return whole
    if not isinstance(whole, ModelSource):
        raise CannotSplit("a model that is run by transformers cannot be sharded across ranks")
    place = rank_shard(rank_groups.rank, rank_groups.division, whole.spec, config.experts)
    if rank_groups.division.experts > 1:
        return open_source(config, Ranks(experts=rank_groups.peers, exact=config.deterministic, shard=place))
    return open_source(config, Ranks(rank_groups.peers, rank_groups.peers, shard=place))


def first_layer(source: Source) -> int:
    """Return the index, in the whole model, of the first layer that this process runs.

    It is 0 without pipeline parallelism.

    Args:
        source: The checkpoint, or the shard of it that this rank loads.
    """
    layers = source.ranks.shard.layers if isinstance(source, ModelSource) else None
    return 0 if layers is None else layers[0]


def split_among_turns(limits: SchedulerConfig, stages: int) -> tuple[SchedulerConfig, int]:
    """Divide the rows of an engine among several engines that alternate, so that all pipeline stages are busy.

    Args:
        limits: The limits of all engines together.
        stages: The number of pipeline stages.

    Returns:
        The limits of each engine, and the number of engines: one per stage, at most max_num_seqs.
    """
    turns = min(stages, limits.max_num_seqs)
    return replace(limits, max_num_seqs=limits.max_num_seqs // turns), turns


def layout_for(source: Source, block_size: int, longest: int) -> CacheLayout:
    """Return the KV cache layout of the layers that this process runs.

    All pipeline stages use the same block tables.

    Args:
        source: The checkpoint, or the shard of it that this rank loads.
        block_size: The number of tokens per block.
        longest: The number of tokens of the longest sequence.
    """
    if isinstance(source, ModelSource) and source.whole is not None:
        layers, whole = source.ranks.shard.layers, source.whole.caches
        if layers is not None:
            return stage_layout(cache_layout(whole, block_size, longest), whole, layers)
    return cache_layout(source.spec.caches, block_size, longest)


def make_leading_engine(
    loaded: LoadedModel,
    rank_groups: RankGroups,
    cost: ModelCost,
    send_step: SendStep,
    peaks: Peaks | None = None,
    stop_streams: StopStreams | None = None,
) -> AnyEngine:
    """Create the engine of the leading rank.

    With several pipeline stages, the result consists of several engines that alternate on the stages.

    Args:
        loaded: The shard of this rank.
        rank_groups: The ranks of the engine.
        cost: Computes the FLOPs and memory traffic of a step of the whole model.
        send_step: Sends each step to the other ranks.
        peaks: The peak FLOP/s and bandwidth of the device. None: drafts are not used.
        stop_streams: Creates the function that searches an answer for stop strings. None: no row has stop strings.
    """
    engines = [
        loaded.engine(peaks, stop_streams, LeadingRunner(turn, runner, rank_groups, send_step, cost))
        for turn, runner in enumerate(loaded.runners)
    ]
    return AlternatingEngines(engines) if rank_groups.division.stages > 1 else engines[0]


def make_follower(loaded: LoadedModel, rank_groups: RankGroups, account: RankAccount) -> Follower:
    """Create the object that runs the leading rank's steps in this rank.

    Args:
        loaded: The shard of this rank.
        rank_groups: The ranks of the engine.
        account: Reports the time and memory of this rank.
    """
    transfers = [TokenTransfer(runner, rank_groups) for runner in loaded.runners]
    return Follower(transfers, rank_groups.has_head, account)


def make_account(
    source: Source, loaded: LoadedModel, rank_groups: RankGroups, before_bytes: int | None
) -> RankAccount:
    """Return an object that reports the time and memory of this rank from now on.

    Args:
        source: The shard of the checkpoint that this rank has loaded.
        loaded: The loaded shard with its KV cache.
        rank_groups: The ranks of the engine.
        before_bytes: The resident memory of the process before loading, or None if unknown.
    """
    # On a GPU, the host does not wait for other stages
    waits = rank_groups.division.stages > 1 and not loaded.runner.looks_ahead
    assert isinstance(source, ModelSource), "other models cannot be sharded"
    if rank_groups.sums is not None:
        rank_groups.sums.restart()
    return RankAccount(
        rank=rank_groups.rank,
        stage=rank_groups.division.stage(rank_groups.rank),
        weight_bytes=loaded.info.weight_bytes,
        kv_bytes=loaded.info.kv_bytes,
        read_bytes=source.read.bytes,
        before_bytes=before_bytes,
        wait=rank_groups.wait if waits else None,
        sums=rank_groups.sums,
        read_loads=loaded.expert_loads.read,
    )


def stage_runner(
    runner: ModelRunner, rank_groups: RankGroups, tokens: int, dtype: torch.dtype
) -> ModelRunner:
    """Return a copy of a runner that exchanges hidden states with the previous and the next pipeline stage.

    The runner itself is returned if there is only one stage.

    Args:
        runner: The runner of this rank's layers.
        rank_groups: The ranks of the engine.
        tokens: The maximum number of tokens of a step.
        dtype: The dtype of hidden states.
    """
    if rank_groups.division.stages == 1:
        return runner
    model = runner.model
    assert isinstance(model, Decoder), "other models cannot be sharded"
    previous, following = (rank_groups.division.neighbour(rank_groups.rank, step) for step in (-1, 1))
    # Zeros, because captured steps also read the states of padding tokens
    states = torch.zeros(
        0 if previous is None else tokens, model.spec.hidden, dtype=dtype, device=runner.device
    )
    stage_io = PipelineStageIO(rank_groups.everyone, previous, following, states, rank_groups.wait)
    return replace(runner, model=StagedModel(model, stage_io), stage_io=stage_io)
