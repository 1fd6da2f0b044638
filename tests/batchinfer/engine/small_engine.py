"""Engines on tiny checkpoints, with any operators, limits and runner."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Completion, Request
from batchinfer.core.samples import RequestSample, StepSample
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.kv.cache_layout import CacheGroup, CacheLayout, cache_layout
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.loop.multi_step import MultiStepDecoding
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampled import DeviceTokens, SamplingResult
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.batched_admission import AdmissionCosts
from batchinfer.engine.schedule.constraints import ConstraintMasks, Constraints
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.schedule.step_plan import PlanWants, SamplingPlan, StepPlan
from batchinfer.engine.tensors.adapter_slots import AdapterSlots
from batchinfer.engine.tensors.device_memory import allocate_caches
from batchinfer.engine.tensors.step_state import StepState
from batchinfer.models.adapters.stored_adapter import StoredAdapter
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.ops.attention import LayerCache
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.interface import Ops
from batchinfer.models.spec.model_cost import model_cost
from batchinfer_kernels.arithmetic import Quantization
from tests.batchinfer.engine.driver import Hopeful, Preempting
from tests.batchinfer.models.paged import load_decoder
from tests.checkpoints import kept_folder, make_checkpoint

MAX_LEN = 320
TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no triton")
# Options of a Qwen2 whose layers have two windows
MIXED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ("sliding_attention", "full_attention", "sliding_attention"),
}
Place = tuple[int, int]  # the number of a row, and a position in its answer


@dataclass(frozen=True)
class Limits:
    """The limits of a scheduler and its cache.

    Attributes:
        scarce: if True, the scheduler expects short answers, which leads to preemptions.
    """

    budget: int = 64
    seqs: int = 64
    caching: bool = True
    blocks: int = 200
    block_size: int = 8
    scarce: bool = False
    copying: bool = True

    def __str__(self) -> str:
        shared = "shared" if self.caching else "private"
        return f"budget{self.budget}-seqs{self.seqs}-{shared}-blocks{self.blocks}"


@dataclass
class Ran:
    """The answers and samples of a run."""

    completions: dict[bytes, Completion] = field(default_factory=dict)
    steps: list[StepSample] = field(default_factory=list)
    requests: dict[bytes, RequestSample] = field(default_factory=dict)

    @property
    def answers(self) -> dict[bytes, tuple[list[int], str]]:
        return {key: (c.tokens.token_ids.tolist(), c.finish_reason) for key, c in self.completions.items()}

    def tokens(self, row: int) -> list[int]:
        """Return the answer of a row by its number."""
        answer: list[int] = self.completions[key_of(row)].tokens.token_ids.tolist()
        return answer

    def total(self, name: str) -> Any:
        """Return the sum of a field over all steps."""
        return sum(getattr(step, name) for step in self.steps)

    @property
    def logprobs(self) -> dict[bytes, list[Any] | None]:
        """Return per row the log-probabilities of its tokens, of the top tokens, and the ids of the top
        tokens."""
        found: dict[bytes, list[Any] | None] = {}
        for key, completion in self.completions.items():
            some = completion.tokens.logprobs
            assert some is None or len(some) == len(completion.tokens.token_ids)
            arrays = [] if some is None else [some.chosen, some.top, some.top_ids]
            found[key] = [array.tolist() for array in arrays] or None
        return found


def key_of(row: int) -> bytes:
    """Return a key whose first half is unique, too, as draws depend on it."""
    return 2 * row.to_bytes(16, "big")


def number_of(key: bytes) -> int:
    return int.from_bytes(key[16:], "big")


def request(row: int, prompt: Sequence[int], most: int, **params: Any) -> Request:
    return Request(key_of(row), np.array(prompt, np.int32), SamplingParams(max_tokens=most, **params))


def greedy(prompts: Sequence[list[int]], most: int, **params: Any) -> list[Request]:
    return [request(row, prompt, most, **params) for row, prompt in enumerate(prompts)]


@cache
def folder(family: str, **options: Any) -> Path:
    made = kept_folder()
    lists: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }
    make_checkpoint(made, family, seed=5, **lists)
    return made


@cache
def checkpoint(family: str, **options: Any) -> Checkpoint:
    return inspect_checkpoint(folder(family, **options))


def quantized(model: Checkpoint, quantization: Quantization) -> Checkpoint:
    """Return the checkpoint with weights that are quantised when they are loaded."""
    return replace(model, spec=model.spec.quantized(quantization))


def cpu_ops(model: Checkpoint, codes: bool = False) -> Ops:
    attention, cpu = model.spec.attention, torch.device("cpu")
    sizes, latent = (attention.group, attention.head_dim), attention.cache.latent
    return choose_ops(cpu, torch.float32, *sizes, forms=model.spec.forms, latent=latent, codes=codes)


def poison(cache: LayerCache, blocks: Any = slice(None)) -> None:
    """Fill blocks with NaN, or integers with -128: unwritten slots may not be read."""
    for values in (cache.k, cache.v, *(cache.scales or ())):
        values[blocks].fill_(float("nan") if values.is_floating_point() else -128)


class PoisoningPool(BlockPool):
    """A block pool that poisons freed blocks."""

    def __init__(self, limits: Limits, groups: int, caches: Sequence[LayerCache]) -> None:
        super().__init__(limits.blocks, limits.block_size, groups)
        self._caches = caches

    def _free_block(self, block: int) -> None:
        super()._free_block(block)
        for layer in self._caches:
            poison(layer, block)


@dataclass(frozen=True)
class RecordingSampler(Sampler):
    """Records the logits of each chosen token.

    Args:
        answers: forced tokens per row.
    """

    answers: Sequence[Sequence[int]] | None = None
    seen: dict[Place, Tensor] = field(default_factory=dict)

    told: deque[Place] = field(default_factory=deque)  # of the rows to be sampled next

    def tries_argmax(self, plan: SamplingPlan) -> bool:
        return False

    def sample(
        self, ops: Ops, logits: Tensor, plan: SamplingPlan, device_tokens: DeviceTokens | None = None
    ) -> SamplingResult:
        places = [self.told.popleft() for _ in logits]
        self.seen.update(zip(places, logits.clone(), strict=True))
        if self.answers is None:
            return super().sample(ops, logits, plan, device_tokens)
        return SamplingResult(torch.tensor([self.answers[row][at] for row, at in places]))


def looking_ahead(runner: ModelRunner, kind: type[DeviceRunner] = DeviceRunner) -> DeviceRunner:
    """Return a runner with look-ahead, as on a GPU."""
    return kind(**{each.name: getattr(runner, each.name) for each in fields(ModelRunner)})


def sampled_answers(plan: StepPlan) -> list[tuple[bytes, int]]:
    """Return the key of each sampled row, and the length of its answer."""
    assert plan.requests is not None
    if plan.sampled is None:
        return plan.requests
    ends = np.cumsum(plan.chunk_lengths) - 1
    return [plan.requests[int(np.searchsorted(ends, row))] for row in plan.sampled.tolist()]


@dataclass
class NotedStep:
    tokens: list[tuple[bytes, int]]  # the key of the row and the position of each token
    sampled: list[bytes]
    unread: int  # steps that were launched before it and whose tokens were not read yet


@dataclass
class Noted:
    """Wraps a runner, records its steps, and names the sampled rows to a recording sampler."""

    runner: Any
    steps: list[NotedStep] = field(default_factory=list)
    read: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    @property
    def wants(self) -> PlanWants:
        wants: PlanWants = self.runner.wants
        return wants._replace(requests=True, repeats=False)

    def launch(self, plan: StepPlan) -> Any:
        assert plan.requests is not None
        each = list(zip(plan.requests, plan.starts.tolist(), plan.chunk_lengths.tolist(), strict=True))
        tokens = [(key, start + at) for (key, _), start, length in each for at in range(length)]
        answers = sampled_answers(plan)
        unread = len(self.steps) - self.read
        self.steps.append(NotedStep(tokens, [key for key, _ in answers], unread))
        sampler = getattr(self.runner, "sampler", None)
        if isinstance(sampler, RecordingSampler):
            sampler.told.extend((number_of(key), said) for key, said in answers)
        return _Reading(self.runner.launch(plan), self)


@dataclass
class _Reading:
    launched: Any
    noted: Noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.launched, name)

    def tokens(self) -> list[list[int]]:
        self.noted.read += 1
        tokens: list[list[int]] = self.launched.tokens()
        return tokens


@dataclass
class Watched:
    """Wraps a runner and calls `before` with each launched plan."""

    runner: Any
    before: Callable[[StepPlan], object]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, plan: StepPlan) -> Any:
        self.before(plan)
        return self.runner.launch(plan)


def spoil(runner: Any, bad: int, value: float = float("nan")) -> None:
    """Make the model return `value` as the hidden state after token `bad`."""
    forward = runner.model.forward

    def spoilt(token_ids: Tensor, *rest: Any) -> Any:
        hidden = forward(token_ids, *rest)
        hidden[token_ids == bad] = value
        return hidden

    runner.model.forward = spoilt


def following(runner: Any, constraints: Constraints, on_host: bool = False) -> tuple[Any, ConstraintMasks]:
    """Return the runner with rows that follow constraints, and the masks that an engine needs."""
    masks = ConstraintMasks(constraints)
    return replace(runner, sampler=replace(runner.sampler, mask=masks, on_host=on_host)), masks


def make_runner(
    model: Checkpoint,
    ops: Ops,
    limits: Limits,
    device: str = "cpu",
    adapters: Mapping[str, StoredAdapter] = MappingProxyType({}),
    places: int | None = None,
) -> ModelRunner:
    """Return a runner in float32 with a poisoned cache.

    Args:
        adapters: adapters by the name that requests use.
        places: number of adapters that fit on the device, or None for all.
    """
    decoder = load_decoder(model, ops, torch.float32, device, MAX_LEN, [*adapters.values()], places)
    layout = cache_layout(model.spec.caches, limits.block_size, MAX_LEN)
    caches = allocate_caches(ops, model.spec.caches, layout, limits.blocks, torch.float32, device)
    for layer in caches:
        poison(layer)
    sampler = Sampler(frozenset(model.spec.eos_token_ids), classifier=decoder.classifier)
    cost = model_cost(model.spec, 4)
    numbers = {"": 0} | {name: number for number, name in enumerate(adapters, 1)}
    state = StepState(adapters=AdapterSlots(numbers, decoder.adapter_slots, decoder.place_adapter))
    return ModelRunner(decoder, ops, caches, layout, sampler, cost, torch.device(device), state=state)


def make_engine(
    runner: Any,
    limits: Limits,
    eos: frozenset[int],
    long_rope_beyond: int | None = None,
    kind: type[Scheduler] | None = None,
    **more: Any,
) -> Engine:
    """Return an engine that poisons free blocks.

    Args:
        kind: class of its scheduler. By default, with scarce memory and windows, it preempts rows regularly,
            as windows free blocks as fast as rows grow.
    """
    least = 1 if limits.copying else None
    places = getattr(getattr(runner, "state", None), "adapters", AdapterSlots()).slots
    config = SchedulerConfig(
        limits.seqs, limits.budget, limits.caching, least_copied=least, most_adapters=places
    )
    windows = runner.layout.sizes.windows
    pool = PoisoningPool(limits, len(windows), getattr(runner, "caches", ()))
    kind = kind or (Preempting if limits.scarce and windows != (None,) else Scheduler)
    scheduler = kind(config, pool, Hopeful() if limits.scarce else None, windows)
    return Engine(runner, scheduler, EngineLimits(ContentRoots(MAX_LEN, long_rope_beyond), eos), **more)


class AlwaysRepeated(MultiStepDecoding):
    """Launches the maximum number of steps at once, and lets rows wait for drafts at any time."""

    @property
    def can_hold_rows(self) -> bool:
        return True

    def choose_steps(self, rows: int, cached: int) -> int:
        return self._most


def at_once(steps: int) -> MultiStepDecoding | None:
    """Return a policy that launches up to `steps` decode steps at once whenever it is allowed."""
    return AlwaysRepeated(AdmissionCosts(0.0, 0.0, 0.0), steps) if steps > 1 else None


def layer_each(windows: Sequence[int | None], block_size: int) -> CacheLayout:
    """Return a layout with a cache group per layer."""
    groups = [CacheGroup((i,), window, frozenset([window])) for i, window in enumerate(windows)]
    return CacheLayout(tuple(windows), tuple(groups), 1, block_size)


def watcher(_: SamplingParams) -> Callable[[int], int | None]:
    """Return a watcher that finds a stop string if the ids of an answer's tokens add up to a multiple of 7,
    from the second token."""
    seen: list[int] = []

    def watch(token: int) -> int | None:
        seen.append(token)
        return len(seen) if len(seen) > 1 and sum(seen) % 7 == 0 else None

    return watch


def drain(
    engine: Engine,
    requests: Sequence[Request],
    after_step: Callable[[], None] | None = None,
    arrivals: Sequence[int] = (),
) -> Ran:
    """Run requests and check the engine's integrity after every step.

    Args:
        arrivals: number of the step before which each request arrives, ascending; by default all arrive
            first.
    """
    ran, number = Ran(), 0
    waiting: deque[tuple[Any, int]] = deque(zip_longest(requests, arrivals, fillvalue=0))
    while waiting or engine.unfinished:
        while waiting and (waiting[0][1] <= number or not engine.unfinished):
            engine.add([waiting.popleft()[0]])
        output, number = engine.step(), number + 1
        engine.check_integrity()
        for completion in output.completions:
            assert completion.key not in ran.completions
            ran.completions[completion.key] = completion
        ran.steps += output.samples
        ran.requests |= {sample.key: sample for sample in output.requests}
        if after_step:
            after_step()
        assert number < 20_000, "the engine does not get ahead"
    assert engine.step().sample is None, "a step was left on the device"
    assert engine._scheduler.pool.used == 0
    return ran
