"""Attention kernels at the 8B Llama shape: decode, prefill, shared prefixes, against torch's SDPA and libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from batchinfer_kernels.gpu.attention_plan import Room
from tests.gpu_suite import flash_attention, flashinfer, gluon, sdpa
from tests.gpu_suite.case import TOLERANCE, Case, Worst, measured, worst
from tests.gpu_suite.paged import Heads, Paged
from tests.gpu_suite.step import DTYPE, AttentionStep, planned
from tests.suite.clock import Call
from tests.suite.section import BenchSection, Part, WrongResult

LLAMA_8B, TINY = Heads(32, 8, 128, 16), Heads(4, 2, 64, 16)
DECODE_TARGET, PREFILL_TARGET, PREFIX_AIM = 0.85, 0.6, 10.0
CODED_TOLERANCE = 2e-2  # codes are the same for both; what differs is one more rounding
PRIVATE = "private copies"
# (sequences, context) of one length each; those with a target come first, the last is split over many programs
DECODES = ((64, 4096), (64, 1024), (256, 1024), (8, 32768))
CODED = (64, 4096)  # with int8 and float8 in the cache
MIXED = tuple(128 * 2 ** (i % 7) - i % 16 for i in range(128))  # 128 … 8192, most of them no whole blocks
# (sequences, queries, context)
PREFILLS = ((1, 4096, 4096), (4, 4096, 4096), (1, 16384, 16384), (1, 2048, 16384), (16, 512, 512))
PREFIX = (256, 8192, 128)  # sequences, keys that all share, keys of their own
SKEWED = (16_000, *[512] * 255)
FIXED_DECODE = (*[16_384] * 8, *[512] * 56)
FIXED_PREFILL = (2048, 16_384)  # queries, context


def parts(section: BenchSection) -> list[Part]:
    """Return a part a case."""
    return rehearsed(section) if section.rehearsal else cases(section)


def cases(section: BenchSection) -> list[Part]:
    """What has a target first."""
    part = partial(_part, section)

    def decode(contexts: Sequence[int], codes: str | None = None) -> Part:
        return part(decode_case, LLAMA_8B, contexts, codes)

    parts = [decode([length] * count) for count, length in DECODES[:2]]
    parts += [part(prefill_case, LLAMA_8B, *PREFILLS[0]), part(prefix_case, LLAMA_8B, *PREFIX)]
    parts += [part(skewed_case, LLAMA_8B, SKEWED)]
    parts += [part(prefill_case, LLAMA_8B, *sizes) for sizes in PREFILLS[1:]]
    parts += [decode([length] * count) for count, length in DECODES[2:]]
    count, length = CODED
    parts += [decode(MIXED), *(decode([length] * count, codes) for codes in ("float8_e4m3fn", "int8"))]
    parts += [part(fixed_decode_case, LLAMA_8B, FIXED_DECODE)]
    return [*parts, part(fixed_prefill_case, LLAMA_8B, *FIXED_PREFILL)]


def rehearsed(section: BenchSection) -> list[Part]:
    """Every path once."""
    part = partial(_part, section)
    return [
        part(decode_case, TINY, [17, 17], None),
        part(decode_case, TINY, [1, 33], None),
        *(part(decode_case, TINY, [17], codes) for codes in ("float8_e4m3fn", "int8")),
        part(prefill_case, TINY, 1, 20, 20),
        part(prefill_case, TINY, 1, 5, 20),
        part(prefix_case, TINY, 4, 256, 3),
        part(skewed_case, TINY, [70, 5, 5]),
        part(fixed_decode_case, TINY, [1030, 5]),
        part(fixed_prefill_case, TINY, 3, 1030),
    ]


def _part(section: BenchSection, make: Callable[..., Case], heads: Heads, *sizes: object) -> Part:
    name = make.__name__.removesuffix("_case").replace("_", " ")
    told = " ".join(_told(size) for size in sizes if size is not None)
    return f"{name} attention {told}", lambda: measured(section, make(section, heads, *sizes))


def _told(value: object) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return str(value)
    return f"{len(value)} × {min(value)}…{max(value)}"


def decode_case(section: BenchSection, heads: Heads, contexts: Sequence[int], codes: str | None) -> Case:
    """One query a sequence; SDPA where all contexts are of one length and nothing is coded."""
    step = AttentionStep.decode(section, heads, contexts, codes)
    ours = step.call()
    others: dict[str, Call] = {}
    if codes is None:
        others = flashinfer.decode(step.paged, step.q)
        if len(set(contexts)) == 1:
            others = {sdpa.NAME: sdpa.decode(step.paged, step.q), **others}
    return Case(
        "decode attention",
        f"{_lengths(contexts)}{'' if codes is None else f', {codes} cache'}",
        step.cost(),
        _name(DTYPE),
        ours,
        lambda: worst(ours(), step.reference()),
        TOLERANCE[DTYPE] if codes is None else CODED_TOLERANCE,
        others,
        {"share": DECODE_TARGET} if len(contexts) >= 64 and min(contexts) >= 1024 else {},
    )


def prefill_case(section: BenchSection, heads: Heads, count: int, queries: int, context: int) -> Case:
    """Chunks at the end of their sequences, held against SDPA: the reference would keep every score."""
    step = AttentionStep.prefill(section, heads, count, queries, context)
    ours, theirs = step.call(), sdpa.prefill(step.paged, step.q, queries)
    whole = queries == context
    return Case(
        "prefill attention",
        f"{count} × {queries}" if whole else f"{count} × {queries} of {context}",
        step.cost(),
        _name(DTYPE),
        ours,
        lambda: worst(ours(), sdpa.rows(theirs())),
        TOLERANCE[DTYPE],
        {
            sdpa.NAME: theirs,
            **flashinfer.prefill(step.paged, step.q, queries),
            **flash_attention.prefill(step.paged, step.q, queries),
            **gluon.prefill(step.paged, step.q, queries),
        },
        {"share": PREFILL_TARGET} if context >= 4096 else {},
    )


def prefix_case(section: BenchSection, heads: Heads, count: int, shared: int, own: int) -> Case:
    """Sequences with a common prefix: read once for all, against the same blocks read by each sequence for itself,
    which the device's cache serves in part, and against a copy of the prefix for each sequence.
    """
    step = AttentionStep.decode(section, heads, [shared + own] * count, shared=shared)
    private = Paged.random(step.paged.contexts, heads, DTYPE, section.device)
    apart = replace(step, paged=private)
    ours, alone = step.call(), planned(step.paged, 1)
    others = {"each reads the prefix": step.call(alone), PRIVATE: apart.call(alone)}
    return Case(
        "shared-prefix attention",
        f"{count} × ({shared} shared + {own})",
        step.cost(shared),
        _name(DTYPE),
        ours,
        lambda: worst(ours(), step.reference()),
        TOLERANCE[DTYPE],
        {**others, **flashinfer.cascade(step.paged, step.q, shared)},
        targets={PRIVATE: PREFIX_AIM},
    )


def skewed_case(section: BenchSection, heads: Heads, contexts: Sequence[int]) -> Case:
    """A long row among short ones, replayed as a graph that was captured when another row was the long one, beside the
    same launches without a graph."""
    step = AttentionStep.decode(section, heads, contexts)
    room = Room(longest=max(contexts))
    held = planned(replace(step.paged, contexts=step.paged.contexts[::-1]), 1, room=room)
    own = planned(step.paged, 1, room=room)
    held.place()
    replay = _captured(section, step.call(held))
    held.refilled(own)
    return Case(
        "decode attention",
        f"{_lengths(contexts)}, in a graph",
        step.cost(),
        _name(DTYPE),
        replay,
        lambda: worst(replay(), step.reference()),
        TOLERANCE[DTYPE],
        {"launched": step.call(own)},
    )


def fixed_decode_case(section: BenchSection, heads: Heads, contexts: Sequence[int]) -> Case:
    """The deterministic mode; the first row has the same bits alone."""
    step = AttentionStep.decode(section, heads, contexts, deterministic=True)
    ours, paged = step.call(), step.paged
    one = replace(paged, contexts=paged.contexts[:1], table=paged.table[:1])
    alone = AttentionStep(one, step.q[:1], 1, planned(one, 1, deterministic=True))

    def error() -> Worst:
        found: Tensor = ours()
        if not torch.equal(found[:1], alone.call()()):
            raise WrongResult("the first row has other bits alone than in this batch")
        return worst(found, step.reference())

    return Case(
        "deterministic decode attention",
        _lengths(contexts),
        step.cost(),
        _name(DTYPE),
        ours,
        error,
        TOLERANCE[DTYPE],
        {"default mode": step.call(planned(paged, 1))},
    )


def fixed_prefill_case(section: BenchSection, heads: Heads, queries: int, context: int) -> Case:
    """The deterministic mode; the last chunk of a prompt has the same bits in a chunk half as long."""
    step = AttentionStep.prefill(section, heads, 1, queries, context, deterministic=True)
    ours, half = step.call(), queries // 2
    less = AttentionStep(step.paged, step.q[-half:], half, planned(step.paged, half, deterministic=True))
    theirs = sdpa.prefill(step.paged, step.q, queries)

    def error() -> Worst:
        found: Tensor = ours()
        if not torch.equal(found[-half:], less.call()()):
            raise WrongResult(f"the last {half} queries have other bits in a chunk of their own")
        return worst(found, sdpa.rows(theirs()))

    return Case(
        "deterministic prefill attention",
        f"1 × {queries} of {context}",
        step.cost(),
        _name(DTYPE),
        ours,
        error,
        TOLERANCE[DTYPE],
        {"default mode": step.call(planned(step.paged, queries)), sdpa.NAME: theirs},
    )


def _captured(section: BenchSection, call: Call) -> Call:
    """As a CUDA graph; a rehearsal has none, and calls again what would be captured."""
    if section.device.type == "cpu":
        return call
    from batchinfer.engine.graphs.graph_capture import GpuRecorder

    captured = GpuRecorder()(call)

    def replay() -> Tensor:
        captured.replay()
        return captured.result

    return replay


def _lengths(contexts: Sequence[int]) -> str:
    """The most frequent length first where there are few."""
    counts = {length: list(contexts).count(length) for length in set(contexts)}
    if len(counts) > 2:
        return f"{len(contexts)} × {min(contexts)}…{max(contexts)}"
    return " and ".join(f"{counts[length]} × {length}" for length in sorted(counts, key=lambda n: -counts[n]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
