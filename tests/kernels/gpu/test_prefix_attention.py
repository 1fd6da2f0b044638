"""Attention with shared prefixes equals the reference, which reads them again for every sequence."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.gpu import part_room
from batchinfer_kernels.gpu.attention_parts import Own, Parts
from batchinfer_kernels.gpu.attention_plan import AttentionShape, Room, SharedPrefix, plan_attention
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.prefix_attention import attend_prefixes
from batchinfer_kernels.paged_attention import paged_attention_lse_reference
from tests.kernels.gpu.attention_cases import DTYPES, assert_near, paged_case, poisoned_like, sharing

# Three levels, a group beside them, a sequence alone, and one that ends with what it shares; 16 keys a block
CONTEXTS = (300, 420, 321, 513, 400, 200, 260, 90, 129)
PREFIXES = [([0, 1, 2, 3, 4], 128), ([1, 2, 3, 4], 192), ([3, 4], 384), ([8, 5, 6], 128)]
SHARED = [SharedPrefix(*p) for p in PREFIXES]


def shared_case(chunks=None, block_size=16, **options):
    chunks = [(1, c) for c in CONTEXTS] if chunks is None else chunks
    return sharing(paged_case(chunks, block_size=block_size, **options), block_size, PREFIXES)


def shape_of(case, deterministic=False) -> AttentionShape:
    return AttentionShape(case.q.dtype, case.q.shape[1], case.k.shape[1], case.q.shape[2], deterministic)


def attend(case, shared, window=None, room=None, **extras):
    places = (shape_of(case), case.q.device, shared, room)
    plan = plan_attention(case.queries, case.contexts, *places, windows=[window])
    out, lse = poisoned_like(case.q), torch.full(case.q.shape[:2], float("nan"), device=case.q.device)
    paged_attention(*case.tensors, plan, 0.2, window, out=out, lse=lse, **case.scales, **extras)
    return out, lse


def check(case, shared=SHARED, window=None, **extras) -> None:
    out, lse = attend(case, shared, window, **extras)
    wanted, wanted_lse = case.reference(0.2, window, **extras)
    assert_near(out, wanted, case.q.dtype)
    assert_near(lse, wanted_lse, case.q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_levels(dtype, device) -> None:
    check(shared_case(dtype=dtype, device=device))


@pytest.mark.parametrize("window", [1, 100, 150, 350])
def test_windows_end_within_shared_keys(window, device) -> None:
    check(shared_case(device=device), window=window)


def test_soft_cap_and_sinks(device) -> None:
    case = shared_case(device=device)
    check(case, soft_cap=1.5, sinks=torch.linspace(-1, 2, case.q.shape[1], device=device))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_coded_caches(cache_dtype, device) -> None:
    check(shared_case(cache_dtype=cache_dtype, device=device))


@pytest.mark.parametrize(("group", "dim", "block_size"), [(1, 128, 32), (5, 80, 16), (16, 64, 64)])
def test_groups_sizes_and_blocks(group, dim, block_size, device) -> None:
    check(shared_case(kv_heads=1, group=group, dim=dim, block_size=block_size, device=device))


def test_more_rows_than_a_tile_has_and_more_keys_than_a_segment(device) -> None:
    prefixes = [(list(range(20)), 512)]
    case = paged_case([(1, 512 + n) for n in range(1, 21)], 1, 4, block_size=64, device=device)
    check(sharing(case, 64, prefixes), [SharedPrefix(*p) for p in prefixes])


def test_levels_for_which_there_is_no_room_are_read_by_each_row(monkeypatch, device) -> None:
    monkeypatch.setattr(part_room, "LEVELS", 1)
    case = shared_case(device=device)
    starts = plan_attention(case.queries, case.contexts, shape_of(case), device, SHARED).starts
    assert starts.tolist() == [128, 128, 128, 128, 128, 128, 128, 0, 128]
    check(case)


def test_chunks_in_the_group_read_their_keys_themselves(device) -> None:
    chunks = [(1, c) for c in CONTEXTS]
    chunks[2], chunks[5], chunks[7] = (17, 321), (3, 200), (0, 90)
    check(shared_case(chunks, device=device))


def test_shared_parts_by_themselves(device) -> None:
    """What the kernel leaves in a row's places is attention over these keys alone."""
    case = shared_case(device=device)
    plan = plan_attention(case.queries, case.contexts, shape_of(case), device, SHARED)
    assert plan.prefixes is not None
    own = Own(plan.contexts, plan.splits_of(None), None, plan.prefixes.starts, plan.prefixes.places)
    parts = Parts.of(case.q, plan.prefixes.parts, 2)
    for tensor in (parts.values, parts.lses):
        tensor.fill_(float("nan"))
    attend_prefixes(plan.prefixes, own, parts, *case.tensors, 0.2, None, None, None, None, False)
    values, lses, counts = parts.values, parts.lses, plan.prefixes.places.diff()
    assert counts.tolist() == [1, 2, 2, 3, 3, 1, 1, 0, 1], "no row has room for others' levels"
    level = torch.tensor([128] * 5 + [128, 128, 0, 128])
    first = torch.tensor([i for i, n in enumerate(level.tolist()) if n])
    wanted, lse = paged_attention_lse_reference(
        case.q[first], case.k, case.v, case.table[first], [1] * len(first), level[first].tolist(), 0.2
    )
    places = plan.prefixes.places[first].long()
    assert_near(values[places], wanted, torch.float32)
    assert_near(lses[places] * 0.6931471805599453, lse, torch.float32)
    assert values[: plan.prefixes.parts].isfinite().all(), "all places of what is shared are filled"
    assert values[plan.prefixes.parts :].isnan().all(), "own parts' places, which are not this kernel's"


def test_a_room_pads_and_a_plan_is_refilled(device) -> None:
    """As a captured graph is replayed: the launches of one plan, the lengths and groups of another."""
    room = Room(longest=600, sharing=(20, 12, 30))
    first = shared_case(device=device)
    plan = plan_attention(first.queries, first.contexts, shape_of(first), device, SHARED, room)
    chunks = [(1, c) for c in (129, 128, 500, 0, 0, 7, 300, 301, 599)]
    prefixes = [([0, 2, 6, 7, 8], 128), ([6, 7, 8], 256)]
    second = sharing(paged_case([(min(n, c), c) for n, c in chunks], device=device), 16, prefixes)
    shared = [SharedPrefix(*p) for p in prefixes]
    for others in (shared, [], shared):
        later = plan_attention([1] * 9, [c for _, c in chunks], shape_of(first), device, others, room)
        plan = plan.refilled(later)
        q = torch.full_like(first.q, float("nan"))
        real = [i for i, (_, c) in enumerate(chunks) if c]
        q[real] = second.q
        out = paged_attention(q, second.k, second.v, second.table, plan, 0.2)
        assert_near(out[real], second.reference(0.2)[0], torch.float32)
        assert (out[[3, 4]] == 0).all()
