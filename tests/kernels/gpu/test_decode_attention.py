"""Decode attention equals the reference, split or not, whatever the lengths and however many more were allowed for."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.gpu import attention_launch, part_room
from batchinfer_kernels.gpu.decode_attention import decode_attention
from tests.kernels.gpu.attention_cases import (
    DTYPES,
    assert_near,
    left_behind,
    paged_case,
    poisoned_like,
    splits_of,
)

LENGTHS = (0, 1, 15, 16, 17, 64, 129, 300)


def case_of(lengths=LENGTHS, *arguments, **options):
    return paged_case([(1, n) for n in lengths], *arguments, **options)


def check(case, scale=0.2, window=None, segment=None, longest=None, planned=None, **extras) -> None:
    """`longest`: as a graph for contexts of up to so many keys has it; `planned`: contexts before they grew."""
    device, contexts = case.q.device, planned or case.contexts
    out, lse = poisoned_like(case.q), torch.full(case.q.shape[:2], float("nan"), device=device)
    lengths = torch.tensor(case.contexts, dtype=torch.int32, device=device)
    deterministic = extras.get("deterministic", False)
    splits = splits_of(contexts, case, window, segment, deterministic, longest)
    decode_attention(*case.tensors, lengths, splits, scale, window, out=out, lse=lse, **case.scales, **extras)
    known = {k: v for k, v in extras.items() if k in ("soft_cap", "sinks")}
    wanted, wanted_lse = reference(case, scale, window, **known)
    assert_near(out, wanted, case.q.dtype)
    assert_near(lse, wanted_lse, case.q.dtype)


def reference(case, scale, window, sinks=None, **known):
    """What the reference cannot express, a query with a context of 0, is 0, and its sum the sink's."""
    chunks = [(min(n, c), c) for n, c in case.chunks]
    real = torch.tensor([n == 1 for n, _ in chunks], device=case.q.device)
    wanted, wanted_lse = (
        torch.zeros_like(case.q),
        torch.full(case.q.shape[:2], float("-inf"), device=case.q.device),
    )
    if sinks is not None:
        wanted_lse[:] = sinks
    q, case.chunks, case.q = case.q, chunks, case.q[real]
    wanted[real], wanted_lse[real] = case.reference(scale, window, sinks=sinks, **known)
    case.q, case.chunks = q, [(1, c) for _, c in chunks]
    return wanted, wanted_lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segment", [64, 512])
def test_lengths_of_all_kinds_share_a_launch(dtype, segment, device) -> None:
    check(case_of(dtype=dtype, device=device), segment=segment)


def test_items_that_a_graph_has_too_many_do_nothing(device, monkeypatch) -> None:
    for module in (attention_launch, part_room):
        monkeypatch.setattr(module, "PROGRAMS_PER_PROCESSOR", 24)
    monkeypatch.setattr(attention_launch, "LEAST_SEGMENT", 64)
    case = case_of(device=device)
    splits = splits_of(case.contexts, case, longest=1000)
    assert sorted(splits.items[:, 0].tolist()) == [*[-1] * 7, 1, 2, 3, 4, 5, *[6] * 3, *[7] * 5]
    check(case, longest=1000)
    check(case_of((0, 1, 3), device=device), longest=1000)


def test_a_row_that_has_grown_is_read_to_its_end(device) -> None:
    for window in (None, 70):
        check(case_of((0, 3, 70, 300), device=device), window=window, segment=64, planned=(0, 1, 65, 129))


@pytest.mark.parametrize("window", [1, 16, 40, 200])
def test_a_window_hides_what_is_behind_it(window, device) -> None:
    for segment in (64, 512):
        check(left_behind(case_of(device=device), window), window=window, segment=segment)


@pytest.mark.parametrize("extras", [{"soft_cap": 1.5}, {"sinks": True}, {"soft_cap": 2.0, "sinks": True}])
def test_soft_cap_and_sinks(extras, device) -> None:
    case = case_of(device=device)
    if "sinks" in extras:
        extras = {**extras, "sinks": torch.linspace(-1, 2, case.q.shape[1], device=device)}
    for segment in (64, 512):
        check(case, segment=segment, **extras)
    check(case, window=20, segment=64, deterministic=True, **extras)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 3), (1, 7), (2, 16)])
