"""Attention kernels at the 8B Llama shape: decode, prefill, shared prefixes, against torch's SDPA and libraries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from batchinfer_kernels.gpu.attention_plan import Room
from tests.gpu_suite import libraries
from tests.gpu_suite.case import DTYPE, Case, Worst, part, worst
from tests.gpu_suite.paged import Heads, Paged
from tests.gpu_suite.step import AttentionStep, planned
from tests.suite.clock import Call
from tests.suite.section import BenchSection, Part, WrongResult

LLAMA_8B, TINY = Heads(32, 8, 128, 16), Heads(4, 2, 64, 16)
DECODE_TARGET, PREFILL_TARGET, PREFIX_AIM = 0.85, 0.6, 10.0
CODED_TOLERANCE = 2e-2  # both use the same quantised values, with one more rounding
PRIVATE = "private copies"
# (sequences, context), equal lengths; cases with a target first, the last one is split over many programs
DECODES = ((64, 4096), (64, 1024), (256, 1024), (8, 32768))
CODED = [4096] * 64  # contexts of int8 and float8 caches
MIXED = tuple(128 * 2 ** (i % 7) - i % 16 for i in range(128))  # 128 … 8192, mostly with a partial last block
# (sequences, queries, context)
PREFILLS = ((1, 4096, 4096), (4, 4096, 4096), (1, 16384, 16384), (1, 2048, 16384), (16, 512, 512))
PREFIX = (256, 8192, 128)  # sequences, common keys, own keys
SKEWED = (16_000, *[512] * 255)
FIXED_DECODE = (*[16_384] * 8, *[512] * 56)
FIXED_PREFILL = (2048, 16_384)  # queries, context


def parts(section: BenchSection) -> list[Part]:
    """Return a part per case, cases with a target first; in a rehearsal each path once."""
    made = partial(part, section)
    if section.rehearsal:
        return [
            made(decode_case, TINY, [17, 17]),
            made(decode_case, TINY, [1, 33]),
            *(made(decode_case, TINY, [17], codes) for codes in ("float8_e4m3fn", "int8")),
            made(prefill_case, TINY, 1, 20, 20),
            made(prefill_case, TINY, 1, 5, 20),
            made(prefix_case, TINY, 4, 256, 3),
            made(skewed_case, TINY, [70, 5, 5]),
            made(fixed_decode_case, TINY, [1030, 5]),
            made(fixed_prefill_case, TINY, 3, 1030),
        ]
    decodes = [made(decode_case, LLAMA_8B, [length] * count) for count, length in DECODES]
    prefills = [made(prefill_case, LLAMA_8B, *sizes) for sizes in PREFILLS]
    return [
        *decodes[:2],
        prefills[0],
        made(prefix_case, LLAMA_8B, *PREFIX),
        made(skewed_case, LLAMA_8B, SKEWED),
        *prefills[1:],
        *decodes[2:],
        made(decode_case, LLAMA_8B, MIXED),
        *(made(decode_case, LLAMA_8B, CODED, codes) for codes in ("float8_e4m3fn", "int8")),
        made(fixed_decode_case, LLAMA_8B, FIXED_DECODE),
        made(fixed_prefill_case, LLAMA_8B, *FIXED_PREFILL),
    ]


def decode_case(
    section: BenchSection, heads: Heads, contexts: Sequence[int], codes: str | None = None
) -> Case:
    """Return a case of one query per sequence."""
    step = AttentionStep.decode(section, heads, contexts, codes)
    case = _case("decode attention", _lengths(contexts), step, step.call(), step.reference)
    if min(contexts) >= 1024 and len(contexts) >= 64:
        case = replace(case, targets={"share": DECODE_TARGET})
    if codes is not None:
        return replace(case, size=f"{case.size}, {codes} cache", tolerance=CODED_TOLERANCE)
    return replace(case, others=libraries.decode(step.paged, step.q))


def prefill_case(section: BenchSection, heads: Heads, count: int, queries: int, context: int) -> Case:
    """Return a case of chunks at the end of their sequences.

    Compared with SDPA, since the reference stores all scores.
    """
    step = AttentionStep.prefill(section, heads, count, queries, context)
    size = f"{count} × {queries}" + ("" if queries == context else f" of {context}")
    theirs = libraries.sdpa_prefill(step.paged, step.q, queries)
    others = {libraries.SDPA: theirs, **libraries.prefill(step.paged, step.q, queries)}
    case = _case("prefill attention", size, step, step.call(), _in_rows(theirs), others)
    return replace(case, targets={"share": PREFILL_TARGET} if context >= 4096 else {})


def prefix_case(section: BenchSection, heads: Heads, count: int, shared: int, own: int) -> Case:
    """Return a case of sequences with a common prefix that is read once.

    Compared with reading the same blocks for each sequence, partly from the device's cache, and with a copy of the
    prefix per sequence.
    """
    step = AttentionStep.decode(section, heads, [shared + own] * count, shared=shared)
    private = Paged.random(step.paged.contexts, heads, DTYPE, section.device)
    apart, alone = replace(step, paged=private), planned(step.paged, 1)
    others = {"each reads the prefix": step.call(alone), PRIVATE: apart.call(alone)}
    others |= libraries.cascade(step.paged, step.q, shared)
    size = f"{count} × ({shared} shared + {own})"
    case = _case("shared-prefix attention", size, step, step.call(), step.reference, others)
    return replace(case, cost=step.cost(shared), targets={PRIVATE: PREFIX_AIM})


def skewed_case(section: BenchSection, heads: Heads, contexts: Sequence[int]) -> Case:
    """Return a case of a long row among short ones. Replays a graph captured with another long row, compared with the
    same launches without a graph.
    """
    step = AttentionStep.decode(section, heads, contexts)
    room = Room(longest=max(contexts))
    held = planned(replace(step.paged, contexts=step.paged.contexts[::-1]), 1, room=room)
    own = planned(step.paged, 1, room=room)
    held.place()
    replay = _captured(section, step.call(held))
    held.refilled(own)
    size, others = f"{_lengths(contexts)}, in a graph", {"launched": step.call(own)}
    return _case("decode attention", size, step, replay, step.reference, others)


def fixed_decode_case(section: BenchSection, heads: Heads, contexts: Sequence[int]) -> Case:
    """Return a case in deterministic mode that also checks the first row's bits against a batch of one."""
    step = AttentionStep.decode(section, heads, contexts, deterministic=True)
    paged = step.paged
    one = replace(paged, contexts=paged.contexts[:1], table=paged.table[:1])
    alone = AttentionStep(one, step.q[:1], 1, planned(one, 1, deterministic=True))
    off = _same_bits(
        slice(0, 1), alone.call(), "the first row has other bits in a batch of one than in this batch"
    )
    others = {"default mode": step.call(planned(paged, 1))}
    size = _lengths(contexts)
    case = _case("deterministic decode attention", size, step, step.call(), step.reference, others)
    return replace(case, off=off)


