"""Tests that the needles of the GPU suite reveal kernels that mishandle a border."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

from tests.gpu_suite import needles
from tests.gpu_suite.case import TOLERANCE, worst
from tests.gpu_suite.needles import TRAP, Needle, borders
from tests.gpu_suite.paged import Heads, Paged
from tests.gpu_suite.step import planned

HEADS = Heads(8, 4, 128, 16)
CPU = torch.device("cpu")
FAR = 5 * TOLERANCE


def test_borders_are_where_tiles_blocks_and_segments_meet():
    found = borders(2100, splits=[700])
    assert {0, 15, 16, 63, 64, 127, 128, 1023, 1024, 2047, 2048, 2099, 699, 700} <= set(found)
    assert borders(1) == [0]
    assert all(0 <= at < 33 for at in borders(33))


def attended(paged: Paged, q: Tensor, needle: Needle, last: int, weights: dict[int, float]) -> Tensor:
    """Return the attention of the reader's heads over keys 0 … last, [group, dim].

    Args:
        weights: how often a key counts, by position; once by default.
    """
    heads, places = paged.heads, (paged.table[needle.sequence].long(), needle.head)
    k, v = (cache[places].flatten(0, 1)[: last + 1].double() for cache in (paged.k, paged.v))
    if paged.scale is not None:
        k, v = (t * paged.scale[places].flatten()[: last + 1, None] for t in (k, v))
    often = torch.ones(last + 1, dtype=torch.float64)
    for at, weight in weights.items():
        often[at] = weight
    rows = q[needle.reader].unflatten(0, (heads.kv, -1))[needle.head].double()
    return torch.softmax(rows @ k.T * heads.scale + often.log(), -1) @ v


def far_off(one: Tensor, other: Tensor) -> bool:
    """Return True if the worst head is far off."""
    return float(worst(one[None], other[None])) > FAR


def seen(paged: Paged, q: Tensor, found: Sequence[Needle], last_of: Callable[[Needle], int]) -> None:
    """Plant the needles and check that they are seen.

    A needle is seen if it is skipped or read twice, a trap if it is read at all.
    """
    needles.plant(paged, q, found)
    for needle in found:
        see, last = partial(attended, paged, q, needle), last_of(needle)
        if needle.times == TRAP:
            assert needle.position == last + 1
            assert far_off(see(last + 1, {}), see(last, {}))
        else:
            assert needle.position <= last
            assert far_off(see(last, {needle.position: 0.0}), see(last, {}))
            assert far_off(see(last, {needle.position: 2.0}), see(last, {}))


@pytest.mark.parametrize("codes", [None, "int8", "float8_e4m3fn"])
def test_a_key_left_out_or_read_twice_in_decode_is_seen(codes):
    torch.manual_seed(0)
    paged = Paged.random([2100, 517, 40, 1024], HEADS, torch.bfloat16, CPU, codes)
    found = needles.for_decode(paged, planned(paged, 1))
    assert {n.sequence for n in found if n.times == TRAP} == {0, 1, 2}, "1024 keys leave no room in a block"
    seen(paged, paged.queries(4), found, lambda needle: paged.contexts[needle.sequence] - 1)


def test_a_mask_that_is_one_off_in_prefill_is_seen():
    torch.manual_seed(0)
    queries, context = 200, 300
    paged = Paged.random([context], HEADS, torch.bfloat16, CPU)
    found = needles.for_prefill(paged, queries)
    assert {n.position for n in found if n.times == TRAP} > {127, 128}
    seen(paged, paged.queries(queries), found, lambda needle: needle.reader + context - queries)


def test_programs_borders_have_needles_too():
    """A plan that splits a row, and one with a shared prefix."""
    from batchinfer_kernels.gpu.attention_plan import SharedPrefix

    paged = Paged.random([5000] * 4, HEADS, torch.bfloat16, CPU, shared_keys=4096)
    plan = planned(paged, 1, [SharedPrefix(range(4), 4096)])
    splits = needles._splits(plan)
    assert set(splits) == {0, 1, 2, 3}
    assert all(0 in own and 4096 in own for own in splits.values())


def test_the_worst_row_and_head_is_named():
    right = torch.ones(3, 2, 4)
    ours = right.clone()
    ours[2, 1] *= 1.5
    found = worst(ours, right)
    assert (float(found), found.row, found.head) == (pytest.approx(0.5), 2, 1)
    assert str(found) == "0.5 in row 2, head 1"
    ours[1, 0, 0] = torch.nan
    assert (worst(ours, right).row, worst(ours, right).head) == (1, 0)