def test_groups_of_heads(kv_heads, group, device) -> None:
    check(case_of((9, 140), kv_heads, group, device=device), segment=64)


@pytest.mark.parametrize("dim", [72, 80, 96, 128, 160, 256])
def test_head_sizes_are_padded_within(dim, device) -> None:
    check(case_of((9, 100), dim=dim, device=device, dtype=torch.float16), segment=128)


@pytest.mark.parametrize("block_size", [32, 48, 128])
def test_block_sizes(block_size, device) -> None:
    check(
        case_of([block_size - 1, block_size, block_size + 1], block_size=block_size, device=device),
        segment=64,
    )


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coded_caches(dtype, cache_dtype, device) -> None:
    case = case_of((17, 100), dtype=dtype, cache_dtype=cache_dtype, device=device)
    check(case, segment=64)
    check(case, segment=256)


def test_rows_choose_queries_and_sequences(device) -> None:
    """Single queries between chunks of other sequences: only their rows are written."""
    case = paged_case(((3, 17), (1, 100), (2, 9), (1, 30)), device=device)
    rows = torch.tensor([[3, 1], [6, 3]], dtype=torch.int32, device=device)
    lengths = torch.tensor(case.contexts, dtype=torch.int32, device=device)
    wanted, wanted_lse = case.reference(0.2)
    for segment in (64, 256):
        splits = splits_of((100, 30), case, segment=segment)
        out, lse = poisoned_like(case.q), torch.full(case.q.shape[:2], float("nan"), device=device)
        decode_attention(*case.tensors, lengths, splits, 0.2, rows=rows, out=out, lse=lse)
        assert_near(out[[3, 6]], wanted[[3, 6]], torch.float32)
        assert_near(lse[[3, 6]], wanted_lse[[3, 6]], torch.float32)
        assert out[[0, 1, 2, 4, 5]].isnan().all()


def test_no_sequences(device) -> None:
    case = paged_case(((0, 4),), device=device)
    lengths = torch.zeros(0, dtype=torch.int32, device=device)
    assert decode_attention(*case.tensors, lengths, splits_of((), case), 1.0).shape == (0, 4, 64)


def test_what_does_not_fit_is_refused(device) -> None:
    case = case_of((9, 20), device=device)
    lengths = torch.tensor(case.contexts, dtype=torch.int32, device=device)
    splits = splits_of(case.contexts, case)
    for wrong in (lengths.long(), lengths[:1]):
        with pytest.raises(ValueError, match="lengths are"):
            decode_attention(*case.tensors, wrong, splits, 1.0)
    with pytest.raises(ValueError, match="rows are"):
        decode_attention(*case.tensors, lengths, splits, 1.0, rows=lengths[:, None])
    with pytest.raises(ValueError, match="window of None, for 2 with 7"):
        decode_attention(*case.tensors, lengths, splits, 1.0, 7)
    with pytest.raises(ValueError, match="1 rows"):
        decode_attention(*case.tensors, lengths, splits_of((9,), case), 1.0)
    case.table = case.table[:1]
    with pytest.raises(ValueError, match="1 block tables"):
        decode_attention(*case.tensors, lengths, splits, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size"),
    [(1, 5, 80, 32), (2, 4, 128, 16), (1, 8, 256, 64), (3, 1, 100, 128)],
)
def test_sweep(dtype, deterministic, kv_heads, group, dim, block_size, device) -> None:
    lengths = (0, 1, block_size - 1, block_size, block_size + 1, 255, 256, 257, 600)
    case = case_of(lengths, kv_heads, group, dim, block_size, dtype, device=device)
    for window in (None, 1, 33, 1000):
        for segment in (64, 256):
            check(case, window=window, deterministic=deterministic, segment=segment)
