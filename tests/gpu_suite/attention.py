"""Attention kernels at the 8B Llama shape: decode, prefill, shared prefixes, against torch's SDPA and FlashInfer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels.cost import attention_cost
from batchinfer_kernels.gpu.attention_plan import AttentionShape, LaunchPlan, SharedPrefix, plan_attention
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.paged_attention import paged_attention_reference
from tests.gpu_suite import flashinfer
from tests.gpu_suite.case import TOLERANCE, Case, distance, measured
from tests.gpu_suite.clock import Call
from tests.gpu_suite.paged import Heads, Paged
from tests.gpu_suite.section import Part, Section

LLAMA_8B, TINY = Heads(32, 8, 128, 16), Heads(4, 2, 64, 16)
DECODE_TARGET, PREFILL_TARGET, PREFIX_AIM = 0.85, 0.6, 10.0
CODED_TOLERANCE = 2e-2  # codes are the same for both; what differs is one more rounding
PRIVATE = "private copies"
# (sequences, context) of one length each; those with a target come first, the last is split over many programs
DECODES = ((64, 4096), (64, 1024), (256, 1024), (8, 32768))
CODED = (64, 4096)  # with int8 and float8 in the cache
MIXED = tuple(128 * 2 ** (i % 7) for i in range(128))  # 128 … 8192
# (sequences, queries, context)
PREFILLS = ((1, 4096, 4096), (4, 4096, 4096), (1, 16384, 16384), (1, 2048, 16384), (16, 512, 512))
PREFIX = (256, 8192, 128)  # sequences, keys that all share, keys of their own


def run(section: Section) -> None:
    """A result a case."""
    section.parts(rehearsed(section) if section.setting.rehearsal else cases(section))


def cases(section: Section) -> list[Part]:
    """What has a target first."""

    def decode(contexts: Sequence[int], codes: str | None = None) -> Part:
        return _part(section, partial(decode_case, section, LLAMA_8B, contexts, codes), "decode")

    parts = [decode([length] * count) for count, length in DECODES[:2]]
    parts += [_part(section, partial(prefill_case, section, LLAMA_8B, *PREFILLS[0]), "prefill")]
    parts += [_part(section, partial(prefix_case, section, LLAMA_8B, *PREFIX), "prefix")]
    parts += [_part(section, partial(prefill_case, section, LLAMA_8B, *p), "prefill") for p in PREFILLS[1:]]
    parts += [decode([length] * count) for count, length in DECODES[2:]]
    count, length = CODED
    parts += [decode(MIXED), *(decode([length] * count, codes) for codes in ("float8_e4m3fn", "int8"))]
    return parts


def rehearsed(section: Section) -> list[Part]:
    """Every path once."""
    return [
        _part(section, partial(decode_case, section, TINY, [17, 17], None), "decode"),
        _part(section, partial(decode_case, section, TINY, [1, 33], None), "decode"),
        *(
            _part(section, partial(decode_case, section, TINY, [17], c), "decode")
            for c in ("float8_e4m3fn", "int8")
        ),
        _part(section, partial(prefill_case, section, TINY, 1, 20, 20), "prefill"),
        _part(section, partial(prefill_case, section, TINY, 1, 5, 20), "prefill"),
        _part(section, partial(prefix_case, section, TINY, 4, 256, 3), "prefix"),
    ]


def _part(section: Section, make: partial[Case], kernel: str) -> Part:
    sizes = " ".join(_told(a) for a in make.args[2:] if a is not None)
    return f"{kernel} attention {sizes}", lambda: measured(section, make())


def _told(value: Any) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return str(value)
    return f"{len(value)} × {min(value)}…{max(value)}"


def decode_case(section: Section, heads: Heads, contexts: Sequence[int], codes: str | None) -> Case:
    """One query a sequence; SDPA where all contexts are of one length and nothing is coded."""
    dtype, count, keys = torch.bfloat16, len(contexts), sum(contexts)
    paged = Paged.random(contexts, heads, dtype, section.setting.device, codes)
    q = paged.queries(count)
    ours = _attention(paged, q, _plan(paged, [1] * count, dtype))
    others: dict[str, Call] = {}
    if codes is None:
        others = flashinfer.decode(paged, q)
        if len(set(contexts)) == 1:
            others = {"torch SDPA": _sdpa_decode(paged, q), **others}
    return Case(
        "decode attention",
        _decode_size(contexts, codes),
        attention_cost(count, keys, keys, heads.q, heads.kv, heads.dim, 2, paged.k.element_size()),
        _name(dtype),
        ours,
        lambda: distance(ours(), _reference(paged, q, [1] * count)),
        TOLERANCE[dtype] if codes is None else CODED_TOLERANCE,
        others,
        DECODE_TARGET if count >= 64 and min(contexts) >= 1024 else None,
    )


def _decode_size(contexts: Sequence[int], codes: str | None) -> str:
    one = len(set(contexts)) == 1
    length = str(contexts[0]) if one else f"{min(contexts)}…{max(contexts)}"
    return f"{len(contexts)} × {length}{'' if codes is None else f', {codes} cache'}"


def prefill_case(section: Section, heads: Heads, count: int, queries: int, context: int) -> Case:
    """Chunks at the end of their sequences, held against SDPA: the reference would keep every score."""
    dtype = torch.bfloat16
    paged = Paged.random([context] * count, heads, dtype, section.setting.device)
    q = paged.queries(count * queries)
    plan = _plan(paged, [queries] * count, dtype)
    pairs = count * queries * (2 * context - queries + 1) // 2
    cost = attention_cost(count * queries, pairs, count * context, heads.q, heads.kv, heads.dim, 2)
    sdpa = _sdpa_prefill(paged, q, queries)
    ours = _attention(paged, q, plan)
    others = {"torch SDPA": sdpa, **flashinfer.prefill(paged, q, queries)}
    whole = queries == context
    return Case(
        "prefill attention",
        f"{count} × {queries}" if whole else f"{count} × {queries} of {context}",
        cost,
        _name(dtype),
        ours,
        lambda: distance(ours(), _rows(sdpa(), queries)),
        TOLERANCE[dtype],
        others,
        PREFILL_TARGET if context >= 4096 else None,
    )


def prefix_case(section: Section, heads: Heads, count: int, shared: int, own: int) -> Case:
    """Sequences with a common prefix: read once for all, against the same blocks read by each sequence for itself,
    which the device's cache serves in part, and against a copy of the prefix for each sequence.
    """
    dtype, contexts = torch.bfloat16, [shared + own] * count
    paged = Paged.random(contexts, heads, dtype, section.setting.device, shared_keys=shared)
    private = Paged.random(contexts, heads, dtype, section.setting.device)
    q = paged.queries(count)
    together = _plan(paged, [1] * count, dtype, [SharedPrefix(range(count), shared)])
    alone = _plan(paged, [1] * count, dtype)
    cost = attention_cost(count, sum(contexts), shared + count * own, heads.q, heads.kv, heads.dim, 2)
    ours, each = _attention(paged, q, together), _attention(paged, q, alone)
    return Case(
        "shared-prefix attention",
        f"{count} × ({shared} shared + {own})",
        cost,
        _name(dtype),
        ours,
        lambda: distance(ours(), _reference(paged, q, [1] * count)),
        TOLERANCE[dtype],
        {"each reads the prefix": each, PRIVATE: _attention(private, q, alone)},
        aim={PRIVATE: PREFIX_AIM},
    )


def _plan(
    paged: Paged, queries: list[int], dtype: torch.dtype, shared: Sequence[SharedPrefix] = ()
) -> LaunchPlan:
    heads = paged.heads
    shape = AttentionShape(dtype, heads.q, heads.kv, heads.dim)
    return plan_attention(queries, paged.contexts, shape, paged.k.device, shared)


def _attention(paged: Paged, q: Tensor, plan: LaunchPlan) -> Call:
    return partial(
        paged_attention,
        *(q, paged.k, paged.v, paged.table),
        plan,
        paged.heads.scale,
        k_scale=paged.scale,
        v_scale=paged.scale,
        out=torch.empty_like(q),
    )


def _reference(paged: Paged, q: Tensor, queries: list[int]) -> Tensor:
    return paged_attention_reference(
        *(q, paged.k, paged.v, paged.table),
        queries,
        list(paged.contexts),
        paged.heads.scale,
        k_scale=paged.scale,
        v_scale=paged.scale,
    )


def _sdpa_decode(paged: Paged, q: Tensor) -> Call:
    """Over a contiguous copy, the best case for it; the heads of a group as queries, as it likes them best."""
    heads = paged.heads
    k, v = paged.contiguous()
    grouped = q.reshape(len(q), heads.kv, heads.q // heads.kv, heads.dim)
    return lambda: torch.nn.functional.scaled_dot_product_attention(grouped, k, v, scale=heads.scale)


def _sdpa_prefill(paged: Paged, q: Tensor, queries: int) -> Call:
    """(count, heads, queries, D), over a contiguous copy."""
    heads = paged.heads
    k, v = paged.contiguous()
    asked = q.reshape(-1, queries, heads.q, heads.dim).transpose(1, 2)
    sdpa, whole = torch.nn.functional.scaled_dot_product_attention, queries == k.shape[2]
    if whole:
        return lambda: sdpa(asked, k, v, is_causal=True, scale=heads.scale, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    # A bias and GQA do not go together
    wide_k, wide_v = (t.repeat_interleave(heads.q // heads.kv, 1) for t in (k, v))
    bias = causal_lower_right(queries, k.shape[2])
    return lambda: sdpa(asked, wide_k, wide_v, bias, scale=heads.scale)


def _rows(result: Tensor, queries: int) -> Tensor:
    """(count, heads, queries, D) → (tokens, heads, D)."""
    return result.transpose(1, 2).reshape(-1, result.shape[1], result.shape[3])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
