"""A model whose cache holds token ids: the next token depends on every one of them, and a wrong block shows at once."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from batchinfer.engine.cache_layout import one_group
from batchinfer.engine.decode_graphs import Capture, Captured, DecodeGraphs, GraphLimits
from batchinfer.engine.sampler import Sampler
from batchinfer.ops.interface import AttentionInputs, AttentionPlan, FixedPlan, LayerCache
from batchinfer.ops.torch_ops import TorchOps
from tests.model_costs import llama_cost

VOCAB, EOS = 12, 0
SHAPE = llama_cost(
    hidden=8,
    layers=1,
    q_heads=1,
    kv_heads=1,
    head_dim=8,
    intermediate=8,
    vocab=VOCAB,
    itemsize=4,
    weight_itemsize=4,
)


class Unpadded(AttentionPlan):
    padded_tokens = 0


class Contexts(FixedPlan):
    """What a graph would read: no length of a step but this tensor. A step whose longest context is odd cannot be
    replayed for an even one.
    """

    padded_tokens = 0

    def __init__(self, lengths: list[int]) -> None:
        self.contexts, self._odd = torch.tensor(lengths), max(lengths) % 2

    @property
    def sizes(self) -> int:
        return self._odd

    def refill(self, other: FixedPlan) -> None:
        assert isinstance(other, Contexts)
        assert other.sizes == self.sizes
        self.contexts.copy_(other.contexts)


class HashingOps(TorchOps):
    """Attends to nothing."""

    def plan_attention(self, inputs: AttentionInputs, *_: Any) -> AttentionPlan:
        return Unpadded()

    def plan_captured(self, inputs: AttentionInputs, *_: Any) -> FixedPlan:
        return Contexts(inputs.context_lens)


class HashingModel:
    """`forward` gives, for the last token of each sequence, a number made of all tokens of its context.

    `room`: tokens that there is memory for.
    """

    def __init__(self, nan_every: int = 0, room: int = 1 << 30) -> None:
        self.nan_every, self.room = nan_every, room

    def forward(
        self,
        token_ids: Tensor,
        groups: Seq[AttentionInputs],
        caches: Seq[LayerCache],
        plans: Seq[AttentionPlan],
    ) -> Tensor:
        (inputs,), (plan,) = groups, plans
        if len(token_ids) > self.room:
            raise torch.OutOfMemoryError(f"no memory for {len(token_ids)} tokens")
        contexts, queries_of = inputs.context_lens, inputs.query_lens
        if isinstance(plan, Contexts):
            contexts, queries_of = plan.contexts.tolist(), [1] * len(token_ids)
        tokens, positions = caches[0].k.view(-1), caches[0].v.view(-1)
        tokens[inputs.slots], positions[inputs.slots] = token_ids, inputs.positions
        hidden, end = torch.full((len(token_ids), 1), -1), 0
        for table, queries, context in zip(inputs.block_tables, queries_of, contexts, strict=True):
            end += queries
            at = torch.arange(context)
            slots = (
                table[at // caches[0].block_size].long() * caches[0].block_size + at % caches[0].block_size
            )
            assert torch.equal(positions[slots], at), "a block holds another sequence's tokens"
            hidden[end - 1] = ((tokens[slots] + 1) * (at * 40_503 % 1009 + 1)).sum() % 65_521
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        assert (hidden >= 0).all(), "a row was sampled in the middle of a chunk"
        logits = (hidden * (torch.arange(VOCAB) * 7919 + 13) % 1009).float() / 250
        if self.nan_every:
            logits[hidden[:, 0] % self.nan_every == 0] = float("nan")
        return logits

    def argmax(self, hidden: Tensor) -> Tensor:
        best, tokens = self.logits(hidden).max(-1)
        return torch.where(best.isfinite(), tokens, -1)


def hashing_runner(
    kind: Any, blocks: int, block_size: int, nan_every: int = 0, room: int = 1 << 30, **more: Any
) -> Any:
    """The cache has one block more, which belongs to nobody."""
    cache = [LayerCache(*(torch.full((blocks + 1, 1, block_size, 1), -1) for _ in "kv"), block_size)]
    model, device = HashingModel(nan_every, room), torch.device("cpu")
    sampler = Sampler(frozenset([EOS]))
    return kind(model, HashingOps(), cache, one_group([None], block_size), sampler, SHAPE, device, **more)


def captured_eagerly(run: Callable[[], Tensor]) -> Captured:
    """Stands in for a graph: what it reads is read when it is replayed, where it was when it was captured."""
    result = run().clone()

    def replay() -> None:
        result.copy_(run())

    return Captured(result, replay)


def with_graphs(
    runner: Any, rows: int, longest: int, blocks: int, capture: Capture = captured_eagerly
) -> Any:
    """The runner, decode steps replayed."""

    def forward(token_ids: Tensor, inputs: Seq[AttentionInputs], plans: Seq[AttentionPlan]) -> Tensor:
        return runner.model.forward(token_ids, inputs, runner.caches, plans)

    limits = GraphLimits(rows, longest, runner.layout.block_size, scratch_block=blocks)
    graphs = DecodeGraphs(forward, runner.ops, limits, runner.layout.groups, runner.device, capture)
    return replace(runner, graphs=graphs)
