"""Engines on tiny checkpoints: any operators, any limits, any runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from batchinfer.core.request import Completion, Request
from batchinfer.core.samples import RequestSample, StepSample
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.kv.cache_layout import CacheGroup, CacheLayout, cache_layout
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig, Step
from batchinfer.engine.schedule.sequence import SequenceStatus
from batchinfer.engine.tensors.cache_tensors import allocate_caches
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.interface import Ops
from batchinfer.models.spec.model_cost import model_cost
from batchinfer_kernels.arithmetic import Quantization
from tests.batchinfer.engine.driver import Hopeful
from tests.batchinfer.models.paged import load_decoder
from tests.checkpoints import kept_folder, make_checkpoint

MAX_LEN = 320


@dataclass(frozen=True)
class Limits:
    """How the work is cut. `scarce`: the scheduler hopes for short answers, so that rows are preempted."""

    budget: int = 64
    seqs: int = 64
    caching: bool = True
    blocks: int = 200
    block_size: int = 8
    scarce: bool = False
    copying: bool = True


@dataclass
class Ran:
    """What came of it."""

    completions: dict[bytes, Completion] = field(default_factory=dict)
    steps: list[StepSample] = field(default_factory=list)
    requests: dict[bytes, RequestSample] = field(default_factory=dict)

    @property
    def answers(self) -> dict[bytes, tuple[list[int], str]]:
        return {key: (c.token_ids.tolist(), c.finish_reason) for key, c in self.completions.items()}

    @property
    def logprobs(self) -> dict[bytes, list[Any] | None]:
        """Of each answer: own and likeliest ones, and which those are; every token of it has some."""
        found: dict[bytes, list[Any] | None] = {}
        for key, completion in self.completions.items():
            some = completion.logprobs
            assert some is None or len(some) == len(completion.token_ids)
            arrays = [] if some is None else [some.chosen, some.top, some.top_ids]
            found[key] = [array.tolist() for array in arrays] or None
        return found


def greedy(prompts: Sequence[list[int]], most: int, **more: Any) -> list[Request]:
    params = SamplingParams(max_tokens=most, **more)
    return [Request(i.to_bytes(32, "big"), np.array(p, np.int32), params) for i, p in enumerate(prompts)]


@cache
def folder(family: str, **options: Any) -> Path:
    made = kept_folder()
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    make_checkpoint(made, family, seed=5, **lists)
    return made


@cache
def checkpoint(family: str, **options: Any) -> Checkpoint:
    return inspect_checkpoint(folder(family, **options))


def cpu_ops(model: Checkpoint, quantization: Quantization = "none", codes: bool = False) -> Ops:
    attention, cpu = model.spec.attention, torch.device("cpu")
    sizes, latent = (attention.group, attention.head_dim), attention.cache.latent
    return choose_ops(cpu, torch.float32, *sizes, quantization=quantization, latent=latent, codes=codes)


def make_runner(model: Checkpoint, ops: Ops, limits: Limits, device: str = "cpu") -> ModelRunner:
    """In float32. What the cache never held is poisoned."""
    decoder = load_decoder(model, ops, torch.float32, device, MAX_LEN)
    layout = cache_layout(model.spec.caches, limits.block_size, MAX_LEN)
    caches = allocate_caches(ops, model.spec.caches, layout, limits.blocks, torch.float32, device)
    for layer in caches:  # of int8 no value is a NaN, and no code is -128
        poison = -128 if layer.k.dtype == torch.int8 else float("nan")
        layer.k.fill_(poison)
        layer.v.fill_(poison)
        for scale in layer.scales or ():
            scale.fill_(float("nan"))
    sampler = Sampler(frozenset(model.spec.eos_token_ids))
    cost = model_cost(model.spec, 4, 4)
    return ModelRunner(decoder, ops, caches, layout, sampler, cost, torch.device(device))


class Preempting(Scheduler):
    """Preempts the youngest sequence before each fourth step, if no step awaits its tokens."""

    _steps = 0

    def schedule(self) -> Step:
        self._steps += 1
        youngest = next(reversed(self.running), None)
        forced = youngest is not None and len(self.running) > 1 and self._steps % 4 == 0
        if (
            youngest is not None
            and forced
            and youngest.status is SequenceStatus.RUNNING
            and not youngest.placeholders
        ):
            del self.running[youngest]
            self._preempt(youngest)
        else:
            forced = False
        step = super().schedule()
        step.preemptions += forced
        return step


def make_engine(runner: Any, limits: Limits, eos: frozenset[int], **more: Any) -> Engine:
    least = 1 if limits.copying else None
    config = SchedulerConfig(limits.seqs, limits.budget, limits.caching, least_copied=least)
    windows = runner.layout.sizes.windows
    pool = BlockPool(limits.blocks, limits.block_size, len(windows))
    # windows give blocks back as fast as rows grow, so that few memories are so scarce that a row is preempted
    kind = Preempting if limits.scarce and windows != (None,) else Scheduler
    scheduler = kind(config, pool, Hopeful() if limits.scarce else None, windows)
    return Engine(runner, scheduler, EngineLimits(MAX_LEN, eos), **more)


def layer_each(windows: Sequence[int | None], block_size: int) -> CacheLayout:
    """A cache group for each of these layers."""
    groups = [CacheGroup((i,), window, frozenset([window])) for i, window in enumerate(windows)]
    return CacheLayout(tuple(windows), tuple(groups), 1, block_size)


def watcher(_: SamplingParams) -> Callable[[int], int | None]:
    """The stop string is there once an answer's ids sum up to a multiple of 7, from the second on."""
    seen: list[int] = []

    def watch(token: int) -> int | None:
        seen.append(token)
        return len(seen) if len(seen) > 1 and sum(seen) % 7 == 0 else None

    return watch


def drain(engine: Engine, requests: Sequence[Request], after_step: Callable[[], None] | None = None) -> Ran:
    """Integrity is checked after every step."""
    engine.add(requests)
    ran = Ran()
    for output in engine.drain():
        engine.check_integrity()
        for completion in output.completions:
            assert completion.key not in ran.completions
            ran.completions[completion.key] = completion
        ran.steps += [output.sample] if output.sample else []
        ran.requests |= {sample.key: sample for sample in output.requests}
        if after_step:
            after_step()
    return ran
