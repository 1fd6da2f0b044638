"""Builds an Engine that is ready to step. Its weights are loaded as a LoadConfig says; an EngineConfig, which may be
known later, says what is made of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from batchinfer.core.samples import ExpertTokens
from batchinfer.engine.config import (
    DEFAULT_BLOCK_SIZE,
    Agreed,
    EngineConfig,
    EngineInfo,
    LoadConfig,
    Untimed,
    alone,
)
from batchinfer.engine.load.cache_fit import fit_cache
from batchinfer.engine.load.cache_memory import CacheMemory
from batchinfer.engine.load.device_fit import Fitted
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.load.proposers import Proposers, load_proposers
from batchinfer.engine.load.ranked import (
    AnyEngine,
    Tell,
    account_of,
    first_layer,
    follower_of,
    in_turns,
    layout_for,
    leading_engine,
    part_of,
    source_of,
    staged,
)
from batchinfer.engine.load.settling import settled
from batchinfer.engine.loop.engine import EngineLimits
from batchinfer.engine.ranks.following import Follower, RankAccount
from batchinfer.engine.ranks.joining import Company, join
from batchinfer.engine.ranks.seat import Seat
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.budget import scheduler_config
from batchinfer.engine.schedule.constraints import ConstraintMasks, ConstraintsFor
from batchinfer.engine.schedule.sequence import StopStreams
from batchinfer.machine.memory import own_resident_memory
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.ops.contests import fastest_operators
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.prompts.trial import PromptSizes
from batchinfer.models.sources import Decoders, Source
from batchinfer_kernels.cost import ModelCost

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: AnyEngine
    info: EngineInfo
    read_loads: Callable[[], ExpertTokens]  # how many tokens experts were given so far; waits for the device
    account: RankAccount | None = None  # of this process; None: it is no rank


@dataclass(frozen=True, slots=True, eq=False)
class LoadedWeights:
    """A model's weights on their device, packed for its operators: all of an engine that needs no plan."""

    config: LoadConfig
    source: Source
    ops: Ops
    arithmetic: Arithmetic
    threads: int
    decoder: Decoders
    masks: ConstraintMasks | None
    untimed: Untimed
    cost: ModelCost  # of the whole model, of which this may be the part of one rank
    company: Company
    proposers: Proposers
    before_bytes: int | None = None  # in memory before anything was loaded; None: not known

    def engine(
        self,
        config: EngineConfig,
        stop_streams: StopStreams | None = None,
        agreed: Agreed = alone,
        tell: Tell | None = None,
    ) -> BuiltEngine:
        """Wire the rooms together; raises as `model` does. `tell` tells the other ranks of each step, where there are
        any."""
        loaded = self.model(config, agreed)
        if tell is None:
            return BuiltEngine(
                loaded.engine(config.peaks, stop_streams), loaded.info, loaded.expert_loads.read
            )
        engine = leading_engine(loaded, self.company, self.cost, tell, config.peaks, stop_streams)
        return BuiltEngine(engine, loaded.info, loaded.expert_loads.read, self._account(loaded))

    def follower(self, config: EngineConfig, agreed: Agreed) -> Follower:
        """Make what follows the leading rank, whose choices `agreed` returns; raises as `model` does."""
        loaded = self.model(config, agreed)
        return follower_of(loaded, self.company, self._account(loaded))

    def _account(self, loaded: LoadedModel) -> RankAccount:
        return account_of(self.source, loaded, self.company, self.before_bytes)

    def model(self, config: EngineConfig, agreed: Agreed = alone) -> LoadedModel:
        """Size the KV cache and warm up. A choice by time is made through `agreed`. Raises OutOfMemory when the job
        cannot fit."""
        source, device = self.source, self.arithmetic.device
        # no longer than what runs: a checkpoint may name billions of positions
        longest = max(1, min(config.longest, config.max_model_len))
        block_size, company = config.block_size or DEFAULT_BLOCK_SIZE, self.company
        captured = source.can_be_captured and self.cost.causal
        limits, turns = in_turns(scheduler_config(config, self.cost, captured), company.division.stages)
        sizes = PromptSizes(limits.max_num_batched_tokens, longest, block_size)
        ops = fastest_operators(self.ops, sizes, device, source.prompt_layers, agreed)
        model = self.decoder(ops, longest)
        eos = frozenset(source.spec.eos_token_ids)
        # Peers know what is asked of the head before the masks are looked at, and not behind that
        sampler = Sampler(
            eos, self.masks, device.type == "cpu" and company.division.tensor == 1, model.classifier
        )
        layout, cost = layout_for(source, block_size, longest), source.cost(self.arithmetic)
        runner = ModelRunner(model, ops, [], layout, sampler, cost, device, in_group=company.divided)
        runner.give_adapters(_numbers(config.load.adapters, source))
        runner = staged(runner, company, limits.max_num_batched_tokens, self.arithmetic.dtype)
        runner = self.proposers.watching(runner, longest, limits.max_num_seqs)
        dtype = self.arithmetic.dtype
        parts = company.everyone, turns, self.proposers.loaded
        memory = CacheMemory(config, source, runner, limits, dtype, longest, *parts)
        counters = model.expert_loads if captured else None
        fitted = fit_cache(runner, limits, self.cost, memory.room(), counters, config, self.untimed)
        loads = model.expert_loads.numbered_from(first_layer(source))
        loads.restart()  # what was measured and compiled with is nobody's work
        running, beside = self.proposers.of(source, fitted, longest, self.masks)
        return LoadedModel(
            runner=running,
            limits=fitted.limits,
            engine_limits=EngineLimits(source.spec.content_roots(longest), eos),
            info=replace(
                _info(self.config, source, fitted, memory.block_bytes, self.threads),
                division=company.division,
                max_num_seqs=turns * fitted.limits.max_num_seqs,
            ),
            expert_loads=loads,
            masks=self.masks,
            drafts=config.drafts,
            beside=beside,
            turns=turns,
        )