def fixed_prefill_case(section: BenchSection, heads: Heads, queries: int, context: int) -> Case:
    """Return a case in deterministic mode that also checks a prompt's last chunk against a chunk half as long."""
    step = AttentionStep.prefill(section, heads, 1, queries, context, deterministic=True)
    half = queries // 2
    less = AttentionStep(step.paged, step.q[-half:], half, planned(step.paged, half, deterministic=True))
    off = _same_bits(
        slice(-half, None), less.call(), f"the last {half} queries have other bits in a chunk of their own"
    )
    theirs = libraries.sdpa_prefill(step.paged, step.q, queries)
    others = {"default mode": step.call(planned(step.paged, queries)), libraries.SDPA: theirs}
    size = f"1 × {queries} of {context}"
    case = _case("deterministic prefill attention", size, step, step.call(), _in_rows(theirs), others)
    return replace(case, off=off)


def _case(
    kernel: str,
    size: str,
    step: AttentionStep,
    ours: Call,
    right: Call,
    others: Mapping[str, Call] | None = None,
) -> Case:
    return Case(kernel, size, step.cost(), ours, right, others or {}, worst)


def _in_rows(call: Call) -> Call:
    return lambda: libraries.in_rows(call())


def _same_bits(rows: slice, alone: Call, message: str) -> Callable[[Tensor, Tensor], Worst]:
    """Return `worst` with a check that raises WrongResult if bits of these rows differ."""

    def off(found: Tensor, right: Tensor) -> Worst:
        if not torch.equal(found[rows], alone()):
            raise WrongResult(message)
        return worst(found, right)

    return off


def _captured(section: BenchSection, call: Call) -> Call:
    """Capture a call in a CUDA graph. A rehearsal returns the call itself."""
    if section.device.type == "cpu":
        return call
    from batchinfer.engine.graphs.graph_capture import GpuRecorder

    captured = GpuRecorder()(call)

    def replay() -> Tensor:
        captured.replay()
        return captured.result

    return replay


def _lengths(contexts: Sequence[int]) -> str:
    """Return a short text for context lengths, the most frequent length first if there are few."""
    counts = Counter(contexts).most_common()
    if len(counts) > 2:
        return f"{len(contexts)} × {min(contexts)}…{max(contexts)}"
    return " and ".join(f"{count} × {length}" for length, count in counts)
