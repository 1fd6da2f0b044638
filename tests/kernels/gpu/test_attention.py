"""Tests the attention kernels (prefill, decode, shared prefixes) against the reference, with poisoned unused
slots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer_kernels.gpu import attention_launch, part_room
from batchinfer_kernels.gpu.attention_plan import Room, SharedPrefix, plan_attention
from batchinfer_kernels.gpu.decode_attention import decode_attention
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.prefill_attention import prefill_attention, prefill_items, prefill_tokens
from batchinfer_kernels.paged_attention import ScoreRules
from tests.kernels.gpu.attention_cases import (
    DTYPES,
    SCALE,
    Case,
    assert_near,
    attend_few,
    attend_sharing,
    check,
    decode,
    paged_case,
    prefill,
    sharing,
    splits_of,
)
from tests.kernels.gpu.pairs import every_pair
from tests.kernels.refused import assert_refused

# (queries, context): empty, one token, a whole prompt, chunks after a cached part, near the end of a block or
# tile
CHUNKS = ((1, 1), (5, 5), (3, 17), (0, 9), (17, 33), (16, 16), (15, 47), (1, 64), (34, 65))
FEW = ((1, 1), (5, 5), (3, 17), (0, 9), (8, 33), (1, 16), (7, 47), (2, 64), (4, 66), (1, 0), (8, 300))
LENGTHS = (0, 1, 15, 16, 17, 64, 129, 300)
# Three levels, a separate group, a separate sequence, and one that ends with its shared prefix; 16 keys per
# block
CONTEXTS = (300, 420, 321, 513, 400, 200, 260, 90, 129)
FEW_SHARING = tuple((1 + at % 4, context) for at, context in enumerate(CONTEXTS))
PREFIXES = [([0, 1, 2, 3, 4], 128), ([1, 2, 3, 4], 192), ([3, 4], 384), ([8, 5, 6], 128)]
SHARED = [SharedPrefix(*p) for p in PREFIXES]


def singles(lengths) -> list[tuple[int, int]]:
    return [(1, n) for n in lengths]


@dataclass(frozen=True)
class Kernel:
    """A kernel of attention, and steps that cover it."""

    attend: Any
    chunks: Any
    windows: tuple[int, ...]  # that end within what these steps have
    few: Any = ()  # chunks for other sizes of heads and blocks
    prefixes: Any = None

    def case(self, chunks=None, block_size=16, **options) -> Case:
        case = paged_case(self.chunks if chunks is None else chunks, block_size=block_size, **options)
        return case if self.prefixes is None else sharing(case, block_size, self.prefixes)


KERNELS = {
    "prefill": Kernel(prefill, CHUNKS, (1, 16, 40), ((9, 9), (2, 40), (3, 127), (1, 32))),
    "fixed prefill": Kernel(partial(prefill, deterministic=True), CHUNKS, (1, 40), ((9, 9), (2, 40))),
    "decode in parts": Kernel(
        partial(decode, segment=64), singles(LENGTHS), (1, 40, 200), singles((9, 32, 129, 140))
    ),
    "decode": Kernel(partial(decode, segment=512), singles(LENGTHS), (16, 200), singles((9, 100))),
    "prefixes": Kernel(
        partial(attend_sharing, prefixes=PREFIXES),
        singles(CONTEXTS),
        (1, 100, 150, 350),
        singles(CONTEXTS),
        PREFIXES,
    ),
    "few": Kernel(attend_few, FEW, (1, 16, 40), ((3, 9), (8, 100), (1, 32))),
    "few with prefixes": Kernel(
        partial(attend_few, prefixes=PREFIXES, queries=4), FEW_SHARING, (100, 350), FEW_SHARING, PREFIXES
    ),
}


# dtype, and dtype of a quantised cache
KINDS = [
    *((dtype, None) for dtype in DTYPES),
    *product((torch.float32, torch.bfloat16), (torch.int8, torch.float8_e4m3fn)),
]
# K and V heads, queries for each, values of a head, keys of a block: padded in each of these, and not
USUAL = (2, 2, 64, 16)
SIZES = [
    USUAL,
    (1, 1, 128, 32),
    (3, 3, 80, 48),
    (1, 7, 256, 128),
    (2, 16, 72, 16),
    (2, 2, 96, 64),
    (1, 5, 160, 16),
]


@pytest.mark.sample(14)
@pytest.mark.parametrize(
    ("name", "kind", "sizes", "soft_cap", "sunk"),
    every_pair(list(KERNELS), KINDS, SIZES, [None, 1.5], [False, True]),
)
def test_sequences_of_any_length_share_a_launch(name, kind, sizes, soft_cap, sunk, device) -> None:
    kernel, (kv_heads, group, dim, block_size), (dtype, cache_dtype) = KERNELS[name], sizes, kind
    if kernel.prefixes is not None:  # which end with blocks
        block_size = {48: 16, 128: 64}.get(block_size, block_size)
    options = {"kv_heads": kv_heads, "group": group, "dim": dim, "dtype": dtype, "cache_dtype": cache_dtype}
    chunks = kernel.chunks if sizes == USUAL else kernel.few
    case = kernel.case(chunks, block_size, device=device, **options)
    sinks = torch.linspace(-1, 2, kv_heads * group, device=device) if sunk else None
    check(case, kernel.attend, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.sample(7)
@pytest.mark.parametrize(("name", "window"), [(name, w) for name, k in KERNELS.items() for w in k.windows])
def test_a_window_hides_older_keys(name, window, device) -> None:
    case = KERNELS[name].case(device=device)
    if KERNELS[name].prefixes is None:  # its blocks also belong to sequences that still read them
        case.leave_behind(window)
    check(case, KERNELS[name].attend, window, 2.0, torch.linspace(-1, 2, 4, device=device))


@pytest.mark.parametrize(("group", "dtype"), [(16, torch.float16), (5, torch.float32)])
def test_queries_of_more_rows_than_a_tile_has_are_several_programs(group, dtype, device) -> None:
    """Also for sequences that are split among programs: the longest has two parts."""
    check(paged_case(FEW, kv_heads=1, group=group, dtype=dtype, device=device), attend_few, 290, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("way", [prefill, decode])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size"),
    [(1, 5, 80, 32), (2, 4, 128, 16), (1, 8, 256, 64), (3, 1, 100, 128)],
)
def test_sweep(way, dtype, deterministic, kv_heads, group, dim, block_size, device) -> None:
    chunks = singles((0, 1, block_size - 1, block_size, block_size + 1, 255, 256, 257, 600))
    segments = (64, 256)
    if way is prefill:
        chunks = [(n, n + before) for n in (1, 2, 37) for before in (0, 1, block_size, block_size + 1, 150)]
        segments = (64,)
    case = paged_case(chunks, kv_heads, group, dim, block_size, dtype, device=device)
    for window in (None, 1, 33, 1000):
        for segment in segments:
            check(case, way, window, deterministic=deterministic, segment=segment)


# ---- prefill only


def test_small_values_keep_their_bits_in_float16(device) -> None:
    case = paged_case(((3, 17),), dtype=torch.float16, cache_dtype=torch.int8, device=device)
    wanted, _ = case.reference()
    case.scales[1].mul_(2.0**-14)
    assert_near(prefill(case)[0].float() * 2**14, wanted, torch.float16)


def test_q_may_be_a_part_of_a_wider_tensor(device) -> None:
    case = paged_case(((3, 17), (4, 4)), device=device)
    wide = torch.full((7, 12, 64), float("nan"), device=device)
    wide[:, 3:7] = case.q
    check(replace(case, q=wide[:, 3:7]), prefill)


def test_items_are_tiles_of_queries_with_the_most_work_first() -> None:
    items = prefill_items([5, 0, 3, 1], [5, 9, 103, 8], 4)
    assert items.tolist() == [[2, 5, 3, 100, 103], [3, 8, 1, 7, 8], [0, 4, 1, 4, 5], [0, 0, 4, 0, 4]]


def test_only_the_rows_of_given_items_are_written(device) -> None:
    case = paged_case(((3, 17), (2, 9), (4, 4)), device=device)
    most = prefill_tokens(torch.float32, 64, 2)
    items = torch.from_numpy(prefill_items([3, 0, 4], [17, 9, 4], most, np.array([0, 3, 5]))).to(device)
    out, wanted = case.outputs()["out"], case.reference()[0]
    prefill_attention(*case.tensors, [], [], ScoreRules(SCALE), items=items, out=out)
    assert out[3:5].isnan().all()
    assert_near(out[[0, 1, 2, 5, 6, 7, 8]], wanted[[0, 1, 2, 5, 6, 7, 8]], torch.float32)


def test_unsupported_prefill_is_refused(device) -> None:
    assert_refused("17 heads", prefill, paged_case(((1, 4),), kv_heads=1, group=17, device=device))
    case = paged_case(((1, 4),), device=device)
    assert_refused("caches of", prefill, replace(case, k=case.k.int(), v=case.v.int()))
    assert_refused("block tables", prefill, replace(case, table=case.table.long()))
    assert_refused("a tile of", prefill, case, segment=31)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be greater than 0"):
            prefill_attention(*case.tensors, case.queries, case.contexts, ScoreRules(scale))


# ---- decode only


def test_items_that_a_graph_has_too_many_do_nothing(device, monkeypatch) -> None:
    for module in (attention_launch, part_room):
        monkeypatch.setattr(module, "PROGRAMS_PER_PROCESSOR", 24)
    monkeypatch.setattr(attention_launch, "LEAST_SEGMENT", 64)
    case = paged_case(singles(LENGTHS), device=device)
    splits = splits_of(case.contexts, case, longest=1000)
    assert sorted(splits.items[:, 0].tolist()) == [*[-1] * 7, 1, 2, 3, 4, 5, *[6] * 3, *[7] * 5]
    check(case, decode, longest=1000)
    check(paged_case(singles((0, 1, 3)), device=device), decode, longest=1000)


def test_a_row_that_has_grown_is_read_to_its_end(device) -> None:
    for window in (None, 70):
        case = paged_case(singles((0, 3, 70, 300)), device=device)
        check(case, decode, window, segment=64, planned=(0, 1, 65, 129))


def test_rows_choose_queries_and_sequences(device) -> None:
    """Single queries are between chunks of other sequences: only their rows are written."""
    case = paged_case(((3, 17), (1, 100), (2, 9), (1, 30)), device=device)
    rows = torch.tensor([[3, 1], [6, 3]], dtype=torch.int32, device=device)
    for segment in (64, 256):
        outputs, splits = case.outputs(), splits_of((100, 30), case, segment=segment)
        decode_attention(*case.tensors, case.lengths, splits, ScoreRules(SCALE), rows=rows, **outputs)
        for got, wanted in zip(outputs.values(), case.reference(), strict=True):
            assert_near(got[[3, 6]], wanted[[3, 6]], torch.float32)
            assert got[[0, 1, 2, 4, 5]].isnan().all()


def test_nothing_to_do(device) -> None:
    case = paged_case(((0, 4), (0, 0)), device=device)
    assert prefill(case)[0].shape == (0, 4, 64)
    assert decode_attention(
        *case.tensors, case.lengths[:0], splits_of((), case), ScoreRules(SCALE)
    ).shape == (0, 4, 64)


def test_wrong_operands_of_decode_are_refused(device) -> None:
    case = paged_case(singles((9, 20)), device=device)
    lengths, splits = case.lengths, splits_of(case.contexts, case)
    for wrong in (lengths.long(), lengths[:1]):
        assert_refused("lengths are", decode_attention, *case.tensors, wrong, splits, ScoreRules(SCALE))
    with pytest.raises(ValueError, match="rows are"):
        decode_attention(*case.tensors, lengths, splits, ScoreRules(SCALE), rows=lengths[:, None])
    with pytest.raises(ValueError, match="window of None, expected 2 with 7"):
        decode_attention(*case.tensors, lengths, splits, ScoreRules(SCALE, 7))
    with pytest.raises(ValueError, match="1 rows"):
        decode_attention(*case.tensors, lengths, splits_of((9,), case), ScoreRules(SCALE))
    with pytest.raises(ValueError, match="1 block tables"):
        decode_attention(*replace(case, table=case.table[:1]).tensors, lengths, splits, ScoreRules(SCALE))


# ---- shared prefixes only


def test_more_rows_than_a_tile_has_and_more_keys_than_a_segment(device) -> None:
    prefixes = [(list(range(20)), 512)]
    case = paged_case(singles(range(513, 533)), 1, 4, block_size=64, device=device)
    check(sharing(case, 64, prefixes), attend_sharing, prefixes=prefixes)


def test_levels_without_reserved_memory_are_read_by_each_row(monkeypatch, device) -> None:
    monkeypatch.setattr(part_room, "LEVELS", 1)
    case = KERNELS["prefixes"].case(device=device)
    starts = plan_attention(case.queries, case.contexts, case.shape, device, SHARED).starts
    assert starts.tolist() == [128, 128, 128, 128, 128, 128, 128, 0, 128]
    check(case, KERNELS["prefixes"].attend)


def test_chunks_in_the_group_read_their_keys_themselves(device) -> None:
    chunks = singles(CONTEXTS)
    chunks[2], chunks[5], chunks[7] = (17, 321), (3, 200), (0, 90)
    check(KERNELS["prefixes"].case(chunks, device=device), KERNELS["prefixes"].attend)


def test_a_room_pads_and_a_plan_is_refilled(device) -> None:
    """A captured graph is replayed with the launches of one plan, and the lengths and groups of another."""
    room = Room(longest=600, sharing=(20, 12, 30))
    first = KERNELS["prefixes"].case(device=device)
    plan = plan_attention(first.queries, first.contexts, first.shape, device, SHARED, room)
    prefixes = [([0, 2, 6, 7, 8], 128), ([6, 7, 8], 256)]
    second = sharing(
        paged_case(singles((129, 128, 500, 0, 0, 7, 300, 301, 599)), device=device), 16, prefixes
    )
    wanted = second.reference()[0]
    second.q[[3, 4]] = float("nan")
    shared = [SharedPrefix(*p) for p in prefixes]
    for others in (shared, [], shared):
        plan = plan.refilled(plan_attention([1] * 9, second.contexts, first.shape, device, others, room))
        assert_near(paged_attention(*second.tensors, plan, ScoreRules(SCALE)), wanted, torch.float32)
