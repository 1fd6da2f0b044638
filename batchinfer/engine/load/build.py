"""Builds an Engine: weights are loaded by a LoadConfig, and the engine is sized by an EngineConfig.

The EngineConfig may be known later, so loading can overlap with planning.
"""

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
    choose_alone,
)
from batchinfer.engine.load.cache_fit import fit_cache
from batchinfer.engine.load.cache_memory import CacheMemory
from batchinfer.engine.load.device_fit import FittedRunner
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.load.process_setup import set_up_process
from batchinfer.engine.load.proposers import Proposers, load_proposers
from batchinfer.engine.load.rank_engine import (
    AnyEngine,
    SendStep,
    first_layer,
    layout_for,
    make_account,
    make_follower,
    make_leading_engine,
    open_source,
    rank_source,
    split_among_turns,
    stage_runner,
)
from batchinfer.engine.loop.engine import EngineLimits
from batchinfer.engine.ranks.division import RankConfig
from batchinfer.engine.ranks.following import Follower, RankAccount
from batchinfer.engine.ranks.rank_groups import RankGroups, join_ranks
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
    """An engine that is ready to run, and its description.

    Attributes:
        engine: The engine.
        info: The properties of the engine, such as the size of the KV cache.
        read_loads: Returns the number of tokens that were routed to each expert so far. It waits for the device.
        account: Reports the time and memory of this rank. None if the model is not sharded.
    """

    engine: AnyEngine
    info: EngineInfo
    read_loads: Callable[[], ExpertTokens]
    account: RankAccount | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoadedWeights:
    """The loaded weights of a model on their device, from which an engine is built when its settings are known.

    Loading can start before the job is planned.

    Attributes:
        config: The settings for loading.
        source: The checkpoint, or the shard of it that this rank loads.
        ops: The operators for which the weights are packed.
        arithmetic: The device, dtypes and determinism of the operators.
        threads: The number of CPU threads.
        decoder: Creates the model for a maximum sequence length.
        masks: The token masks of constraints. None if no row of the job can have a constraint.
        untimed: A context for work of unknown duration, during which the watchdog does not expect a message.
        cost: Computes the FLOPs and memory traffic of a step of the whole model, even if this process has a shard.
        rank_groups: The ranks of the engine.
        proposers: The draft model or the draft heads, if the job has any.
        before_bytes: The resident memory of the process before loading, or None if unknown.
    """

    config: LoadConfig
    source: Source
    ops: Ops
    arithmetic: Arithmetic
    threads: int
    decoder: Decoders
    masks: ConstraintMasks | None
    untimed: Untimed
    cost: ModelCost
    rank_groups: RankGroups
    proposers: Proposers
    before_bytes: int | None = None

    def engine(
        self,
        config: EngineConfig,
        stop_streams: StopStreams | None = None,
        agreed: Agreed = choose_alone,
        send_step: SendStep | None = None,
    ) -> BuiltEngine:
        """Size the KV cache, warm up and build the engine. If the model is sharded, call it only in the leading rank.

        Args:
            config: The settings of the engine.
            stop_streams: Creates the function that searches an answer for stop strings. None: no row has stop strings.
            agreed: Makes a choice in one engine of the run and returns it in all engines.
            send_step: Sends each step to the other ranks. None: the model is not sharded.

        Raises:
            OutOfMemory: The job does not fit into memory.
        """
        loaded = self.model(config, agreed)
        if send_step is None:
            return BuiltEngine(
                loaded.engine(config.peaks, stop_streams), loaded.info, loaded.expert_loads.read
            )
        engine = make_leading_engine(
            loaded, self.rank_groups, self.cost, send_step, config.peaks, stop_streams
        )
        return BuiltEngine(engine, loaded.info, loaded.expert_loads.read, self._account(loaded))

    def follower(self, config: EngineConfig, agreed: Agreed) -> Follower:
        """Size the KV cache, warm up and return an object that runs the leading rank's steps in this rank.

        Args:
            config: The settings of the engine.
            agreed: Returns the choices that the leading rank makes.

        Raises:
            OutOfMemory: The job does not fit into memory.
        """
        loaded = self.model(config, agreed)
        return make_follower(loaded, self.rank_groups, self._account(loaded))

    def _account(self, loaded: LoadedModel) -> RankAccount:
        return make_account(self.source, loaded, self.rank_groups, self.before_bytes)

    def model(self, config: EngineConfig, agreed: Agreed = choose_alone) -> LoadedModel:
        """Size and allocate the KV cache, warm up, and return the model, from which engines are created.

        Args:
            config: The settings of the engine.
            agreed: Makes a choice in one engine of the run and returns it in all engines. It is used to choose
                operators by measured time.

        Raises:
            OutOfMemory: The job does not fit into memory.
        """
        source, device = self.source, self.arithmetic.device
        # Not max_model_len: checkpoints may declare billions of positions
        longest = max(1, min(config.longest, config.max_model_len))
        block_size, rank_groups = config.block_size or DEFAULT_BLOCK_SIZE, self.rank_groups
        captured = source.can_be_captured and self.cost.causal
        limits, turns = split_among_turns(
            scheduler_config(config, self.cost, captured), rank_groups.division.stages
        )
        sizes = PromptSizes(limits.max_num_batched_tokens, longest, block_size)
        ops = fastest_operators(self.ops, sizes, device, source.prompt_layers, agreed)
        model = self.decoder(ops, longest)
        eos = frozenset(source.spec.eos_token_ids)
        # With tensor parallelism, all ranks must call the head in the same way, independent of masks (on_host=False)
        sampler = Sampler(
            eos, self.masks, device.type == "cpu" and rank_groups.division.tensor == 1, model.classifier
        )
        layout, cost = layout_for(source, block_size, longest), source.cost(self.arithmetic)
        runner = ModelRunner(model, ops, [], layout, sampler, cost, device, in_group=rank_groups.is_sharded)
        runner.give_adapters(_numbers(config.load.adapters, source))
        runner = stage_runner(runner, rank_groups, limits.max_num_batched_tokens, self.arithmetic.dtype)
        runner = self.proposers.tapped_runner(runner, longest, limits.max_num_seqs)
        dtype = self.arithmetic.dtype
        parts = rank_groups.everyone, turns, self.proposers.loaded
        memory = CacheMemory(config, source, runner, limits, dtype, longest, *parts)
        counters = model.expert_loads if captured else None
        fitted = fit_cache(runner, limits, self.cost, memory.room(), counters, config, self.untimed)
        loads = model.expert_loads.numbered_from(first_layer(source))
        loads.restart()  # do not count the tokens of the warm-up
        running, proposer = self.proposers.of(source, fitted, longest, self.masks)
        return LoadedModel(
            runner=running,
            limits=fitted.limits,
            engine_limits=EngineLimits(source.spec.content_roots(longest), eos),
            info=replace(
                _info(self.config, source, fitted, memory.block_bytes, self.threads),
                division=rank_groups.division,
                max_num_seqs=turns * fitted.limits.max_num_seqs,
            ),
            expert_loads=loads,
            masks=self.masks,
            drafts=config.drafts,
            proposer=proposer,
            turns=turns,
        )


