"""Steps of prompts with random values, to compare and time kernels for attention of prompts."""

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
# Maximum keys of a timed sequence, which bounds memory: the fastest kernel is also the fastest for more keys
MOST_KEYS = 32_768
# Divisors of the maximum row length: an eighth is typical, and a step then has several rows
PARTS = (1, 8)
# Numbers of sequences of 2 tokens: one, and more than FlashAttention-4's simplest lookup supports. Kernels for both are
# compiled before the job begins.
FEW, MANY = 1, 257
# The scale of random quantised values
CODE_SCALE: dict[CacheDtype, float] = {"int8": 1 / 32, "fp8": 1.0}
Clock = Callable[[], float]


@runtime_checkable
class PromptOps(Protocol):
    """Operators that can use another implementation for the attention of prompts."""

    @property
    def shape(self) -> AttentionShape:
        """Return the properties of the model's attention, such as its dtype and numbers of heads."""

    def with_prefill(self, prefill: AnyPrefill) -> Ops:
        """Return a copy of the operators that computes the attention of prompts with `prefill`."""


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """The size of a job's largest step of prompts.

    Attributes:
        tokens: The number of tokens of the step.
        longest: The maximum number of tokens of a sequence.
        block_size: The number of tokens in a block.
    """

    tokens: int
    longest: int
    block_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """A step of prompts with random values, on which implementations of attention are compared and timed.

    Attributes:
        inputs: Lengths and block tables of the sequences.
        q: (tokens, query heads, head size).
        block_size: The number of tokens in a block.
        sinks: (query heads,), attention sinks for layers that have them.
        caches: The KV caches that were created so far, by the dtype of quantised values; None for an unquantised cache.
    """

    inputs: AttentionInputs
    q: Tensor
    block_size: int
    sinks: Tensor
    caches: dict[CacheDtype | None, LayerCache] = field(default_factory=dict)

    @classmethod
    def timed(cls, ops: PromptOps, sizes: PromptSizes, part: int, device: torch.device) -> Trial:
        """Return a full step, for timing, of sequences whose length is min(sizes.longest, MOST_KEYS) / part.

        If one sequence has more tokens than the step, only its last tokens are queries.

        Args:
            ops: The operators of the model.
            sizes: The size of the job's largest step of prompts.
            part: The divisor of the maximum length.
            device: The device of the tensors.
        """
        context = max(2, min(sizes.longest, MOST_KEYS) // part)
        queries = max(2, min(context, sizes.tokens))
        count = max(1, sizes.tokens // queries)
        return cls._random(ops, [queries] * count, [context] * count, sizes.block_size, device)

    @classmethod
    def short(cls, ops: PromptOps, sizes: PromptSizes, count: int, device: torch.device) -> Trial:
        """Return a step of short sequences, for comparing results: `count` sequences of 2 tokens, or fewer.

        Args:
            ops: The operators of the model.
            sizes: The size of the job's largest step of prompts.
            count: The number of sequences.
            device: The device of the tensors.
        """
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
        """Return a KV cache with random values. It is created once per dtype of quantised values.

        After the end of each sequence, values or scales are NaN. In a job, a block may contain NaN of an earlier
        sequence, and the result must not depend on it.

        Args:
            ops: The operators that allocate the cache.
            codes: The dtype of quantised values. None: the cache is not quantised.
        """
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
        """Plan the step's attention, compute it in LAYERS layers, and return the result of the last layer.

        Args:
            ops: The operators to use.
            rules: The kind of attention of the layers.

        Returns:
            (tokens, query heads, head size).
        """
        cache = self.cache(ops, rules.codes)
        plan = ops.plan_attention(self.inputs, self.block_size, frozenset([rules.window]))
        sinks = self.sinks if rules.sinks else None
        scores = ScoreRules(self.q.shape[2] ** -0.5, rules.window, rules.soft_cap, sinks)
        for _ in range(LAYERS):
            result = ops.attention(self.q, cache, plan, scores)
        return result


def seconds_of(run: Callable[[], object], device: torch.device, clock: Clock = time.perf_counter) -> float:
    """Return the seconds that a call takes until the device has finished.

    Args:
        run: The function to call.
        device: The device on which it launches work.
        clock: Returns the time in seconds.
    """
    _synchronize(device)
    began = clock()
    run()
    _synchronize(device)
    return clock() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
