"""Steps of prompts with random values, on which the kernels that read prompts are compared and timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.prompts.prefill import AnyPrefill
from batchinfer.models.spec.spec import AttentionRules, CacheSpec
from batchinfer_kernels.arithmetic import CacheDtype
from batchinfer_kernels.paged_attention import ScoreRules
from batchinfer_kernels.step_tables import StepTables

if TYPE_CHECKING:
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

# A step's attention is planned once and run in this many layers
LAYERS = 4
# Keys of a sequence on which they are timed: what is faster there is so for more. Their memory is bounded by it.
MOST_KEYS = 32_768
# The longest rows, and rows of an eighth, which most are more like: a step then has several
PARTS = (1, 8)
# Sequences of the shortest chunks, of 2 tokens: one, and more than FlashAttention-4 looks up by its simplest means.
# What either is compiled for is compiled before the job begins.
FEW, MANY = 1, 257
# Of random codes: what a code of 1 is worth
CODE_SCALE: dict[CacheDtype, float] = {"int8": 1 / 32, "fp8": 1.0}
Clock = Callable[[], float]


@runtime_checkable
class PromptOps(Protocol):
    """Operators whose attention of prompts can be replaced."""

    @property
    def shape(self) -> AttentionShape:
        """The sizes of attention in the model that they are made for."""

    def with_prefill(self, prefill: AnyPrefill) -> Ops:
        """Return a copy of the operators that computes the attention of prompts with `prefill`."""


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """A job's largest step of prompts."""

    tokens: int
    longest: int  # tokens of a sequence
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A step of prompts with random values."""

    inputs: AttentionInputs
    q: Tensor
    block_size: int
    sinks: Tensor  # of layers that have some
    # The elements that were read, by their codes
    caches: dict[CacheDtype | None, LayerCache] = field(default_factory=dict)

    @classmethod
    def timed(cls, ops: PromptOps, sizes: PromptSizes, part: int, device: torch.device) -> Trial:
        """Make a trial of as many sequences of a `part` of the longest as a step takes, or of the end of one, if none
        fits whole."""
        context = max(2, min(sizes.longest, MOST_KEYS) // part)
        queries = max(2, min(context, sizes.tokens))
        count = max(1, sizes.tokens // queries)
        return cls._random(ops, [queries] * count, [context] * count, sizes.block_size, device)

    @classmethod
    def short(cls, ops: PromptOps, sizes: PromptSizes, count: int, device: torch.device) -> Trial:
        """Make a trial of so many sequences of 2 tokens, or of as many as a step takes."""
        count = max(1, min(count, sizes.tokens // 2))
        return cls._random(ops, [2] * count, [2] * count, sizes.block_size, device)

    @classmethod
    def _random(
        cls, ops: PromptOps, lens: list[int], contexts: list[int], block: int, device: torch.device
    ) -> Trial:
        shape, count, width = ops.shape, len(lens), -(-contexts[0] // block)
        tables = torch.arange(count * width, dtype=torch.int32).reshape(count, width)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        step_tables = StepTables.of(tables.numpy())
        inputs = AttentionInputs(nothing, nothing, tables.to(device), lens, contexts, step_tables)
        q = torch.randn(sum(lens), shape.q_heads, shape.head_dim, dtype=shape.dtype, device=device)
        return cls(inputs, q, block, torch.randn(shape.q_heads, device=device))

    def cache(self, ops: Ops, codes: CacheDtype | None) -> LayerCache:
        """Return a cache of values, or of codes. Behind the end of each sequence it holds NaN, or scales that are NaN:
        in a job, a block may hold such values of an earlier owner, and they must not reach the result."""
        if codes not in self.caches:
            self.caches[codes] = self._fill_cache(ops, codes)
        return self.caches[codes]

    def _fill_cache(self, ops: Ops, codes: CacheDtype | None) -> LayerCache:
        assert isinstance(ops, PromptOps)
        shape, (count, width) = ops.shape, self.inputs.block_tables.shape
        kept = CacheSpec(shape.kv_heads, shape.head_dim, dtype=codes)
        made = ops.allocate_cache(kept, count * width, self.block_size, shape.dtype, self.q.device)
        for values in (made.k, made.v):
            if codes is None:
                values.normal_()
            else:
                values.copy_(torch.randn(values.shape, device=values.device).clamp(-3, 3) / CODE_SCALE[codes])
        for scales in made.scales or ():
            scales.uniform_(0.5, 1.5).mul_(CODE_SCALE[codes or "int8"])
        end = (self.inputs.context_lens[0] - 1) % self.block_size + 1
        for values in made.scales or (made.k, made.v):
            values[width - 1 :: width, :, end:] = torch.nan
        return made

    def run(self, ops: Ops, rules: AttentionRules) -> Tensor:
        """All that a step takes of its attention: a plan, and some layers; the result of the last."""
        cache = self.cache(ops, rules.codes)
        plan = ops.plan_attention(self.inputs, self.block_size, frozenset([rules.window]))
        sinks = self.sinks if rules.sinks else None
        scores = ScoreRules(self.q.shape[2] ** -0.5, rules.window, rules.soft_cap, sinks)
        for _ in range(LAYERS):
            result = ops.attention(self.q, cache, plan, scores)
        return result


def seconds_of(run: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Return how long it takes, until the device is done."""
    _synchronize(device)
    began = clock()
    run()
    _synchronize(device)
    return clock() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
