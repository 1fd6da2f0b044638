"""Checks that a loaded model computes the same logits here as with transformers' own attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchinfer.models.foreign.interface import ATTENTION_NAME
from batchinfer.models.foreign.model import TransformersModel
from batchinfer.models.foreign.spec import CannotRun, ForeignSpec
from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.interface import Ops

LENGTHS = (11, 7, 1)  # tokens of each row
CHUNKS = (4, 3, 1)  # tokens of each row per step; chunks begin and end at different offsets in blocks
BLOCK = 4
# Largest mean relative distance of logits from transformers' logits. Correct models are at 1e-6 in float32 and below
# 2e-2 in 16-bit floats, whose products round differently for each number of rows. A token that attends to a token that
# it must not see is at about 1.
FARTHEST = {torch.float32: 1e-2}
FARTHEST_HALF = 0.1


@dataclass(frozen=True, slots=True)
class ExpectedResults:
    """The expected results of a test that compares a model in the engine with transformers' own attention.

    Attributes:
        rows: Token ids of each test row, (tokens,).
        logits: Logits of each row with transformers' own attention, (tokens, vocab).
        returned: The class of the object that the decoder returns.
    """

    rows: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]
    returned: type


def run_alone(causal: Any, spec: ForeignSpec, device: torch.device | str) -> ExpectedResults:
    """Run random rows one at a time with transformers' own attention, and return the rows with their logits.

    Args:
        causal: The loaded model with its output layer.
        spec: The sizes and attention of the model.
        device: The device of the model.

    Raises:
        CannotRun: Logits are not finite.
    """
    generator, returned = torch.Generator().manual_seed(0), []
    rows = tuple(torch.randint(spec.vocab, (n,), generator=generator).to(device) for n in LENGTHS)
    causal.set_attn_implementation("eager")
    hook = causal.get_submodule(spec.decoder).register_forward_hook(
        lambda _module, _inputs, out: returned.append(type(out))
    )
    try:
        with torch.inference_mode():
            logits = tuple(causal(input_ids=row[None], use_cache=False).logits[0].float() for row in rows)
    finally:
        hook.remove()
        causal.set_attn_implementation(ATTENTION_NAME)
    if not all(bool(found.isfinite().all()) for found in logits):
        raise CannotRun("its logits are no finite numbers in this dtype; take another model.dtype")
    return ExpectedResults(rows, logits, returned[0])


def check_together(model: TransformersModel, ops: Ops, wanted: ExpectedResults, dtype: torch.dtype) -> None:
    """Run the test rows together in the engine, in chunks and with a paged cache, and compare their logits.

    Args:
        model: The model in the engine.
        ops: The operators that compute attention.
        wanted: The rows and their expected logits.
        dtype: The dtype of the KV cache, which determines the tolerance.

    Raises:
        CannotRun: The logits differ by more than rounding.
    """
    blocks = sum(-(-length // BLOCK) for length in LENGTHS)
    device = wanted.rows[0].device
    caches = [ops.allocate_cache(layer.cache, blocks, BLOCK, dtype, device) for layer in model.spec.layers]
    with torch.inference_mode():
        found = _together(model, ops, wanted.rows, caches)
    far = torch.cat([_distance(a, b) for a, b in zip(found, wanted.logits, strict=True)]).mean().item()
    if not far <= FARTHEST.get(dtype, FARTHEST_HALF):
        raise CannotRun(
            "rows that are computed together get other logits than alone: it mixes tokens beside attention, or their "
            "positions are lost",
            f"off by {far:.1%}",
        )


def _distance(found: Tensor, wanted: Tensor) -> Tensor:
    centred = wanted - wanted.mean(-1, keepdim=True)
    off, size = (torch.linalg.vector_norm(t, dim=-1) for t in (found - wanted, centred))
    share: Tensor = off / size.clamp_min(1e-6)
    return share


def _together(
    model: TransformersModel, ops: Ops, rows: Sequence[Tensor], caches: list[LayerCache]
) -> list[Tensor]:
    parts: list[list[Tensor]] = [[] for _ in rows]
    for spans in _steps():
        inputs = _inputs(spans, rows[0].device)
        tokens = torch.cat([rows[row][span.start : span.stop] for row, span in spans])
        plan = ops.plan_attention(inputs, BLOCK, frozenset(model.spec.windows))
        logits = model.logits(model.forward(tokens, [inputs], caches, [plan]))
        for (row, _), part in zip(spans, torch.split(logits, inputs.query_lens), strict=True):
            parts[row].append(part)
    return [torch.cat(part) for part in parts]


def _steps() -> Iterator[list[tuple[int, range]]]:
    starts = [0] * len(LENGTHS)
    while any(start < length for start, length in zip(starts, LENGTHS, strict=True)):
        spans = []
        for row, (length, chunk) in enumerate(zip(LENGTHS, CHUNKS, strict=True)):
            span = range(starts[row], min(starts[row] + chunk, length))
            starts[row] = span.stop
            spans += [(row, span)] if span else []
        yield spans


def _inputs(spans: list[tuple[int, range]], device: torch.device) -> AttentionInputs:
    counts = [-(-length // BLOCK) for length in LENGTHS]
    first = [sum(counts[:row]) for row in range(len(counts))]
    width = max(counts)
    tables = [[first[row] + min(at, counts[row] - 1) for at in range(width)] for row, _ in spans]
    slots = [first[row] * BLOCK + position for row, span in spans for position in span]
    return AttentionInputs(
        positions=torch.tensor([position for _, span in spans for position in span], device=device),
        slots=torch.tensor(slots, device=device),
        block_tables=torch.tensor(tables, dtype=torch.int32, device=device),
        query_lens=[len(span) for _, span in spans],
        context_lens=[span.stop for _, span in spans],
    )