def load_weights(
    config: LoadConfig,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    source: Source | None = None,
    seat: Seat | None = None,
) -> LoadedWeights:
    """Load the weights. `source` takes the place of the checkpoint at `config.model`; work whose duration nobody knows,
    also in mid-job, is done inside of `untimed`. `seat`: that of this process among the ranks of an engine, which
    meet the others here; None: it has no others.

    Raises Unavailable without the device, and what loading a checkpoint raises.
    """
    before_bytes, (device, threads) = own_resident_memory(), settled(config)
    if device.type == "cuda":
        _announce_compilations(untimed)
    company = join(seat, device)
    whole = source or source_of(config)
    source = part_of(whole, config, company)
    arithmetic = _arithmetic(config, device)
    cost = whole.cost(arithmetic)
    ops = source.choose_ops(arithmetic)
    decoder = source.load(ops, arithmetic)
    eos = frozenset(source.spec.eos_token_ids)
    masks = None if constraints is None else ConstraintMasks(constraints(eos, source.spec.vocab))
    proposers = load_proposers(config, arithmetic, device, company)
    return LoadedWeights(
        config,
        source,
        ops,
        arithmetic,
        threads,
        decoder,
        masks,
        untimed,
        cost,
        company,
        proposers,
        before_bytes,
    )


def load_model(
    config: EngineConfig,
    source: Source | None = None,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    agreed: Agreed = alone,
) -> LoadedModel:
    """Load the weights and size the KV cache; see `load_weights` and `LoadedWeights.model`."""
    return load_weights(config.load, constraints, untimed, source).model(config, agreed)


def _arithmetic(config: LoadConfig, device: torch.device) -> Arithmetic:
    return Arithmetic(
        dtype=getattr(torch, config.dtype),
        device=device,
        deterministic=config.deterministic,
        tiles=config.tiles,
        kv_cache=config.kv_cache,
    )


def _numbers(adapters: Iterable[tuple[str, Path]], source: Source) -> dict[str, int]:
    """Number the adapters in the order in which they were loaded; 0: the weights as they are, into which one may be
    merged."""
    beside = {name: number for number, name in enumerate(source.adapters, 1)}
    return {"": 0} | {name: beside.get(name, 0) for name, _ in adapters}


def _info(config: LoadConfig, source: Source, fitted: Fitted, block_bytes: int, threads: int) -> EngineInfo:
    runner, limits = fitted.runner, fitted.limits
    whose, linear = source.computed_by(runner.ops)
    return EngineInfo(
        ops=whose,
        device=_device_name(runner.device),
        dtype=config.dtype,
        threads=threads,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        block_size=runner.layout.block_size,
        blocks=fitted.blocks,
        kv_bytes=fitted.blocks * block_bytes,
        weight_bytes=source.weight_bytes(runner.cost),
        quantization=config.quantization,
        deterministic=config.deterministic,
        linear=linear,
        gpu=_gpu(runner.device),
        capture_s=runner.capture_s,
        graph_bytes=runner.graph_bytes,
        free_bytes=fitted.free_bytes,
    )


def _announce_compilations(untimed: Untimed) -> None:
    """Let no watchdog take the compilation of a kernel for a hang: new sizes may come up in mid-job."""
    from batchinfer_kernels.gpu.compilations import announce_compilations

    announce_compilations(untimed)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _gpu(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
