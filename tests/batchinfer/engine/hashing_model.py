"""A model whose cache stores token ids: the next token depends on all of them, which reveals a wrong block."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from batchinfer.engine.graphs.decode_graphs import DecodeGraphs
from batchinfer.engine.graphs.graph_capture import Capture, CapturedFunction
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.tensors.device_tables import GraphTables
from batchinfer.engine.tensors.graph_inputs import GraphSize
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, FixedPlan, LayerCache
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer_kernels.copy_parts import copy_parts_reference
from batchinfer_kernels.draft_tree import TreeMask
from tests.batchinfer.engine.small_engine import layer_each
from tests.model_costs import llama_cost

VOCAB, EOS = 12, 0
SAMPLED = 32  # rows of a chunk that are sampled at most: behind its drafts, and before the first of them
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
    """A plan that reads context lengths from a tensor only, as a graph does.

    It does not fit if the longest context, in units of eight, changes between odd and even.
    """

    padded_tokens = 0

    def __init__(self, queries: list[int], lengths: list[int]) -> None:
        self.queries, self._contexts, self._odd = (
            torch.tensor(queries),
            torch.tensor(lengths, dtype=torch.int32),
            max(lengths) // 8 % 2,
        )

    @property
    def sizes(self) -> int:
        return self._odd

    @property
    def contexts(self) -> Tensor:
        return self._contexts

    def serves(self, context_lens: Seq[int]) -> bool:
        return Contexts(self.queries.tolist(), list(context_lens)).sizes == self.sizes

    def refill(self, other: FixedPlan) -> None:
        assert isinstance(other, Contexts)
        assert other.sizes == self.sizes
        self.contexts.copy_(other.contexts)
        self.queries.copy_(other.queries)


class HashingOps(TorchOps):
    """Operators without attention: the cache stores tokens."""

    def plan_attention(self, inputs: AttentionInputs, *_: Any) -> AttentionPlan:
        return Unpadded()

    def plan_captured(self, inputs: AttentionInputs, *_: Any, **__: Any) -> FixedPlan:
        return Contexts(inputs.query_lens, inputs.context_lens)


def _attended(inputs: AttentionInputs, cache: LayerCache, plan: AttentionPlan, window: int | None) -> Tensor:
    """Return [T, 1]: for each sequence's last tokens a hash of the visible tokens, otherwise -1."""
    contexts, queries_of = inputs.context_lens, inputs.query_lens
    if isinstance(plan, Contexts):
        contexts, queries_of = plan.contexts.tolist(), plan.queries.tolist()
    hidden, end = torch.full((len(inputs.positions), 1), -1 << 40), 0
    if inputs.tree is not None:
        return _attended_trees(inputs, inputs.tree, cache)
    for table, queries, context in zip(inputs.block_tables, queries_of, contexts, strict=True):
        end += queries
        at = torch.arange(0 if window is None else max(0, context - queries - window + 1), context)
        slots = table[at // cache.block_size].long() * cache.block_size + at % cache.block_size
        assert torch.equal(cache.v.view(-1)[slots], at), "a block holds another sequence's tokens"
        values = (cache.k.view(-1)[slots] + 1) * (at * 40_503 % 1009 + 1)
        for before in range(min(queries, SAMPLED)):
            seen = values[: len(values) - before]
            hidden[end - 1 - before] = (seen if window is None else seen[-window:]).sum() % 65_521
    return hidden


def _attended_trees(inputs: AttentionInputs, tree: TreeMask, cache: LayerCache) -> Tensor:
    """Attend like `_attended` for rows whose last tokens are nodes of a draft tree."""
    hidden, end = torch.full((len(inputs.positions), 1), -1 << 40), 0
    for table, queries, context in zip(
        inputs.block_tables, inputs.query_lens, inputs.context_lens, strict=True
    ):
        end += queries
        at = torch.arange(context)
        slots = table[at // cache.block_size].long() * cache.block_size + at % cache.block_size
        for row in range(max(end - queries, end - SAMPLED), end):
            seen = slots[torch.from_numpy(tree.seen(row, row + 1, context)[0])]
            places = torch.arange(len(seen))
            assert torch.equal(cache.v.view(-1)[seen], places), "a key is not where its path has it"
            values = (cache.k.view(-1)[seen] + 1) * (places * 40_503 % 1009 + 1)
            hidden[row] = values.sum() % 65_521
    return hidden


def state_of(tokens: Seq[int]) -> int:
    """Return the state of the hashing model after these tokens, for one layer without a window."""
    return sum((token + 1) * (at * 40_503 % 1009 + 1) for at, token in enumerate(tokens)) % 65_521


class HashingModel:
    """A model whose state of a sequence is a hash of all tokens within each layer's window.

    Args:
        room: maximum number of tokens per step before it runs out of memory.
        windows: window of each layer; each layer is a cache group.
    """

    def __init__(
        self, nan_every: int = 0, room: int = 1 << 30, windows: tuple[int | None, ...] = (None,)
    ) -> None:
        self.nan_every, self.room, self.windows = nan_every, room, windows

    def forward(
        self,
        token_ids: Tensor,
        groups: Seq[AttentionInputs],
        caches: Seq[LayerCache],
        plans: Seq[AttentionPlan],
    ) -> Tensor:
        if len(token_ids) > self.room:
            raise torch.OutOfMemoryError(f"no memory for {len(token_ids)} tokens")
        layers = list(zip(groups, caches, plans, self.windows, strict=True))
        for inputs, cache, _, _ in layers:
            cache.k.view(-1)[inputs.slots], cache.v.view(-1)[inputs.slots] = token_ids, inputs.positions
            if inputs.parts is not None:
                copy_parts_reference(cache.k, cache.v, inputs.parts)
        hidden = torch.stack([_attended(*layer) for layer in layers]).sum(0)
        return torch.where(hidden < 0, -1, hidden % 65_521)

    def states(self, hidden: Tensor) -> Tensor:
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
    kind: Any,
    blocks: int,
    block_size: int,
    nan_every: int = 0,
    room: int = 1 << 30,
    windows: tuple[int | None, ...] = (None,),
    **more: Any,
) -> Any:
    """Return a runner of a hashing model. Its cache has one more block, the padding slot of graphs."""
    k, v = (torch.full((blocks + 1, 1, block_size, 1), -1) for _ in "kv")
    cache = [LayerCache(k, v, block_size, group) for group in range(len(windows))]
    model, device = HashingModel(nan_every, room, windows), torch.device("cpu")
    sampler = Sampler(frozenset([EOS]))
    layout = layer_each(windows, block_size)
    return kind(model, HashingOps(), cache, layout, sampler, SHAPE, device, **more)


def captured_eagerly(run: Callable[[], Tensor]) -> CapturedFunction:
    """Return a stand-in for a CUDA graph, which runs the function again at each replay."""
    result = run().clone()

    def replay() -> None:
        result.copy_(run())

    return CapturedFunction(result, replay)


def with_graphs(
    runner: Any,
    rows: int,
    longest: int,
    blocks: int,
    capture: Capture = captured_eagerly,
    drafts: bool = False,
) -> Any:
    """Return the runner with graphs for its decode steps, and for steps that verify drafts if `drafts`."""

    def forward(token_ids: Tensor, inputs: Seq[AttentionInputs], plans: Seq[AttentionPlan]) -> Tensor:
        return runner.model.forward(token_ids, inputs, runner.caches, plans)

    size = runner.layout.block_size
    limits = GraphSize(rows, longest, size, padding_slot=blocks * size)
    drafted = replace(limits, rows=3 * rows, queries=8) if drafts else None
    tables = GraphTables(len(runner.layout.groups), (drafted or limits).table_entries, runner.device)
    graphs = DecodeGraphs(forward, runner.ops, limits, runner.layout.groups, tables, capture, drafted)
    return replace(runner, graphs=graphs)
