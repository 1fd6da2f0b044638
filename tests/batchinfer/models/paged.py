"""Runs a decoder over a paged cache with shuffled blocks, poisoned memory, mixed batches and chunks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from batchinfer.engine.kv.cache_layout import one_group
from batchinfer.engine.tensors.device_memory import allocate_caches
from batchinfer.models.adapters.factors import AdaptedWeights
from batchinfer.models.adapters.stored_adapter import StoredAdapter
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.packed_weights import pack_weights
from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import AdapterRoom


def load_decoder(
    checkpoint: Checkpoint,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device | str,
    max_positions: int,
    adapters: Sequence[StoredAdapter] = (),
    places: int | None = None,
) -> Decoder:
    """Load a decoder like ModelSource."""
    spec, stored = checkpoint.spec, CheckpointWeights(checkpoint, dtype, device)
    room = None if places is None else AdapterRoom(places, torch.device(device))
    with AdaptedWeights(stored, spec, adapters, dtype, device if room is None else "cpu") as weights:
        packed = pack_weights(spec, weights, ops, device, len(adapters), room)
    return Decoder(packed, ops, max_positions)


@dataclass
class PagedSequence:
    tokens: list[int]
    blocks: list[int]
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)


def run_paged(
    decoder: Decoder,
    ops: Ops,
    prompts: list[list[int]],
    *,
    chunk: int | None = None,
    block_size: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    adapter: int | None = None,
) -> list[Tensor]:
    """Return the logits of all positions of each prompt, [n, vocab], with one batch per step for all prompts.

    Args:
        chunk: maximum number of tokens per prompt and step, smaller for later prompts; None for whole
            prompts.
        adapter: number of the adapter of all prompts, or None.
    """
    rng = random.Random(seed)
    needs = [-(-len(prompt) // block_size) for prompt in prompts]
    ids = list(range(sum(needs) + 3))
    rng.shuffle(ids)
    sequences = [
        PagedSequence(prompt, [ids.pop() for _ in range(n)]) for prompt, n in zip(prompts, needs, strict=True)
    ]
    specs = decoder.spec.caches
    layout = one_group(specs, block_size)
    caches = allocate_caches(ops, specs, layout, sum(needs) + 3, dtype, "cpu")
    for cache in caches:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    while pending := [s for s in sequences if s.done < len(s.tokens)]:
        _step(decoder, ops, pending, caches, chunk, block_size, adapter)
    return [torch.cat(s.logits) for s in sequences]


@torch.inference_mode()
def _step(
    decoder: Decoder,
    ops: Ops,
    batch: list[PagedSequence],
    caches: list[LayerCache],
    chunk: int | None,
    block_size: int,
    adapter: int | None,
) -> None:
    limits = [len(s.tokens) if chunk is None else max(1, chunk - i) for i, s in enumerate(batch)]
    spans = [range(s.done, min(s.done + n, len(s.tokens))) for s, n in zip(batch, limits, strict=True)]
    slots = [
        s.blocks[p // block_size] * block_size + p % block_size
        for s, span in zip(batch, spans, strict=True)
        for p in span
    ]
    width = max(len(s.blocks) for s in batch)
    inputs = AttentionInputs(
        positions=torch.tensor(
            [p + _rope_offset(decoder, s) for s, span in zip(batch, spans, strict=True) for p in span]
        ),
        slots=torch.tensor(slots),
        block_tables=torch.tensor(
            [s.blocks + [0] * (width - len(s.blocks)) for s in batch], dtype=torch.int32
        ),
        query_lens=[len(span) for span in spans],
        context_lens=[span.stop for span in spans],
        adapters=None if adapter is None else torch.full((len(slots),), adapter),
    )
    token_ids = torch.tensor([s.tokens[p] for s, span in zip(batch, spans, strict=True) for p in span])
    plan = ops.plan_attention(inputs, block_size, frozenset(decoder.spec.windows))
    logits = decoder.logits(decoder.forward(token_ids, [inputs], caches, [plan]))
    for sequence, span, part in zip(batch, spans, torch.split(logits, inputs.query_lens), strict=True):
        sequence.logits.append(part)
        sequence.done = span.stop


def _rope_offset(decoder: Decoder, sequence: PagedSequence) -> int:
    """Return the first row of the rotary table for a prompt of this length."""
    long_rope_beyond = decoder.spec.long_rope_beyond
    return (
        decoder.max_positions
        if long_rope_beyond is not None and len(sequence.tokens) > long_rope_beyond
        else 0
    )