def load_weights(
    config: LoadConfig,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    source: Source | None = None,
    rank_config: RankConfig | None = None,
) -> LoadedWeights:
    """Set up this process, load the weights, and connect to the other ranks of the engine if the model is sharded.

    Args:
        config: The settings for loading.
        constraints: Creates the constraints of the job from end-of-sequence tokens and vocabulary size. None: the job
            has no constraints.
        untimed: A context for work of unknown duration, such as compiling kernels, during which the watchdog does not
            expect a message.
        source: The checkpoint to load. None: the checkpoint at `config.model`.
        rank_config: The rank of this process. None: the model is not sharded.

    Raises:
        Unavailable: The device is missing. Errors of loading a checkpoint are raised as well.
    """
    before_bytes, (device, threads) = own_resident_memory(), set_up_process(config)
    if device.type == "cuda":
        _announce_compilations(untimed)
    rank_groups = join_ranks(rank_config, device)
    whole = source or open_source(config)
    source = rank_source(whole, config, rank_groups)
    arithmetic = _arithmetic(config, device)
    cost = whole.cost(arithmetic)
    ops = source.choose_ops(arithmetic)
    decoder = source.load(ops, arithmetic)
    eos = frozenset(source.spec.eos_token_ids)
    masks = None if constraints is None else ConstraintMasks(constraints(eos, source.spec.vocab))
    proposers = load_proposers(config, arithmetic, device, rank_groups)
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
        rank_groups,
        proposers,
        before_bytes,
    )


def load_model(
    config: EngineConfig,
    source: Source | None = None,
    constraints: ConstraintsFor | None = None,
    untimed: Untimed = nullcontext,
    agreed: Agreed = choose_alone,
) -> LoadedModel:
    """Load a model that is not sharded: load the weights, allocate the KV cache, and warm up.

    Args:
        config: The settings of the engine, which include the settings for loading.
        source: The checkpoint to load. None: the checkpoint at `config.load.model`.
        constraints: Creates the constraints of the job. None: the job has no constraints.
        untimed: A context for work of unknown duration, during which the watchdog does not expect a message.
        agreed: Makes a choice in one engine of the run and returns it in all engines.

    Raises:
        OutOfMemory: The job does not fit into memory.
        Unavailable: The device is missing. Errors of loading a checkpoint are raised as well.
    """
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
    # An adapter that `source` has merged into the model's weights has the number 0, as has "" (no adapter)
    separate = {name: number for number, name in enumerate(source.adapters, 1)}
    return {"": 0} | {name: separate.get(name, 0) for name, _ in adapters}


def _info(
    config: LoadConfig, source: Source, fitted: FittedRunner, block_bytes: int, threads: int
) -> EngineInfo:
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
    # New sizes may be compiled during the job
    from batchinfer_kernels.gpu.compilations import announce_compilations

    announce_compilations(untimed)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _gpu(device: torch.device) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else ""
