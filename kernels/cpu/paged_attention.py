"""Paged attention in torch operators: sequences of similar shape are gathered and computed in one batch.

Grouping bounds the padding, and a Python loop runs over groups rather than sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.latent_attention import check_latent_attention
from batchinfer_kernels.paged_attention import ScoreRules

# The most (query, key) pairs per head in a group, padding included. 4 Mi float32 scores take 16 MiB: about the cache of
# a large CPU, and enough to amortise the ~10 us of an operator call
MAX_GROUP_PAIRS = 4 << 20
# Bounds the copies of K and V of a group: with 8 KV heads of 128 float32 values they are 512 MiB each
MAX_GROUP_KEYS = 1 << 17
# A sequence joins a group if padding at most doubles its queries and adds at most a quarter to its keys
MAX_QUERY_PADDING = 2.0
MAX_KEY_PADDING = 1.25
KEY_SLACK = 64  # further keys of padding, because short contexts are cheap to pad


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """A group of G sequences whose attention is computed together, padded to Q queries and N blocks each.

    K = N × block_size is the number of keys of a padded sequence.

    Attributes:
        blocks: (G × N,) int64, the blocks of each sequence in the cache.
        shape: (G, Q, N).
        queries: (G × Q,) int64, indices of the step's tokens; padding repeats the sequence's last query.
        real: (n,) int64, the indices in `queries` that are not padding; None: all.
        unused: (G, 1, K, 1) bool, True for slots after a sequence's end, or before the windows of all layers.
        masks: by window, (G, 1, Q, K) bool, True if the query sees the key.
        query_at: (G, Q) int64, on the host, the position of each query.
    """

    blocks: Tensor
    shape: tuple[int, int, int]
    queries: Tensor
    real: Tensor | None
    unused: Tensor
    masks: dict[int | None, Tensor]
    query_at: Tensor


@dataclass(frozen=True, slots=True)
class SequenceShape:
    """Adjacent queries of one sequence, and the keys that they see.

    Attributes:
        row: index of the sequence in the block tables.
        start: index of the first query among the step's tokens.
        queries: number of queries.
        context: number of keys of the sequence up to the last one that the queries see.
        later: number of keys of `context` after the last query.
    """

    row: int
    start: int
    queries: int
    context: int
    later: int = 0


def group_sequences(shapes: list[SequenceShape], causal: bool = True) -> list[list[SequenceShape]]:
    """Group sequences of similar size, because each sequence is padded to the size of the largest in its group.

    Sequences with many queries are first split into several pieces.

    Args:
        shapes: the sequences of a step.
        causal: False if queries also see later keys.
    """
    tiles = [tile for shape in shapes for tile in _tiles(shape, causal)]
    ordered = sorted(tiles, key=lambda s: (s.queries, s.context), reverse=True)
    groups: list[list[SequenceShape]] = []
    for shape in ordered:
        if groups and _fits(groups[-1], shape):
            groups[-1].append(shape)
        else:
            groups.append([shape])
    return groups


def _tiles(shape: SequenceShape, causal: bool) -> Iterator[SequenceShape]:
    most = max(1, MAX_GROUP_PAIRS // shape.context)
    for at in range(0, shape.queries, most):
        queries = min(most, shape.queries - at)
        left = shape.queries - at - queries
        if causal:
            yield SequenceShape(shape.row, shape.start + at, queries, shape.context - left)
        else:
            yield SequenceShape(shape.row, shape.start + at, queries, shape.context, left)


def _fits(group: list[SequenceShape], shape: SequenceShape) -> bool:
    queries, keys = group[0].queries, max(s.context for s in group)
    least = min(min(s.context for s in group), shape.context)
    keys = max(keys, shape.context)
    pairs = (len(group) + 1) * queries * keys
    similar = queries <= MAX_QUERY_PADDING * shape.queries and keys <= MAX_KEY_PADDING * least + KEY_SLACK
    return similar and pairs <= MAX_GROUP_PAIRS and (len(group) + 1) * keys <= MAX_GROUP_KEYS


def build_group(
    members: list[SequenceShape],
    block_tables: Tensor,
    block_size: int,
    windows: frozenset[int | None],
    causal: bool = True,
    tree: TreeMask | None = None,
) -> AttentionGroup:
    """Return the index tensors and masks of one group of sequences.

    Args:
        members: the sequences, from `group_sequences`.
        block_tables: (sequences, blocks), the block tables of all sequences of the step.
        block_size: number of tokens of a block.
        windows: the different sliding windows of the model's layers; None: full attention.
        causal: False if queries also see later keys.
        tree: the keys that queries in draft trees see; it requires full attention. None: there are no draft trees.
    """
    most, device = max(s.queries for s in members), block_tables.device
    blocks = -(-max(s.context for s in members) // block_size)
    rows = torch.tensor([s.row for s in members])
    starts = torch.tensor([s.start for s in members])[:, None]
    lens = torch.tensor([s.queries for s in members])[:, None]
    contexts = torch.tensor([s.context for s in members])[:, None]
    step = torch.arange(most)[None]
    taken = torch.minimum(step, lens - 1)
    firsts = contexts - torch.tensor([s.later for s in members])[:, None] - lens
    query_at, key_at = firsts + taken, torch.arange(blocks * block_size)[None]
    ragged = any(s.queries != most for s in members)
    masks = {w: _mask(query_at, key_at, contexts, w, causal) for w in windows}
    if tree is not None:
        masks = {None: _tree_mask(tree, starts + taken, blocks * block_size)}
    return AttentionGroup(
        blocks=block_tables[rows.to(device), :blocks].flatten().long(),
        shape=(len(members), most, blocks),
        queries=(starts + taken).flatten().to(device),
        real=(step < lens).flatten().nonzero()[:, 0].to(device) if ragged else None,
        unused=_unused(key_at, contexts, firsts, windows)[:, None, :, None].to(device),
        masks={w: mask.to(device) for w, mask in masks.items()},
        query_at=query_at,
    )


def _unused(key_at: Tensor, contexts: Tensor, firsts: Tensor, windows: frozenset[int | None]) -> Tensor:
    behind = key_at >= contexts
    widths = [w for w in windows if w is not None]
    return behind if len(widths) < len(windows) else behind | (key_at <= firsts - max(widths))


def _mask(query_at: Tensor, key_at: Tensor, contexts: Tensor, window: int | None, causal: bool) -> Tensor:
    query_at, key_at = query_at[:, None, :, None], key_at[None, None]
    seen = key_at <= query_at if causal else key_at < contexts[:, None, None]
    if window is None:
        return seen
    return seen & (key_at > query_at - window) & (key_at < query_at + window)


def _tree_mask(tree: TreeMask, queries: Tensor, keys: int) -> Tensor:
    chosen = queries.flatten().numpy()
    seen = TreeMask(tree.last[chosen], tree.bits[chosen]).seen(0, len(chosen), keys)
    return torch.from_numpy(seen).view(len(queries), 1, -1, keys)


def _gather(cache: Tensor, group: AttentionGroup) -> Tensor:
    # Unused slots may hold NaN
    members, _, blocks = group.shape
    pages = cache.index_select(0, group.blocks).view(members, blocks, *cache.shape[1:])
    return pages.transpose(1, 2).flatten(2, 3).masked_fill_(group.unused, 0)


def grouped_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    groups: list[AttentionGroup],
    rules: ScoreRules,
) -> Tensor:
    """Compute attention over a paged KV cache in torch: (T, q_heads, D).

    Args:
        q: (T, q_heads, D), the queries of all sequences.
        k_cache: (blocks, kv_heads, block_size, D).
        v_cache: as `k_cache`.
        groups: from `build_group`; together they contain all queries of the step.
        rules: scale, window, cap, sinks and bias of the scores.
    """
    out = torch.empty_like(q)
    for group in groups:
        k, v = _gather(k_cache, group), _gather(v_cache, group)
        made = _attend(q.index_select(0, group.queries), k, v, group, rules)
        _put(made, group, out)
    return out


def grouped_latent_attention(
    q: Tensor, cache: Tensor, groups: list[AttentionGroup], scale: float, rank: int
) -> Tensor:
    """Compute causal attention over a paged cache of latents in torch: (T, heads, rank).

    Args:
        q: (T, heads, D), the queries of all sequences.
        cache: (blocks, 1, block_size, D). The D values of a token are its key for every head, the first `rank` its
            value.
        groups: from `build_group`; together they contain all queries of the step.
        scale: factor of q · k.
        rank: number of values of V.
    """
    check_latent_attention(q, cache, groups[0].blocks[None], rank)
    out = q.new_empty(*q.shape[:2], rank)
    for group in groups:
        k = _gather(cache, group)
        made = _attend(q.index_select(0, group.queries), k, k[..., :rank], group, ScoreRules(scale))
        _put(made, group, out)
    return out


def _put(result: Tensor, group: AttentionGroup, out: Tensor) -> None:
    if group.real is None:
        out.index_copy_(0, group.queries, result)
    else:
        out.index_copy_(0, group.queries[group.real], result[group.real])


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: AttentionGroup,
    rules: ScoreRules,
) -> Tensor:
    # The heads that share a KV head become rows of one query matrix, so K and V are read once for all of them
    (members, queries, _), (_, heads, dim) = group.shape, q.shape
    kv_heads, sinks = k.shape[1], rules.sinks
    share = heads // kv_heads
    rows = q.view(members, queries, kv_heads, share, dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(members, kv_heads, share * queries, dim)
    mask = group.masks[rules.window].expand(members, 1, queries, -1).repeat(1, 1, share, 1)
    if rules.bias is not None:
        mask = _biased(rules.bias, group, mask, (kv_heads, share)).to(q.dtype)
    if rules.soft_cap is None and sinks is None:
        result = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=rules.scale)
    else:
        each = None if sinks is None else sinks.view(kv_heads, share, 1).expand(-1, -1, queries).flatten(1)
        result = _weighed(rows, k, v, mask, rules.scale, rules.soft_cap, each)
    result = result.view(members, kv_heads, share, queries, -1).permute(0, 3, 1, 2, 4)
    return result.reshape(members * queries, heads, -1)


def _biased(bias: Tensor, group: AttentionGroup, mask: Tensor, heads: tuple[int, int]) -> Tensor:
    keys = mask.shape[-1]
    reach = bias.shape[1] // 2
    distances = torch.arange(keys)[None, None] - group.query_at[..., None]
    added = bias[:, (distances + reach).clamp(0, 2 * reach - 1).to(bias.device)].float()  # (heads, G, Q, K)
    each = added.view(*heads, *added.shape[1:]).permute(2, 0, 1, 3, 4)
    return each.flatten(2, 3).masked_fill(~mask, float("-inf"))


def _weighed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if soft_cap is not None:
        scores = (scores / soft_cap).tanh_() * soft_cap
    scores = scores.masked_fill_(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, :, None].expand(len(scores), -1, -1, 1)
        scores = torch.cat((scores, column), -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v.float()).to(q.dtype)
