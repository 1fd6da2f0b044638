"""Makes an engine, or a rank's part of one, of a model that several ranks have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from batchinfer.core.errors import CannotSplit
from batchinfer.engine.config import LoadConfig
from batchinfer.engine.kv.cache_layout import CacheLayout, cache_layout, stage_layout
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.loop.engine import Engine
from batchinfer.engine.loop.turns import EngineTurns
from batchinfer.engine.ranks.following import Follower, RankAccount
from batchinfer.engine.ranks.joining import Company
from batchinfer.engine.ranks.leading import LeadingRunner
from batchinfer.engine.ranks.parts import place_of
from batchinfer.engine.ranks.passing_on import PassedTokens
from batchinfer.engine.ranks.staged_model import StageBorders, StagedModel
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.schedule.sequence import StopStreams
from batchinfer.engine.schedule.step_plan import RankStep
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.parallel.group import SINGLE_RANK, Ranks
from batchinfer.models.sources import ModelSource, Source, checkpoint_source
from batchinfer_kernels.cost import ModelCost, Peaks

Tell = Callable[[RankStep], None]
AnyEngine = Engine | EngineTurns


def source_of(config: LoadConfig, ranks: Ranks = SINGLE_RANK) -> Source:
    """Open the checkpoint, or the part of it that a rank has."""
    return checkpoint_source(
        config.model, config.kv_cache, config.quantization, config.adapters, config.adapter_places, ranks
    )


def part_of(whole: Source, config: LoadConfig, company: Company) -> Source:
    """Return what this rank loads of a model. Raises CannotSplit."""
    if not company.divided:
        return whole
    if not isinstance(whole, ModelSource):
        raise CannotSplit("a model that transformers' code computes is not divided among ranks")
    place = place_of(company.rank, company.division, whole.spec, config.experts)
    if company.division.experts > 1:
        return source_of(config, Ranks(experts=company.peers, exact=config.deterministic, shard=place))
    return source_of(config, Ranks(company.peers, company.peers, shard=place))


def first_layer(source: Source) -> int:
    """Return the number in the whole model of the first layer that this process has."""
    layers = source.ranks.shard.layers if isinstance(source, ModelSource) else None
    return 0 if layers is None else layers[0]


def in_turns(limits: SchedulerConfig, stages: int) -> tuple[SchedulerConfig, int]:
    """Return the limits of each of the engines that take turns, so that there is one for each stage, and how many these
    are: no more than rows may run at once."""
    turns = min(stages, limits.max_num_seqs)
    return replace(limits, max_num_seqs=limits.max_num_seqs // turns), turns


def layout_for(source: Source, block_size: int, longest: int) -> CacheLayout:
    """Return the layout of the cache. Stages have the block tables of the whole model."""
    if isinstance(source, ModelSource) and source.whole is not None:
        layers, whole = source.ranks.shard.layers, source.whole.caches
        if layers is not None:
            return stage_layout(cache_layout(whole, block_size, longest), whole, layers)
    return cache_layout(source.spec.caches, block_size, longest)


def leading_engine(
    loaded: LoadedModel,
    company: Company,
    cost: ModelCost,
    tell: Tell,
    peaks: Peaks | None = None,
    stop_streams: StopStreams | None = None,
) -> AnyEngine:
    """Make the engine of the rank that leads; several that take turns where there are several stages. cost: of the
    whole model."""
    engines = [
        loaded.engine(peaks, stop_streams, LeadingRunner(turn, runner, company, tell, cost))
        for turn, runner in enumerate(loaded.runners)
    ]
    return EngineTurns(engines) if company.division.stages > 1 else engines[0]


def follower_of(loaded: LoadedModel, company: Company, account: RankAccount) -> Follower:
    """Make what follows the leading rank."""
    passed = [PassedTokens(runner, company) for runner in loaded.runners]
    return Follower(passed, company.has_head, account)


def account_of(
    source: Source, loaded: LoadedModel, company: Company, before_bytes: int | None
) -> RankAccount:
    """Return what this rank has; what its collectives took while it loaded and warmed up is forgotten. A host that
    launches steps on its device without waiting for them cannot tell how long that waits for others."""
    waits = company.division.stages > 1 and not loaded.runner.looks_ahead
    assert isinstance(source, ModelSource), "other models are not divided"
    if company.sums is not None:
        company.sums.restart()
    return RankAccount(
        rank=company.rank,
        stage=company.division.stage(company.rank),
        weight_bytes=loaded.info.weight_bytes,
        kv_bytes=loaded.info.kv_bytes,
        read_bytes=source.read.bytes,
        before_bytes=before_bytes,
        wait=company.wait if waits else None,
        sums=company.sums,
        read_loads=loaded.expert_loads.read,
    )


def staged(runner: ModelRunner, company: Company, tokens: int, dtype: torch.dtype) -> ModelRunner:
    """Return the runner of a model's layers; where these are one of several stages with what connects it to the others,
    in steps of up to `tokens` tokens."""
    if company.division.stages == 1:
        return runner
    model = runner.model
    assert isinstance(model, Decoder), "other models are not divided"
    before, behind = (company.division.neighbour(company.rank, step) for step in (-1, 1))
    # What captured padding tokens find there is a number
    states = torch.zeros(
        0 if before is None else tokens, model.spec.hidden, dtype=dtype, device=runner.device
    )
    borders = StageBorders(company.everyone, before, behind, states, company.wait)
    return replace(runner, model=StagedModel(model, borders), borders=borders)
