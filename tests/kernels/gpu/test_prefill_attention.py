"""Prefill attention equals the reference over odd shapes, chunks, dtypes and caches; what is not used is poisoned."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.gpu.prefill_attention import prefill_attention, prefill_items, prefill_tokens
from tests.kernels.gpu.attention_cases import DTYPES, assert_near, left_behind, paged_case, poisoned_like

# (queries, context): none, one, a whole prompt, chunks behind a cached part, around a block's and a tile's end
CHUNKS = ((1, 1), (5, 5), (3, 17), (0, 9), (17, 33), (16, 16), (15, 47), (1, 64), (34, 65))


def attend(case, scale=0.2, window=None, **extras) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = poisoned_like(case.q), torch.full(case.q.shape[:2], float("nan"), device=case.q.device)
    lengths = case.queries, case.contexts
    prefill_attention(*case.tensors, *lengths, scale, window, out=out, lse=lse, **case.scales, **extras)
    return out, lse


def check(case, scale=0.2, window=None, **extras) -> None:
    out, lse = attend(case, scale, window, **extras)
    known = {k: v for k, v in extras.items() if k in ("soft_cap", "sinks")}
    wanted, wanted_lse = case.reference(scale, window, **known)
    assert_near(out, wanted, case.q.dtype)
    assert_near(lse, wanted_lse, case.q.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_any_length_share_a_launch(dtype, device) -> None:
    check(paged_case(CHUNKS, dtype=dtype, device=device))


@pytest.mark.parametrize("window", [1, 16, 40])
def test_a_window_hides_what_is_behind_it(window, device) -> None:
    for deterministic in (False, True):
        case = left_behind(paged_case(CHUNKS, device=device), window)
        check(case, window=window, deterministic=deterministic)


@pytest.mark.parametrize("extras", [{"soft_cap": 1.5}, {"sinks": True}, {"soft_cap": 2.0, "sinks": True}])
def test_soft_cap_and_sinks(extras, device) -> None:
    case = paged_case(CHUNKS, device=device)
    if "sinks" in extras:
        extras = {**extras, "sinks": torch.linspace(-1, 2, case.q.shape[1], device=device)}
    check(case, **extras)
    check(case, window=20, **extras)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 3), (1, 7), (2, 16)])
def test_groups_of_heads(kv_heads, group, device) -> None:
    check(paged_case(((9, 9), (2, 40)), kv_heads, group, device=device))


@pytest.mark.parametrize("dim", [72, 80, 96, 128, 160, 256])
def test_head_sizes_are_padded_within(dim, device) -> None:
    check(paged_case(((9, 20),), dim=dim, device=device, dtype=torch.float16))


@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_block_sizes(block_size, device) -> None:
    lengths = [block_size - 1, block_size, block_size + 1]
    check(paged_case([(3, n) for n in lengths], block_size=block_size, device=device))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coded_caches(dtype, cache_dtype, device) -> None:
    case = paged_case(((3, 17), (20, 20)), dtype=dtype, cache_dtype=cache_dtype, device=device)
    check(case)
    check(case, deterministic=True)


def test_small_values_keep_their_bits_in_float16(device) -> None:
    case = paged_case(((3, 17),), dtype=torch.float16, cache_dtype=torch.int8, device=device)
    wanted, _ = case.reference(0.2)
    case.v_scale *= 2.0**-14
    got = prefill_attention(*case.tensors, case.queries, case.contexts, 0.2, **case.scales)
    assert_near(got.float() * 2**14, wanted, torch.float16)


def test_q_may_be_a_part_of_a_wider_tensor(device) -> None:
    case = paged_case(((3, 17), (4, 4)), device=device)
    wide = torch.full((7, 12, 64), float("nan"), device=device)
    wide[:, 3:7] = case.q
    case.q = wide[:, 3:7]
    check(case)


def test_items_are_tiles_of_queries_with_the_most_work_first() -> None:
    items = prefill_items([5, 0, 3, 1], [5, 9, 103, 8], 4, torch.device("cpu"))
    assert items.tolist() == [[2, 5, 3, 100], [3, 8, 1, 7], [0, 4, 1, 4], [0, 0, 4, 0]]


def test_only_the_rows_of_given_items_are_written(device) -> None:
    case = paged_case(((3, 17), (2, 9), (4, 4)), device=device)
    most = prefill_tokens(torch.float32, 64, 2)
    items = prefill_items([3, 0, 4], [17, 9, 4], most, torch.device(device), torch.tensor([0, 3, 5]).numpy())
    out = poisoned_like(case.q)
    prefill_attention(*case.tensors, [], [], 0.2, items=items, out=out)
    wanted, _ = case.reference(0.2)
    assert out[3:5].isnan().all()
    assert_near(out[[0, 1, 2, 5, 6, 7, 8]], wanted[[0, 1, 2, 5, 6, 7, 8]], torch.float32)


def test_nothing_to_do(device) -> None:
    case = paged_case(((0, 4), (0, 0)), device=device)
    assert attend(case)[0].shape == (0, 4, 64)


def test_what_is_not_covered_is_refused(device) -> None:
    case = paged_case(((1, 4),), kv_heads=1, group=17, device=device)
    with pytest.raises(ValueError, match="17 heads"):
        attend(case)
    case = paged_case(((1, 4),), device=device)
    case.k, case.v = case.k.int(), case.v.int()
    with pytest.raises(ValueError, match="caches of"):
        attend(case)
    case = paged_case(((1, 4),), device=device)
    case.table = case.table.long()
    with pytest.raises(ValueError, match="block tables"):
        attend(case)
    with pytest.raises(ValueError, match="tiles of"):
        attend(paged_case(((1, 4),), device=device), segment=31)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size"),
    [(1, 5, 80, 32), (2, 4, 128, 16), (1, 8, 256, 64), (3, 1, 100, 128)],
)
def test_sweep(dtype, deterministic, kv_heads, group, dim, block_size, device) -> None:
    chunks = [(n, n + before) for n in (1, 2, 37) for before in (0, 1, block_size, block_size + 1, 150)]
    case = paged_case(chunks, kv_heads, group, dim, block_size, dtype, device=device)
    for window in (None, 1, 33, 1000):
        check(case, window=window, deterministic=deterministic, segment=64)
