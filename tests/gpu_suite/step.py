"""A step of attention over a random paged cache with needles, for cases of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from batchinfer_kernels.cost import Cost, attention_cost
from batchinfer_kernels.gpu.attention_plan import (
    AttentionShape,
    LaunchPlan,
    Room,
    SharedPrefix,
    plan_attention,
)
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.paged_attention import ScoreRules, paged_attention_reference
from tests.gpu_suite import needles
from tests.gpu_suite.case import DTYPE
from tests.gpu_suite.paged import Heads, Paged
from tests.suite.clock import Call
from tests.suite.section import BenchSection


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Chunks of `queries` tokens at the end of each sequence."""

    paged: Paged
    q: Tensor
    queries: int
    plan: LaunchPlan

    @classmethod
    def decode(
        cls,
        section: BenchSection,
        heads: Heads,
        contexts: Sequence[int],
        codes: str | None = None,
        shared: int = 0,
        deterministic: bool = False,
    ) -> AttentionStep:
        """Return a step of one query per sequence. The first `shared` keys are common to all."""
        paged = Paged.random(contexts, heads, DTYPE, section.device, codes, shared)
        q = paged.queries(len(contexts))
        prefixes = [SharedPrefix(range(len(contexts)), shared)] if shared else []
        plan = planned(paged, 1, prefixes, deterministic)
        needles.plant(paged, q, needles.for_decode(paged, plan))
        return cls(paged, q, 1, plan)

    @classmethod
    def prefill(
        cls,
        section: BenchSection,
        heads: Heads,
        count: int,
        queries: int,
        context: int,
        deterministic: bool = False,
    ) -> AttentionStep:
        paged = Paged.random([context] * count, heads, DTYPE, section.device)
        q = paged.queries(count * queries)
        needles.plant(paged, q, needles.for_prefill(paged, queries))
        return cls(paged, q, queries, planned(paged, queries, (), deterministic))

    def call(self, plan: LaunchPlan | None = None) -> Call:
        """Return a call of our kernels. `plan`: replaces the step's own plan."""
        paged = self.paged
        return partial(
            paged_attention,
            *(self.q, paged.k, paged.v, paged.table),
            self.plan if plan is None else plan,
            ScoreRules(paged.heads.scale),
            k_scale=paged.scale,
            v_scale=paged.scale,
            out=torch.empty_like(self.q),
        )

    def reference(self) -> Tensor:
        """Compute the expected result. Stores all scores: too large for long chunks."""
        paged = self.paged
        return paged_attention_reference(
            *(self.q, paged.k, paged.v, paged.table),
            [self.queries] * len(paged.contexts),
            list(paged.contexts),
            ScoreRules(paged.heads.scale),
            k_scale=paged.scale,
            v_scale=paged.scale,
        )

    def cost(self, shared: int = 0) -> Cost:
        """Return the cost. `shared` keys are read once for all sequences."""
        heads, contexts, queries = self.paged.heads, self.paged.contexts, self.queries
        pairs = sum(queries * (2 * context - queries + 1) // 2 for context in contexts)
        keys = sum(contexts) - shared * (len(contexts) - 1)
        sizes = (heads.q, heads.kv, heads.dim, self.q.element_size())
        return attention_cost(len(self.q), pairs, keys, *sizes, self.paged.scale is not None)


def planned(
    paged: Paged,
    queries: int,
    shared: Sequence[SharedPrefix] = (),
    deterministic: bool = False,
    room: Room | None = None,
) -> LaunchPlan:
    """Return a launch plan for chunks of one length in all sequences."""
    heads = paged.heads
    shape = AttentionShape(paged.dtype, heads.q, heads.kv, heads.dim, deterministic)
    lengths = [queries] * len(paged.contexts)
    return plan_attention(lengths, paged.contexts, shape, paged.k.device, shared, room)
